"""`gpuledger reports`: handles signals, then imports and runs `gpuledger_reports.command`."""

from gpuledger.programs import end_on_signals, end_process


def main() -> None:
    """Serve reports until a signal, then end the process."""
    end_on_signals()
    from gpuledger_reports.command import main as run  # noqa: PLC0415  # slow: a signal may come

    end_process(run())


if __name__ == "__main__":
    main()
