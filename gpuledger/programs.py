"""Start and end of a program: its subcommand, its signals and its exit.

`gpuledger` starts here: `main` dispatches on the first argument, before anything is imported that
a component does not need. It names components by strings, because the core imports none.

Signals count from a program's first line on, so nothing here may import anything slow; the
interpreter's own start cannot be covered from Python.
"""

import os
import signal
import sys

TYPE_CHECKING = False  # as `typing` has it, which takes long to import
if TYPE_CHECKING:
    from typing import Final, NoReturn

COMPONENTS: "Final" = {
    "agent": ("gpuledger_agent", "agent"),
    "podwatch": ("gpuledger_enricher.podwatch", "enricher"),
    "join": ("gpuledger_enricher.join", "enricher"),
    "sink": ("gpuledger_sinks", "sinks"),
    "reports": ("gpuledger_reports", "reports"),
}
"""By the name of a component: the package whose `__main__` runs it, and the extra it needs."""
INTERRUPTED: "Final" = 130
PIPE_CLOSED: "Final" = 141
"""The code of a program that SIGPIPE ends."""
_OURS: "Final" = "gpuledger"
_USER_ERROR: "Final" = 2


def main() -> "int | None":
    """Run the component or the command that the first argument names; return its exit code.

    `gpuledger help X` is `gpuledger X --help`. From `sys.argv` on, a component is a program of two
    words, such as `gpuledger agent`.
    """
    if sys.argv[1:2] == ["help"]:
        sys.argv[1:] = [*sys.argv[2:], "--help"]
    name = "".join(sys.argv[1:2])
    if name in COMPONENTS:
        package, extra = COMPONENTS[name]
        sys.argv[:2] = [f"gpuledger {name}"]
        return _run(f"{package}.__main__", script=sys.argv[0], extra=extra)
    if name == "config":
        return _run_config()
    return _run("gpuledger_cli.__main__", script="gpuledger", extra="demo")


def _run_config() -> "int | None":
    """Run `gpuledger config`, which needs only the extra of the component that it explains."""
    end_on_interrupt(INTERRUPTED)
    sys.argv[:2] = ["gpuledger config"]
    _, extra = COMPONENTS.get("".join(sys.argv[2:3]), ("", "demo"))
    try:
        code = _run("gpuledger.settings.explain_command", script=sys.argv[0], extra=extra)
        sys.stdout.flush()
    except OSError as error:
        if (code := output_error_code(error)) is None:
            raise
    return code


def _run(module: str, *, script: str, extra: str) -> "int | None":
    """Run a program, or say in one line which extra has the distribution that it lacks."""
    from importlib import import_module  # noqa: PLC0415  # not before signals are heeded

    try:
        code: int | None = import_module(module).main()
    except ModuleNotFoundError as error:
        if (error.name or _OURS).startswith(_OURS):  # an internal error, not a missing extra
            raise
        sys.stderr.write(
            f"{script}: the module {error.name} is not installed: install gpuledger[{extra}]\n"
        )
        sys.exit(_USER_ERROR)
    return code


def end_on_signals() -> None:
    """Make SIGTERM and SIGINT end the process with exit code 0, until the work takes them over.

    For a deployable's first line: nothing has begun that would have to be cleaned up. As the first
    process of a container it would otherwise not even end, as Linux spares that from both.
    Standard streams that are closed lead nowhere from then on.
    """
    _replace_closed_streams()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))


def end_on_interrupt(code: int) -> None:
    """Make SIGINT end the process with this exit code, until `raise_on_interrupt`.

    Standard streams that are closed lead nowhere from then on, but writing to standard output
    fails: the output is what the command is run for.
    """
    _replace_closed_streams(output=os.O_RDONLY)
    signal.signal(signal.SIGINT, lambda *_: os._exit(code))


def output_error_code(error: OSError) -> "int | None":
    """Return the exit code for an error of writing the output, and write one line about it.

    A reader that is gone, as in `gpuledger … | head`, is silent and 141, any other error 2. `None`
    means that the error is about something else.
    """
    import errno  # noqa: PLC0415  # not before signals are heeded

    of_writing = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
    # One of opening a file has its name.
    if error.errno not in of_writing or error.filename is not None:
        return None
    # Python would write what is left once more at its end, and complain.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if error.errno == errno.EPIPE:
        return PIPE_CLOSED
    sys.stderr.write(f"{_OURS}: cannot write the output: {error.strerror}\n")
    return _USER_ERROR


def _replace_closed_streams(*, output: int = os.O_RDWR) -> None:
    """Open the null device in the place of each standard stream that the process has not got.

    The next file or socket that is opened would get its number, and be written to as the log.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            mode = output if name == "stdout" else os.O_RDWR
            opened = os.open(os.devnull, mode)  # the lowest number that is free: this one
            os.set_inheritable(opened, True)  # noqa: FBT003  # the system's own name for it
        if getattr(sys, name) is None:
            stream = open(number, "w" if number else "r", closefd=False)  # noqa: SIM115  # for good
            setattr(sys, name, stream)


def raise_on_interrupt() -> None:
    """Make SIGINT raise `KeyboardInterrupt`, as Python itself does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def end_process(code: int) -> "NoReturn":
    """End the process with this exit code at once, with all that was written on its way.

    Python's own end takes the interpreter from under threads that are in a library's call, which
    kills the process where that library is written in Rust (deltalake: SIGSEGV, each time); and it
    waits for threads that are no daemons. By now nothing is left that anybody waits for.
    """
    from contextlib import suppress  # noqa: PLC0415  # not before signals are heeded

    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # whoever read it has gone, or it was closed
            stream.flush()
    os._exit(code)


def freeze_collector(*thresholds: int) -> None:
    """Have the collector leave alone what there is by now, and search the rest less often.

    To be called once what stays is there: a cache that was read, a machine that was opened. What
    is garbage by then is collected first, as what is left alone would never be. The thresholds are
    those of `gc.set_threshold`. Blocks for as long as one full search takes.
    """
    import gc  # noqa: PLC0415  # not before signals are heeded

    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds)
