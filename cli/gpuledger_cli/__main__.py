"""`gpuledger`: handles Ctrl-C, then imports and runs `gpuledger_cli.command`."""

import os
import sys

from gpuledger.programs import INTERRUPTED, end_on_interrupt, output_error_code, raise_on_interrupt


def main(argv: list[str] | None = None) -> int:
    """Run one command; return its exit code.

    The code is 130 after Ctrl-C; see `output_error_code` for errors of standard output. An
    unexpected error is printed with its traceback, and the code is `OWN_ERROR`.
    """
    end_on_interrupt(INTERRUPTED)
    # deltalake reads this variable at import. Its warnings would only repeat the causes of errors.
    os.environ.setdefault("RUST_LOG", "error")
    from gpuledger_cli.command import OWN_ERROR, USER_ERROR  # noqa: PLC0415  # as the next one
    from gpuledger_cli.command import main as run  # noqa: PLC0415  # slow: Ctrl-C may come meanwhile

    try:
        raise_on_interrupt()
        code = run(argv)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except UnicodeEncodeError as error:
        sys.stderr.write(
            f"gpuledger: cannot write the output as {error.encoding}: {error.reason}\n"
        )
        return USER_ERROR
    except Exception as error:  # noqa: BLE001  # the last resort, so that the exit code is right
        failed = output_error_code(error) if isinstance(error, OSError) else None
        if failed is not None:
            return failed
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stderr.write("gpuledger: internal error; please report it with the lines above\n")
        return OWN_ERROR
    return code


if __name__ == "__main__":
    sys.exit(main())
