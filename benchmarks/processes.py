"""The CPU time and memory of processes, from /proc. Nothing is measured here."""

import os
from pathlib import Path
from typing import Final

_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")
_BYTES_PER_KIB: Final = 1024


def cpu_seconds(pid: int) -> float:
    """Return a process's user and system time so far, including all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _PER_SECOND


def own_peak_bytes() -> int:
    """Return the largest resident memory of this process so far."""
    # Not getrusage, whose maximum includes the process from which this one was forked.
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak_kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    return int(peak_kib) * _BYTES_PER_KIB
