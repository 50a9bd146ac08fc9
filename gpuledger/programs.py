"""How a program of ours begins and ends: its packages are found, and signals count from the first.

In the wheel `agent`, `cli`, `enricher`, `reports`, `simulator` and `sinks` lie in the folder
`_programs` inside this package. Names as general as these may be somebody else's in site-packages,
so only a process that runs one of our programs has that folder on its path (ADR 024). In a checkout
they lie beside this package, and there is no such folder.

Each console script is a function here; `python -m gpuledger NAME` runs any other module by its
name. Programs are named by strings: nothing that all share may import one.

Signals count from a program's own first line on, so nothing here may import what takes time; the
interpreter's start, before the first line of any module of ours, cannot be covered from Python. In
between, once what stays is there, the garbage collector is told to leave it alone.
"""

import os
import signal
import sys

TYPE_CHECKING = False  # as `typing` has it, which takes long to import
if TYPE_CHECKING:
    from typing import Final, NoReturn

FOLDER: "Final" = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_programs")  # noqa: PTH100, PTH118, PTH120  # pathlib takes long to import

_OURS: "Final" = ("gpuledger", "agent", "cli", "enricher", "reports", "simulator", "sinks", "")
_USER_ERROR: "Final" = 2


def find_programs() -> None:
    """Put the programs' folder on the path of this process, where there is one."""
    # First, so that neither a distribution nor a folder of the same name comes before ours. A
    # process that multiprocessing spawns is given the path of the one that spawns it.
    if FOLDER not in sys.path and os.path.isdir(FOLDER):  # noqa: PTH112  # as above
        sys.path.insert(0, FOLDER)


def run_agent() -> None:
    """Run `gpuledger-agent`."""
    _run("gpuledger_agent.__main__", script="gpuledger-agent", extra="agent")


def run_podwatch() -> None:
    """Run `gpuledger-podwatch`."""
    _run("gpuledger_enricher.podwatch.__main__", script="gpuledger-podwatch", extra="enricher")


def run_join() -> None:
    """Run `gpuledger-join`."""
    _run("gpuledger_enricher.join.__main__", script="gpuledger-join", extra="enricher")


def run_sink() -> None:
    """Run `gpuledger-sink`."""
    _run("gpuledger_sinks.__main__", script="gpuledger-sink", extra="sinks")


def run_reports() -> None:
    """Run `gpuledger-reports`."""
    _run("gpuledger_reports.__main__", script="gpuledger-reports", extra="reports")


def run_command() -> "int | None":
    """Run `gpuledger`; return its exit code."""
    return _run("gpuledger_cli.__main__", script="gpuledger", extra="demo")


def _run(module: str, *, script: str, extra: str) -> "int | None":
    """Run a program, or say in one line which extra has the distribution that it lacks."""
    from importlib import import_module  # noqa: PLC0415  # not before signals are heeded

    find_programs()
    try:
        code: int | None = import_module(module).main()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in _OURS:  # a mistake of ours, not one of the installation
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

    Standard streams that are closed lead nowhere from then on.
    """
    _replace_closed_streams()
    signal.signal(signal.SIGINT, lambda *_: os._exit(code))


def _replace_closed_streams() -> None:
    """Open the null device in the place of each standard stream that the process has not got.

    The next file or socket that is opened would get its number, and be written to as the log.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            os.set_inheritable(opened, True)  # noqa: FBT003  # the system's own name for it
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r"))  # noqa: SIM115, PTH123  # for good


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
