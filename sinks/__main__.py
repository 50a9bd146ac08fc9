"""`gpuledger-sink`: heeds signals, then imports and runs `sinks.command`."""

import sys

from gpuledger.early import end_on_signals


def main() -> int:
    """Run the sink that the command line names until a signal; return the exit code."""
    end_on_signals()
    from sinks.command import main as run  # noqa: PLC0415  # takes long enough for a signal to come

    return run()


if __name__ == "__main__":
    sys.exit(main())
