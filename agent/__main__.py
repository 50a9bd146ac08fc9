"""`gpuledger-agent`: heeds signals, then imports and runs `agent.command`."""

import sys

from gpuledger.early import end_on_signals


def main() -> int:
    """Run the agent until a signal; return the exit code."""
    end_on_signals()
    from agent.command import main as run  # noqa: PLC0415  # takes long enough for a signal to come

    return run()


if __name__ == "__main__":
    sys.exit(main())
