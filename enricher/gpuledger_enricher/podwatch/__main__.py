"""`gpuledger podwatch`: handles signals, then runs `gpuledger_enricher.podwatch.pod_watch`."""

from gpuledger.programs import end_on_signals, end_process


def main() -> None:
    """Run podwatch until a signal arrives, then end the process with podwatch's exit code."""
    end_on_signals()
    from gpuledger_enricher.podwatch.pod_watch import main as run  # noqa: PLC0415  # takes long enough for a signal to come

    end_process(run())


if __name__ == "__main__":
    main()
