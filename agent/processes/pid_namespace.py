"""Whether `/proc` is the whole machine's, whose pids the driver speaks of.

The driver names processes by their pids in the machine's first pid namespace. A `/proc` of another
namespace has the same numbers for other processes, so reading them would book to a wrong container
without anybody noticing.

The inodes of `/proc/1/ns/pid` and `/proc/self/ns/pid` do not tell: without `hostPID` process 1 is
the container's own first process, and both are equal just as on the machine. What tells is the
kernel's own threads: they live in the first namespace alone, their parent `kthreadd` is always
process 2, and the kernel marks them with a flag that no program can give itself. Every user may
read that, wherever `/proc` is mounted, and it speaks of the mounted `/proc` rather than of the
reader. A node that is itself a container (kind, k3d, a container with its own kubelet) has none
either, rightly: the driver's pids are those of the machine below.
"""

from dataclasses import dataclass
from typing import Final, Literal

from agent.processes.procfs import Procfs

_KTHREADD: Final = "/proc/2/stat"
_KERNEL_THREAD: Final = 0x00200000
"""PF_KTHREAD of the kernel's `include/linux/sched.h`."""
_FLAGS_FIELD: Final = 6
"""Field 9 of the line; the name in parentheses, fields 1 and 2, is cut off."""


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
    """Decide whether the driver's pids may be looked up in this `/proc`."""
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
