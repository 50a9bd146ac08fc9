"""The CPU use of other processes, from /proc. Nothing is measured here."""

import os
from pathlib import Path
from typing import Final

_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """Return a process's user and system time so far, including all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _PER_SECOND
