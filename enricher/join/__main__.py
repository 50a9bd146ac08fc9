"""`gpuledger-join`: heeds signals, then imports and runs `enricher.join.command`."""

import sys

from gpuledger.early import end_on_signals


def main() -> int:
    """Run the join until a signal; return the exit code."""
    end_on_signals()
    from enricher.join.command import main as run  # noqa: PLC0415  # takes long enough for a signal to come

    return run()


if __name__ == "__main__":
    sys.exit(main())
