"""`gpuledger`: heeds Ctrl-C, then imports and runs `gpuledger_cli.command`."""

import os
import sys

from gpuledger.programs import INTERRUPTED, end_on_interrupt, output_error_code, raise_on_interrupt


def main(argv: list[str] | None = None) -> int:
    """Run one command; return the exit code, which is 130 after Ctrl-C.

    See `output_error_code` for the code if standard output cannot be written.
    """
    end_on_interrupt(INTERRUPTED)
    # deltalake takes it when it is imported; its warnings come again as the cause of an error.
    os.environ.setdefault("RUST_LOG", "error")
    from gpuledger_cli.command import main as run  # noqa: PLC0415  # takes long enough for Ctrl-C to come

    try:
        raise_on_interrupt()
        code = run(argv)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        failed = output_error_code(error)
        if failed is None:
            raise
        return failed
    return code


if __name__ == "__main__":
    sys.exit(main())
