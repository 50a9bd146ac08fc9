"""The command that writes what is generated from the code into a directory, or says why not."""

import sys
from collections.abc import Callable
from pathlib import Path

from gpuledger.errors import UserError


def generate(write: Callable[[Path], None], *, into: str) -> int:
    """Write into the directory that the first argument names, else `into`; gives the exit code.

    It is 2, with one line, for what the user can put right.
    """
    try:
        write(Path(sys.argv[1] if len(sys.argv) > 1 else into))
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0
