"""`gpuledger`: heeds Ctrl-C, then imports and runs `cli.command`."""

import sys

from gpuledger.programs import end_on_interrupt, raise_on_interrupt

INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run one command; return the exit code, which is 130 after Ctrl-C."""
    end_on_interrupt(INTERRUPTED)
    from cli.command import main as run  # noqa: PLC0415  # takes long enough for Ctrl-C to come

    try:
        raise_on_interrupt()
        return run(argv)
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
