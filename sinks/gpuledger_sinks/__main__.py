"""`gpuledger sink`: handles signals, then runs `gpuledger_sinks.command`."""

from gpuledger.programs import end_on_signals, end_process


def main() -> None:
    """Run the sink named on the command line until a signal comes, then end the process."""
    end_on_signals()
    from gpuledger_sinks.command import main as run  # noqa: PLC0415  # takes long enough for a signal to come

    end_process(run())


if __name__ == "__main__":
    main()
