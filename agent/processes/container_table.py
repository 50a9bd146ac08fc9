"""The processes of a tick as its record holds them, and the table of their containers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from agent.normalize.shares import ProcessUsage
from agent.processes.cgroup import Location
from agent.processes.procfs import UNREADABLE
from agent.processes.table import TableUpdate
from gpuledger.records import ContainerRef, GpuProcess


@dataclass
class Containers:
    """The tick's container table: each container once, in the order of first mention."""

    _places: dict[tuple[str | None, str | None], int] = field(default_factory=dict)

    def place(self, location: Location) -> int | None:
        """Return the position of a container; `None` for the host."""
        if not location.in_container:
            return None
        identity = (location.container_id, location.pod_uid)
        return self._places.setdefault(identity, len(self._places))

    def refs(self) -> list[ContainerRef]:
        """Return the table."""
        return [ContainerRef(container_id=one, pod_uid=uid) for one, uid in self._places]


def describe_all(
    usages: Iterable[Sequence[ProcessUsage]], roll: TableUpdate, containers: Containers
) -> list[GpuProcess]:
    """Return the entries of all processes; `usages` are those of each GPU in the tick's order."""
    return [
        process
        for gpu, on_it in enumerate(usages)
        for usage in on_it
        for process in describe(gpu, usage, roll, containers)
    ]


def describe(
    gpu: int, usage: ProcessUsage, roll: TableUpdate, containers: Containers
) -> list[GpuProcess]:
    """Return the process's entry; two entries where its pid passed from one process to another.

    The driver's samples of such a pid may be of either, so none of the two gets them.
    """
    pid = usage.process.pid
    if not usage.ended and roll.was_recycled(pid):
        return [
            _entry(gpu, usage, roll, containers, ended=False, is_measured=False),
            _entry(gpu, usage, roll, containers, ended=True, is_measured=False),
        ]
    return [_entry(gpu, usage, roll, containers, ended=usage.ended, is_measured=True)]


def _entry(
    gpu: int,
    usage: ProcessUsage,
    roll: TableUpdate,
    containers: Containers,
    *,
    ended: bool,
    is_measured: bool,
) -> GpuProcess:
    pid = usage.process.pid
    known = (roll.before if ended else roll.now).get(pid)
    facts = known.certain_facts if known else UNREADABLE
    return GpuProcess(
        gpu=gpu,
        pid=pid,
        started_boottime_ns=facts.started_boottime_ns,
        container=containers.place(facts.location),
        kind=usage.process.kind,
        memory_used_bytes=None if ended else usage.process.memory_bytes,
        sm_utilization_ratio=usage.sm_ratio if is_measured else None,
        ended=True if ended else None,
    )
