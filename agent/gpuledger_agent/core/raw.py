"""What one GPU answered at one instant, in the driver's own units: the raw material of a tick.

Here live the value types between the seam to a vendor and the pure core. Nothing is judged here.
Those that are made hundreds of times a tick are structs, five times cheaper to make.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

import msgspec

from gpuledger.clock import NS_PER_MS
from gpuledger.records import GpuFacts, ProcessKind


class CallGroup(Enum):
    """Questions that are asked together, in the order of their weight; each has a deadline."""

    BOOKS = "books"
    """What is booked: samples, memory, energy, processes. Without it the GPU is not in the tick."""
    SENSORS = "sensors"
    """What else the tick's own record has: temperature, clocks, and the chip's counters by which
    active time is apportioned; each tick."""
    READINGS = "readings"
    """Throttling, traffic, what nothing is booked from: every few seconds."""
    PROFILING = "profiling"
    """All others of the chip's own counters: every few seconds, on Hopper and newer."""
    HEALTH = "health"
    """Errors, wear and limits: rarely."""

    # Each member is one object; the enumeration's own hash is a call in Python, some 250 a tick.
    __hash__ = object.__hash__


class Clocks(Protocol):
    """The clocks of a machine; one that can also wait is no part of the core."""

    def time_ns(self) -> int:
        """Nanoseconds since the epoch."""

    def monotonic_ns(self) -> int:
        """Nanoseconds of a clock that is never set."""

    def boottime_ns(self) -> int:
        """Nanoseconds since boot."""


class ClockReading(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The clocks at one instant."""

    time_ns: int
    """Since the epoch."""
    monotonic_ns: int
    """Of the clock that is never set."""
    boottime_ns: int
    """Since boot."""

    @classmethod
    def read(cls, clock: Clocks) -> "ClockReading":
        """Read all clocks at one instant.

        If the process loses its core between two of them, the time of a tick is wrong by that
        pause. So they are read again, up to three times in all, if that took over a millisecond.
        """
        readings_left = 3
        while True:
            began_ns, readings_left = clock.monotonic_ns(), readings_left - 1
            reading = cls(
                time_ns=clock.time_ns(),
                boottime_ns=clock.boottime_ns(),
                monotonic_ns=clock.monotonic_ns(),
            )
            if reading.monotonic_ns - began_ns < NS_PER_MS or not readings_left:
                return reading


class SampleCursor(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The newest time stamp seen of each of the driver's ring buffers, 0 before the first."""

    gpu_us: int = 0
    """Of the GPU's utilization."""
    memory_us: int = 0
    """Of the memory controller's utilization."""
    process_us: int = 0
    """Of the processes' utilization."""


class UtilizationSample(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One sample of a ring buffer."""

    timestamp_us: int
    """End of the driver's sampling window, by the driver's clock."""
    percent: int
    """Whole percents of the window."""


class ProcessUtilizationSample(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One process in one of the driver's sampling windows."""

    pid: int
    """Process id in the node's pid namespace."""
    timestamp_us: int
    """End of the window, by the driver's clock."""
    sm_percent: int
    """Share of the window in which its kernels ran."""
    memory_percent: int
    """Share of the window in which its memory accesses kept the controller busy."""
    encoder_percent: int = 0
    """Share of the window in which the video encoders worked for it."""
    decoder_percent: int = 0
    """The same of the video decoders."""
    since_us: int = 0
    """Where the time begins of which it is the mean; 0 where it is of one window, or not known."""


class ListedProcess(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A process in one of the driver's lists."""

    pid: int
    """Process id in the node's pid namespace."""
    kind: ProcessKind
    """The list."""
    memory_bytes: int | None
    """Device memory it holds; `None` where the driver does not say."""
    gpu_instance: int | None = None
    """Id of the GPU instance in which it runs, where the driver says one."""
    compute_instance: int | None = None
    """Id of the compute instance in that."""
    is_mps_client: bool = False
    """Whether it stands in the list of MPS, too."""


class EnergyReading(NamedTuple):
    """What a board showed of its energy at an instant; `None` is not known."""

    at_ns: int
    """When, by the monotonic clock."""
    counter: int | None
    """Its counter, in millijoules."""
    power_milliwatts: int | None
    """Its draw."""


class AnswerTime(NamedTuple):
    """Between which times the driver answered, by the monotonic clock."""

    requested_ns: int
    """Not before this."""
    answered_ns: int
    """Not after this."""


class FastPoll(msgspec.Struct, frozen=True, kw_only=True):
    """What one GPU answered to one query between two ticks."""

    uuid: str
    """The GPU's identity."""
    at: ClockReading
    """When it was asked."""
    since_us: int = 0
    """After which stamp process samples were asked for."""
    samples: tuple[UtilizationSample, ...] | None = None
    """Utilization samples; `None` where they were not asked for, or not given."""
    memory_samples: tuple[UtilizationSample, ...] | None = None
    """The same of the memory controller."""
    process_samples: tuple[ProcessUtilizationSample, ...] | None = None
    """Process samples."""
    processes: tuple[ListedProcess, ...] | None = None
    """The driver's lists of processes; `None` where one of them failed."""
    percent: int | None = None
    """Utilization in the driver's latest window."""
    sampled: AnswerTime | None = None
    """When the driver gave the samples; `None` is when it was asked."""
    energy_millijoules: int | None = None
    """The board's counter."""
    power_milliwatts: int | None = None
    """The board's draw."""
    failed: bool = False
    """Whether reading the answers failed because of an internal error; there are none then."""


class InstanceIdentity(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One MIG instance of a GPU and what it has of the GPU; `None` is not known."""

    uuid: str
    """Its identity."""
    parent_uuid: str
    """The GPU's identity."""
    index: int
    """The driver's index of it among the GPU's instances."""
    gpu_instance: int | None = None
    """The driver's id of its GPU instance."""
    compute_instance: int | None = None
    """The driver's id of it in the GPU instance."""
    profile: str | None = None
    """Its profile, such as `1g.10gb`."""
    gpu_slices: int | None = None
    """Compute slices of its GPU instance."""
    compute_slices: int | None = None
    """Those of them that it has."""
    multiprocessors: int | None = None
    """Its streaming multiprocessors."""
    memory_bytes: int | None = None
    """Memory of its GPU instance."""
    placement_start: int | None = None
    """Where its GPU instance begins on the GPU, in memory slices; told to privileged users."""
    memory_slices: int | None = None
    """Memory slices of its GPU instance."""


class ProcessAccounting(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The driver's account of a process that is done with a GPU; `None` is not known."""

    pid: int
    """Process id in the node's pid namespace."""
    started_us: int
    """When it opened the GPU, by the node's clock since the epoch."""
    lived_ms: int
    """For how long it held the GPU open."""
    gpu_percent: float | None
    """Share of that time in which its kernels ran."""
    memory_percent: float | None
    """Share of that time in which it kept the memory controller busy."""
    max_memory_bytes: int | None
    """The most memory it held."""


class RawGpuSample(msgspec.Struct, frozen=True, kw_only=True):
    """All answers of one GPU; `None` is a call that the driver does not support or that failed."""

    uuid: str
    """The GPU's identity."""
    index: int
    """The driver's index at this time."""
    model: str | None = None
    """Product name."""
    samples: tuple[UtilizationSample, ...] | None = None
    """Utilization samples newer than the last seen; empty where no window has closed since."""
    memory_samples: tuple[UtilizationSample, ...] | None = None
    """The same of the memory controller."""
    percent: int | None = None
    """Utilization in the driver's latest window."""
    memory_percent: int | None = None
    """The same of the memory controller."""
    memory_total_bytes: int | None = None
    """Size of the memory."""
    memory_used_bytes: int | None = None
    """Memory in use, without the driver's reserve."""
    memory_reserved_bytes: int | None = None
    """The driver's reserve."""
    memory_unified: bool = False
    """Whether the GPU has no memory of its own, and uses the machine's."""
    power_milliwatts: int | None = None
    """Draw."""
    energy_millijoules: int | None = None
    """Counter since the driver was loaded."""
    sensors: Mapping[str, Any] = {}
    """The driver's values of the sensors group, by the names of the catalogue, those it gives."""
    activity: Mapping[str, Any] = {}
    """Those of the sensors group that are counters of the chip."""
    activity_ns: int | None = None
    """The time that they are of."""
    readings: Mapping[str, Any] = {}
    """The values of the readings group; empty where it was not asked."""
    profiling: Mapping[str, Any] = {}
    """The same of the profiling group; lists of several engines' values included."""
    profiling_ns: int | None = None
    """The time that they are of."""
    health: Mapping[str, Any] = {}
    """The same of the health group; empty where it was not asked."""
    facts: GpuFacts | None = None
    """What is built into the GPU or set on it; asked with its health."""
    processes: tuple[ListedProcess, ...] | None = None
    """The compute, graphics and MPS lists, one after the other; `None` where one of them failed,
    as a process missing from half an answer has not ended."""
    process_samples: tuple[ProcessUtilizationSample, ...] | None = None
    """Process samples newer than the last seen; empty where no process used the GPU."""
    sampled: AnswerTime | None = None
    """When the driver gave the samples; `None` is at the time of the tick itself."""
    process_stats: tuple[ProcessAccounting, ...] | None = None
    """Processes that are done with the GPU since some answers ago; the same one may come in
    several answers. `None` where the driver keeps no accounts."""
    mig_enabled: bool | None = None
    """Whether MIG is on; `None` where the GPU has none."""
    mig_hidden: bool = False
    """Whether the agent has no right to see its instances, or what is in them."""
    compute_slices: int | None = None
    """Compute slices: into how many the GPU can be cut, or how many of them the instance has."""
    memory_slices: int | None = None
    """Memory slices, in the same way."""
    instances: tuple["RawGpuSample", ...] = ()
    """The answers of its MIG instances."""
    instance: InstanceIdentity | None = None
    """Which instance it is, where these are an instance's answers."""
    instance_activity: Mapping[str, Mapping[str, Any]] = {}
    """What the chip's counters of the sensors group measured of each instance, by its UUID: fields
    of `RawGpuSample`."""
    instance_profiling: Mapping[str, Mapping[str, Any]] = {}
    """The same of the profiling group."""


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """What an inventory reports of a node's driver and GPUs."""

    versions: Mapping[str, str | None]
    """The versions by the fields of `Inventory`."""
    gpus: Sequence[GpuFacts]
    """The GPUs in the driver's order, those included that are lost."""
