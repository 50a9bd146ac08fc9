"""`gpuledger-join`: heeds SIGTERM, then imports and runs `enricher.join.command`."""

import sys

from gpuledger.early import end_on_sigterm


def main() -> int:
    """Run the join until a signal; return the exit code."""
    end_on_sigterm()
    from enricher.join.command import main as run  # noqa: PLC0415  # takes long enough for a signal to come

    return run()


if __name__ == "__main__":
    sys.exit(main())
