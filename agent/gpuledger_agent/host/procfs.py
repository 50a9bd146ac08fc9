"""The seam to `/proc`: files by path, a process as its files show it, and whose `/proc` it is.

A pid alone names nobody: it is given to another process as soon as its own is gone. So the start
time is read before and after the cgroup, and both must be the same.

The driver names processes by their pids in the machine's first pid namespace. A `/proc` of another
namespace has the same numbers for other processes, so reading them would book to a wrong container
without anybody noticing. The inodes of `/proc/1/ns/pid` and `/proc/self/ns/pid` do not show that:
without `hostPID` process 1 is the container's own first process, and both are equal just as on the
machine. The kernel's own threads do: they live in the first namespace alone, their parent
`kthreadd` is always process 2, and the kernel marks them with a flag that no program can give
itself. Every user may read that, wherever `/proc` is mounted, and it is of the mounted `/proc`
rather than of the reader. A node that is itself a container (kind, k3d, a container with its own
kubelet) has none either, rightly: the driver's pids are those of the machine below.
"""

import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final, Literal, Protocol

from gpuledger.clock import NS_PER_SECOND
from gpuledger_agent.core.processes.table import UNREADABLE, Location, ProcessFacts
from gpuledger_agent.host.cgroup import NodePaths, find_node_paths, locate

BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"
_MEMORY: Final = "/proc/meminfo"
_OWN_CGROUP: Final = "/proc/self/cgroup"
# The node's first process, and the kernel's, which is at the root as well.
_ROOT_CGROUPS: Final = ("/proc/1/cgroup", "/proc/2/cgroup")
# The kernel writes kB and means KiB.
_MEMORY_TOTAL: Final = re.compile(rb"^MemTotal: +([0-9]{1,15}) kB$", re.MULTILINE)
_BYTES_PER_KIB: Final = 1024
_ATTEMPTS: Final = 3
_AT_ONCE_BYTES: Final = 65_536
_START_FIELD: Final = 19
"""Field 22 of the line; the name in parentheses, fields 1 and 2, is cut off."""
_KTHREADD: Final = "/proc/2/stat"
_KERNEL_THREAD: Final = 0x00200000
"""PF_KTHREAD of the kernel's `include/linux/sched.h`."""
_FLAGS_FIELD: Final = 6
"""Field 9 of the line; the name in parentheses, fields 1 and 2, is cut off."""
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


class ProcessReader:
    """Reads the processes of one node."""

    def __init__(self, procfs: Procfs) -> None:
        self._procfs = procfs
        node_paths = _read_node_paths(procfs)

        # Processes of one container have one cgroup, and are read each tick.
        @lru_cache(maxsize=256)
        def locate_once(cgroup: bytes) -> Location:
            return locate(cgroup.decode("utf-8", "replace"), node_paths=node_paths)

        self._locate = locate_once

    def read(self, pid: int) -> ProcessFacts:
        """Return what a process shows: `UNREADABLE` if it is gone, hidden, or another one now."""
        read = self._procfs.read
        try:
            # Where the pid changes hands in between, the second look tells.
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


def _read_node_paths(procfs: Procfs) -> NodePaths:
    """Return how paths of the node begin; without what cannot be read no path is shortened."""
    firsts = (_read_text(procfs, path) for path in _ROOT_CGROUPS)
    return find_node_paths(_read_text(procfs, _OWN_CGROUP), next(filter(None, firsts), ""))


def _read_text(procfs: Procfs, path: str) -> str:
    try:
        return procfs.read(path).decode("utf-8", "replace")
    except OSError:
        return ""


def read_boot_id(procfs: Procfs) -> str:
    """Return the kernel's id of this boot; raises OSError where it cannot be read."""
    return procfs.read(BOOT_ID).decode("ascii", "replace").strip()


def read_memory_bytes(procfs: Procfs) -> int | None:
    """Return the size of the machine's memory; `None` where it cannot be read."""
    try:
        found = _MEMORY_TOTAL.search(procfs.read(_MEMORY))
    except OSError:
        return None
    return int(found[1]) * _BYTES_PER_KIB if found else None


def _parse_stat(stat: bytes) -> tuple[str, int]:
    """Return name and start time; the name may itself hold spaces and parentheses."""
    # By the last parenthesis: a program may call itself `a) R 1 (b`.
    head, _, rest = stat.rpartition(b")")
    ticks = int(rest.split()[_START_FIELD])
    command = head.partition(b"(")[2].decode("utf-8", "replace")
    return command, ticks * NS_PER_SECOND // _CLOCK_TICKS


@dataclass(frozen=True, kw_only=True)
class ProcfsAccess:
    """Whether processes can be read, and why not."""

    is_on: bool
    """Whether they are read."""
    detail: str
    """For a person: what was found, and what would help."""
    is_wanted: bool = True
    """Whether it is as it was asked for; not so where processes would be read if they could."""


def check_procfs(procfs: Procfs, *, wanted: bool | Literal["auto"] = "auto") -> ProcfsAccess:
    """Return whether the driver's pids may be looked up in this `/proc`."""
    if wanted != "auto":
        return ProcfsAccess(is_on=wanted, detail=f"attribution is set to {str(wanted).lower()}")
    if shows_kernel_threads(procfs):
        return ProcfsAccess(is_on=True, detail="/proc is the whole machine's")
    return ProcfsAccess(
        is_on=False,
        is_wanted=False,
        detail=(
            "/proc shows no kernel threads, so it is not the whole machine's and the driver's pids"
            " would name other processes: set hostPID: true, mount /proc without hidepid, or set"
            " attribution: true where you know better; until then processes are not read"
        ),
    )


def shows_kernel_threads(procfs: Procfs) -> bool:
    """Return whether process 2 is a thread of the kernel, as in the first pid namespace alone."""
    try:
        _, _, fields = procfs.read(_KTHREADD).rpartition(b")")
        return bool(int(fields.split()[_FLAGS_FIELD]) & _KERNEL_THREAD)
    except (OSError, ValueError, IndexError):
        return False
