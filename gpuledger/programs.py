"""Where a process of ours begins: finds the packages of the programs, and runs the one called for.

In the wheel `agent`, `cli`, `enricher`, `reports`, `simulator` and `sinks` lie in the folder
`_programs` inside this package. Names as general as these may be somebody else's in site-packages,
so only a process that runs one of our programs has that folder on its path (ADR 024). In a checkout
they lie beside this package, and there is no such folder.

Each console script is a function here; `python -m gpuledger NAME` runs any other module by its
name. Programs are named by strings: nothing that all share may import one. Nothing here may import
what takes time, as signals count from a program's own first line on.
"""

import os
import sys
from importlib import import_module

TYPE_CHECKING = False  # as `typing` has it, which takes long to import
if TYPE_CHECKING:
    from typing import Final

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
    _run("agent.__main__", script="gpuledger-agent", extra="agent")


def run_podwatch() -> None:
    """Run `gpuledger-podwatch`."""
    _run("enricher.podwatch.__main__", script="gpuledger-podwatch", extra="enricher")


def run_join() -> None:
    """Run `gpuledger-join`."""
    _run("enricher.join.__main__", script="gpuledger-join", extra="enricher")


def run_sink() -> None:
    """Run `gpuledger-sink`."""
    _run("sinks.__main__", script="gpuledger-sink", extra="sinks")


def run_command() -> "int | None":
    """Run `gpuledger`; return its exit code."""
    return _run("cli.__main__", script="gpuledger", extra="demo")


def _run(module: str, *, script: str, extra: str) -> "int | None":
    """Run a program, or say in one line which extra has the distribution that it lacks."""
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
