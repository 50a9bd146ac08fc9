"""The seam to `/proc`: files by their path, and a process as its files show it.

A pid alone names nobody: it is given to another process as soon as its own is gone. So the start
time is read before and after the cgroup, and both must be the same.
"""

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final, Protocol

from agent.processes.cgroup import Location, NodePaths, find_node_paths, locate

BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"
_OWN_CGROUP: Final = "/proc/self/cgroup"
_ATTEMPTS: Final = 3
_AT_ONCE_BYTES: Final = 65_536
_START_FIELD: Final = (
    19  # field 22 of the line; the name in parentheses, fields 1 and 2, is cut off
)
_NS: Final = 1_000_000_000
_CLOCK_TICKS: Final = os.sysconf("SC_CLK_TCK")


class Procfs(Protocol):
    """Where the node's files under `/proc` are read."""

    def read(self, path: str) -> bytes:
        """Return a file's bytes; raises OSError where it cannot be read."""


class SystemProcfs:
    """The machine's `/proc`, or the node's where that is mounted elsewhere."""

    def __init__(self, root: Path = Path("/proc")) -> None:
        self._root = str(root)

    def read(self, path: str) -> bytes:
        """Return the bytes of `/proc/...`; raises OSError where it cannot be read."""
        # Read many times a tick, so without the layers that pathlib and io put between.
        file = os.open(f"{self._root}/{path.removeprefix('/proc/')}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            content = part = os.read(file, _AT_ONCE_BYTES)
            while part:
                part = os.read(file, _AT_ONCE_BYTES)
                content += part
        finally:
            os.close(file)
        return content


@dataclass(frozen=True, kw_only=True)
class ProcessFacts:
    """A process as `/proc` shows it."""

    started_boottime_ns: int | None = None
    """Start since boot, in the kernel's steps of 10 ms; `None` where it could not be read."""
    command: str | None = None
    """The kernel's name of the program."""
    location: Location = Location()  # noqa: RUF009  # frozen, so one for all does no harm
    """Where it runs."""


UNREADABLE: Final = ProcessFacts()


class ProcessReader:
    """Reads the processes of one node."""

    def __init__(self, procfs: Procfs) -> None:
        self._procfs = procfs
        node_paths = _read_node_paths(procfs)
        self._locate = lru_cache(maxsize=256)(lambda cgroup: _locate(cgroup, node_paths))

    def read(self, pid: int) -> ProcessFacts:
        """Return what a process shows: `UNREADABLE` if it is gone, hidden, or another one now."""
        read = self._procfs.read
        try:
            for _ in range(_ATTEMPTS):
                command, started_ns = _parse_stat(read(f"/proc/{pid}/stat"))
                cgroup = read(f"/proc/{pid}/cgroup")
                if _parse_stat(read(f"/proc/{pid}/stat"))[1] == started_ns:
                    return ProcessFacts(
                        started_boottime_ns=started_ns,
                        command=command,
                        location=self._locate(cgroup),
                    )
        except (OSError, ValueError, IndexError):
            return UNREADABLE
        return UNREADABLE


def read_boot_id(procfs: Procfs) -> str:
    """Return the kernel's id of this boot; raises OSError where it cannot be read."""
    return procfs.read(BOOT_ID).decode("ascii", "replace").strip()


def _parse_stat(stat: bytes) -> tuple[str, int]:
    """Return name and start time; the name may itself hold spaces and parentheses."""
    head, _, rest = stat.rpartition(b")")
    ticks = int(rest.split()[_START_FIELD])
    command = head.partition(b"(")[2].decode("utf-8", "replace")
    return command, ticks * _NS // _CLOCK_TICKS


def _read_node_paths(procfs: Procfs) -> NodePaths:
    try:
        return find_node_paths(procfs.read(_OWN_CGROUP).decode("utf-8", "replace"))
    except OSError:
        return {}  # so no pod's path is shortened


def _locate(cgroup: bytes, node_paths: NodePaths) -> Location:
    return locate(cgroup.decode("utf-8", "replace"), node_paths=node_paths)
