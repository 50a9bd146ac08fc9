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


def find_programs() -> None:
    """Put the programs' folder on the path of this process, where there is one."""
    # First, so that neither a distribution nor a folder of the same name comes before ours. A
    # process that multiprocessing spawns is given the path of the one that spawns it.
    if FOLDER not in sys.path and os.path.isdir(FOLDER):  # noqa: PTH112  # as above
        sys.path.insert(0, FOLDER)


def run_agent() -> None:
    """Run `gpuledger-agent`."""
    find_programs()
    import_module("agent.__main__").main()


def run_podwatch() -> None:
    """Run `gpuledger-podwatch`."""
    find_programs()
    import_module("enricher.podwatch.__main__").main()


def run_join() -> None:
    """Run `gpuledger-join`."""
    find_programs()
    import_module("enricher.join.__main__").main()


def run_sink() -> None:
    """Run `gpuledger-sink`."""
    find_programs()
    import_module("sinks.__main__").main()


def run_command() -> int:
    """Run `gpuledger`; return its exit code."""
    find_programs()
    code: int = import_module("cli.__main__").main()
    return code
