"""`gpuledger`: heeds Ctrl-C, then imports and runs `gpuledger_cli.command`."""

import os
import sys

from gpuledger.programs import INTERRUPTED, end_on_interrupt, raise_on_interrupt

PIPE_CLOSED = 141
"""As of a program that SIGPIPE ends."""


def main(argv: list[str] | None = None) -> int:
    """Run one command; return the exit code, which is 130 after Ctrl-C.

    It is 141 where nobody reads on what is printed, as in `gpuledger … | head`.
    """
    end_on_interrupt(INTERRUPTED)
    from gpuledger_cli.command import main as run  # noqa: PLC0415  # takes long enough for Ctrl-C to come

    try:
        raise_on_interrupt()
        code = run(argv)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Python would complain of it once more at its end, when it prints what is left.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    return code


if __name__ == "__main__":
    sys.exit(main())
