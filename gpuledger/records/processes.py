"""The life of a process on a GPU, as a node tells it: the audit trail behind the ticks.

Here lives the record of `gpuledger.processes.v1`. What a process used in a tick stands in the tick.
"""

from enum import StrEnum
from typing import Annotated

from gpuledger.records.base import BaseRecord, BootId, Natural, NodeName
from gpuledger.records.bounds import (
    MAX_GPUS,
    BoottimeNs,
    GpuSeconds,
    Id,
    MemoryBytes,
    Path,
    Seconds,
    Word,
    at_most,
)


class ProcessChange(StrEnum):
    """Why a process record was written."""

    SEEN = "seen"
    CHANGED = "changed"
    ENDED = "ended"


class GpuTotals(BaseRecord, frozen=True, kw_only=True):
    """What a process used of one GPU over its whole life, by the driver's accounting."""

    gpu_uuid: Id
    """The GPU."""
    busy_seconds: Seconds | None = None
    """Time in which its kernels ran."""
    memory_busy_seconds: Seconds | None = None
    """Time in which it kept the memory controller busy."""
    max_memory_bytes: MemoryBytes | None = None
    """The most device memory it held."""
    started_time_ns: Natural | None = None
    """When it opened the GPU, nanoseconds since the epoch."""
    lifetime_seconds: Seconds | None = None
    """For how long it held the GPU open."""


class ProcessRecord(BaseRecord, frozen=True, kw_only=True):
    """A process first seen on a GPU, changed (another cgroup, another GPU) or ended."""

    node: NodeName
    """The node's name in Kubernetes."""
    boot_id: BootId
    """The kernel's id of this boot."""
    pid: Natural
    """Process id in the node's own pid namespace."""
    started_boottime_ns: BoottimeNs | None = None
    """Start of the process since boot; absent where the process ended before it could be read."""
    time_ns: Natural
    """When the agent saw the change, nanoseconds since the epoch."""
    change: ProcessChange
    """Whether the process was first seen, changed, or ended."""
    gpu_uuids: Annotated[list[Id], at_most(MAX_GPUS)]
    """The GPUs it uses, or used last."""
    command: Word | None = None
    """The kernel's name of the program (`/proc/<pid>/comm`, at most 15 characters)."""
    cgroup_path: Path | None = None
    """The line of `/proc/<pid>/cgroup` that named the container, or the first one."""
    container_id: Id | None = None
    """The container's id as the path shows it."""
    pod_uid: Id | None = None
    """The pod's UID as the path shows it."""
    totals: Annotated[list[GpuTotals], at_most(MAX_GPUS)] | None = None
    """At the end: what it used of each GPU, where the driver's accounting is on."""
    busy_seconds: GpuSeconds | None = None
    """At the end: GPU time over its whole life, summed over its GPUs, by the driver's accounting,
    where that is on."""
    max_memory_bytes: MemoryBytes | None = None
    """At the end: the most device memory it held on one GPU, by the driver's accounting, where that
    is on."""
