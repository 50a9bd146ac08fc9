"""`gpuledger join`: handles signals, then runs `gpuledger_enricher.join.join_command`."""

from gpuledger.programs import end_on_signals, end_process


def main() -> None:
    """Run the join until a signal arrives, then end the process with the join's exit code."""
    end_on_signals()
    from gpuledger_enricher.join.join_command import main as run  # noqa: PLC0415  # takes long enough for a signal to come

    end_process(run())


if __name__ == "__main__":
    main()
