"""Starts and ends programs: subcommands, signals and exit.

`gpuledger` starts here: `main` dispatches on the first argument, before it imports anything that
the component does not need. Components are named by strings, because the core imports none of them.

Signals are handled from a program's first line on, so nothing here may import anything slow.
Signals that arrive while the interpreter itself starts cannot be handled in Python.
"""

import os
import signal
import sys

TYPE_CHECKING = False  # instead of `typing.TYPE_CHECKING`, because importing `typing` is slow
if TYPE_CHECKING:
    from typing import Final, NoReturn

COMPONENTS: "Final" = {
    "agent": ("gpuledger_agent", "agent"),
    "podwatch": ("gpuledger_enricher.podwatch", "enricher"),
    "join": ("gpuledger_enricher.join", "enricher"),
    "sink": ("gpuledger_sinks", "sinks"),
    "reports": ("gpuledger_reports", "reports"),
}
"""For each component: the package whose `__main__` runs it, and the extra that installs it."""
_STANDALONE: "Final" = {"standalone": ("gpuledger_cli.standalone", "demo")}
"""The pipeline in one process, for one machine."""
INTERRUPTED: "Final" = 130
PIPE_CLOSED: "Final" = 141
"""Exit code of a program that SIGPIPE ends."""
_PRINTING: "Final" = {"-h", "--help", "--print-config", "--version"}
"""Options with which a component only prints something and ends."""
_OURS: "Final" = "gpuledger"
_USER_ERROR: "Final" = 2


def main() -> "int | None":
    """Run the component or command that the first argument names; return its exit code.

    `gpuledger help X` is the same as `gpuledger X --help`. In `sys.argv`, a component becomes a
    program with a two-word name, such as `gpuledger agent`.
    """
    if sys.argv[1:2] == ["help"]:
        sys.argv[1:] = [*sys.argv[2:], "--help"]
    name = "".join(sys.argv[1:2])
    if found := (COMPONENTS | _STANDALONE).get(name):
        package, extra = found
        sys.argv[:2] = [f"gpuledger {name}"]
        run = _run if _PRINTING.isdisjoint(sys.argv) else _run_and_print
        return run(f"{package}.__main__", script=sys.argv[0], extra=extra)
    if name == "config":
        end_on_interrupt(INTERRUPTED)
        sys.argv[:2] = ["gpuledger config"]
        _, extra = COMPONENTS.get("".join(sys.argv[2:3]), ("", "demo"))
        return _run_and_print("gpuledger.settings.explain_command", script=sys.argv[0], extra=extra)
    return _run("gpuledger_cli.__main__", script="gpuledger", extra="demo")


def _run_and_print(module: str, *, script: str, extra: str) -> "int | None":
    """Run a program that only prints; if its output cannot be written, return the exit code."""
    try:
        try:
            return _run(module, script=script, extra=extra)
        finally:
            sys.stdout.flush()
    except OSError as error:
        if (code := output_error_code(error)) is None:
            raise
    return code


def _run(module: str, *, script: str, extra: str) -> "int | None":
    """Run a program; if a distribution is missing, print the extra that installs it."""
    from importlib import import_module  # noqa: PLC0415  # not before signals are handled

    try:
        code: int | None = import_module(module).main()
    except ModuleNotFoundError as error:
        if (error.name or _OURS).startswith(_OURS):  # an internal error, not a missing extra
            raise
        sys.stderr.write(f"{script}: {describe_missing(error, extra)}\n")
        sys.exit(_USER_ERROR)
    return code


def describe_missing(error: ModuleNotFoundError, extra: str) -> str:
    """Return the message for a missing module, with the command that installs its extra."""
    # The dependencies only: installing `.[extra]` would replace an editable installation. With this
    # Python, because `pip` may belong to another one.
    install = f"{sys.executable} -m pip install -r requirements/{extra}.lock"
    return f"the module {error.name} is not installed; run `{install}` in a checkout of gpuledger"


def end_on_signals() -> None:
    """Make SIGTERM and SIGINT end the process with exit code 0, until other handlers are set.

    A component calls this first, when nothing has to be cleaned up yet. Without a handler, the
    first process of a container would not end at all, because Linux ignores both signals for that
    process by default. Closed standard streams are replaced by the null device.
    """
    _replace_closed_streams()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))


def end_on_interrupt(code: int) -> None:
    """Make SIGINT end the process with this exit code, until `raise_on_interrupt` is called.

    Closed standard streams are replaced by the null device, but writing to a closed standard output
    fails, because the output is the purpose of the command.
    """
    _replace_closed_streams(output=os.O_RDONLY)
    signal.signal(signal.SIGINT, lambda *_: os._exit(code))


def output_error_code(error: OSError) -> "int | None":
    """Return the exit code for an error in writing the output, and print one line about it.

    If the reader is gone, as in `gpuledger … | head`, the code is 141 and nothing is printed; for
    any other error it is 2. `None` means that the error has another cause.
    """
    import errno  # noqa: PLC0415  # not before signals are handled

    of_writing = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
    # An error in opening a file has a file name.
    if error.errno not in of_writing or error.filename is not None:
        return None
    # Otherwise, Python would try to write the rest again at exit, and report an error.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if error.errno == errno.EPIPE:
        return PIPE_CLOSED
    sys.stderr.write(f"{_OURS}: cannot write the output: {error.strerror}\n")
    return _USER_ERROR


def _replace_closed_streams(*, output: int = os.O_RDWR) -> None:
    """Open the null device for each standard stream that is closed.

    Otherwise, the next opened file or socket would get the stream's number and receive the log.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            mode = output if name == "stdout" else os.O_RDWR
            opened = os.open(os.devnull, mode)  # gets the lowest free number: this one
            os.set_inheritable(opened, True)  # noqa: FBT003  # the standard library's signature
        if getattr(sys, name) is None:
            stream = open(number, "w" if number else "r", closefd=False)  # noqa: SIM115  # stays open
            setattr(sys, name, stream)


def raise_on_interrupt() -> None:
    """Make SIGINT raise `KeyboardInterrupt`, which is Python's default."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def end_process(code: int) -> "NoReturn":
    """Flush standard output and error, then end the process at once with this exit code.

    Call this only if there is no thread left to wait for. Python's normal exit waits for non-daemon
    threads, and shuts down the interpreter while other threads may be in library calls. This
    crashes the process if the library is written in Rust (deltalake: SIGSEGV, every time).
    """
    from contextlib import suppress  # noqa: PLC0415  # not before signals are handled

    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the reader is gone, or the stream was closed
            stream.flush()
    os._exit(code)


def freeze_collector(*thresholds: int) -> None:
    """Exclude existing objects from garbage collection, and collect the rest less often.

    Call this once long-lived objects exist, such as a filled cache or an opened device. Garbage
    is collected first, because excluded objects are never freed. The thresholds are the arguments
    of `gc.set_threshold`. Blocks for the time of one full collection.
    """
    import gc  # noqa: PLC0415  # not before signals are handled

    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds)
