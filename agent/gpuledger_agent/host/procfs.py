"""Access to `/proc`: reads files and processes, and detects which pid namespace `/proc` shows.

A pid does not identify a process, because it can be reused. The start time is therefore read before
and after the cgroup, and both values must be equal.

The driver reports pids of the machine's first pid namespace. In the `/proc` of another namespace,
the same pids belong to other processes, so usage would silently be attributed to wrong containers.
The inodes of `/proc/1/ns/pid` and `/proc/self/ns/pid` do not reveal which namespace `/proc` shows:
without `hostPID`, process 1 is the container's first process, and both inodes are equal, as they
are on the machine. Kernel threads reveal it: they exist only in the first namespace, their parent
`kthreadd` is always process 2, and the kernel marks them with a flag that programs cannot set.
Every user can read the flag, wherever `/proc` is mounted, and the flag depends on the mounted
`/proc`, not on the reading process. A node that is itself a container (kind, k3d, a container with
its own kubelet) shows no kernel threads either. Processes are then not read, which is correct,
because the driver's pids are those of the underlying machine.
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
# The cgroups of the node's first process and of `kthreadd`, which is also in the root cgroup.
_ROOT_CGROUPS: Final = ("/proc/1/cgroup", "/proc/2/cgroup")
# Kubernetes sets this variable in each container.
_IS_IN_POD: Final = "KUBERNETES_SERVICE_HOST" in os.environ
# The kernel writes kB and means KiB.
_MEMORY_TOTAL: Final = re.compile(rb"^MemTotal: +([0-9]{1,15}) kB$", re.MULTILINE)
_BYTES_PER_KIB: Final = 1024
_ATTEMPTS: Final = 3
_AT_ONCE_BYTES: Final = 65_536
_START_FIELD: Final = 19
"""Index of field 22 of `/proc/<pid>/stat` (start time), counted without fields 1 and 2, which are
the pid and the name in parentheses."""
_KTHREADD: Final = "/proc/2/stat"
_KERNEL_THREAD: Final = 0x00200000
"""PF_KTHREAD in the kernel's `include/linux/sched.h`."""
_FLAGS_FIELD: Final = 6
"""Index of field 9 of `/proc/<pid>/stat` (flags), counted without fields 1 and 2."""
_CLOCK_TICKS: Final = os.sysconf("SC_CLK_TCK")


class Procfs(Protocol):
    """Reads the node's files under `/proc`."""

    def read(self, path: str) -> bytes:
        """Return the bytes of a file such as `/proc/1/cgroup`; raises OSError."""


class SystemProcfs:
    """The machine's `/proc`, or the node's `/proc` mounted at another path."""

    def __init__(self, root: Path = Path("/proc")) -> None:
        self._root = str(root)

    def read(self, path: str) -> bytes:
        """Return the bytes of the file `/proc/...`; raises OSError if it cannot be read."""
        # Called many times per tick, so without the overhead of pathlib and io.
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
    """Reads the facts about a node's processes from `/proc`."""

    def __init__(self, procfs: Procfs, *, is_in_pod: bool = _IS_IN_POD) -> None:
        """Create the reader; `is_in_pod` is whether this process is in a pod."""
        self._procfs = procfs
        node_paths = _read_node_paths(procfs)

        # Cached, because a container's processes share a cgroup and are read in each tick.
        @lru_cache(maxsize=256)
        def locate_once(cgroup: bytes) -> Location:
            text = cgroup.decode("utf-8", "replace")
            return locate(text, node_paths=node_paths, is_in_pod=is_in_pod)

        self._locate = locate_once

    def read(self, pid: int) -> ProcessFacts:
        """Return the facts about the pid's process.

        Return `UNREADABLE` if the process has ended or is hidden, or if the pid is reused during
        each of several attempts.
        """
        read = self._procfs.read
        try:
            # If the pid is reused in between, the second start time differs.
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
    """Return the segments that precede the node's root in cgroup paths.

    Files that cannot be read count as empty.
    """
    firsts = (_read_text(procfs, path) for path in _ROOT_CGROUPS)
    return find_node_paths(_read_text(procfs, _OWN_CGROUP), next(filter(None, firsts), ""))


def _read_text(procfs: Procfs, path: str) -> str:
    try:
        return procfs.read(path).decode("utf-8", "replace")
    except OSError:
        return ""


def read_boot_id(procfs: Procfs) -> str:
    """Return the kernel's id of this boot; raises OSError if it cannot be read."""
    return procfs.read(BOOT_ID).decode("ascii", "replace").strip()


def read_memory_bytes(procfs: Procfs) -> int | None:
    """Return the size of the machine's memory in bytes; `None` if it cannot be read."""
    try:
        found = _MEMORY_TOTAL.search(procfs.read(_MEMORY))
    except OSError:
        return None
    return int(found[1]) * _BYTES_PER_KIB if found else None


def _parse_stat(stat: bytes) -> tuple[str, int]:
    """Return a process's name and its start time in nanoseconds since boot.

    `stat` is the content of `/proc/<pid>/stat`. The name may contain spaces and parentheses. Raise
    `ValueError` or `IndexError` if the text is invalid.
    """
    # Split at the last parenthesis, because a program may be named `a) R 1 (b`.
    head, _, rest = stat.rpartition(b")")
    ticks = int(rest.split()[_START_FIELD])
    command = head.partition(b"(")[2].decode("utf-8", "replace")
    return command, ticks * NS_PER_SECOND // _CLOCK_TICKS


@dataclass(frozen=True, kw_only=True)
class ProcfsAccess:
    """Whether the agent reads processes, and the reason."""

    is_on: bool
    """Whether the agent reads processes."""
    detail: str
    """The reason and, if needed, the remedy, as text for people."""
    matches_setting: bool = True
    """Whether `is_on` is as configured; false if processes should be read but cannot be."""


def check_procfs(procfs: Procfs, *, wanted: bool | Literal["auto"] = "auto") -> ProcfsAccess:
    """Return whether the agent must read processes, and why.

    `wanted` is the setting `attribution`. With `auto`, processes are read if `/proc` shows the same
    pids that the driver reports.
    """
    if wanted != "auto":
        return ProcfsAccess(is_on=wanted, detail=f"attribution is set to {str(wanted).lower()}")
    if shows_kernel_threads(procfs):
        return ProcfsAccess(is_on=True, detail="/proc shows the whole machine's processes")
    return ProcfsAccess(
        is_on=False,
        matches_setting=False,
        detail=(
            "processes are not read: /proc shows no kernel threads, so the driver's pids may belong"
            " to other processes here; set hostPID: true, mount /proc without hidepid, or set"
            " attribution: true if you are sure that /proc is the whole machine's"
        ),
    )


def shows_kernel_threads(procfs: Procfs) -> bool:
    """Return whether process 2 is a kernel thread.

    This is true only if `/proc` shows the machine's first pid namespace.
    """
    try:
        _, _, fields = procfs.read(_KTHREADD).rpartition(b")")
        return bool(int(fields.split()[_FLAGS_FIELD]) & _KERNEL_THREAD)
    except (OSError, ValueError, IndexError):
        return False
