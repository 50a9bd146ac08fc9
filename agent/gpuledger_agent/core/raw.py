"""Value types for a GPU's raw answers, in the driver's own units.

They are the interface between a vendor's source and the pure core; nothing is validated here. Types
that are created hundreds of times per tick are structs, because creating a struct takes a fifth of
the time that creating a dataclass takes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

import msgspec

from gpuledger.clock import NS_PER_MS
from gpuledger.records import GpuFacts, ProcessKind


class CallGroup(Enum):
    """Groups of driver queries that are made together, most important first.

    Each group has its own deadline.
    """

    USAGE = "usage"
    """Values from which usage is computed: samples, memory, energy, processes. A GPU that does not
    return them is not in the tick."""
    SENSORS = "sensors"
    """Other values of the tick's main record, queried in each tick: temperature, clocks, and the
    chip's counters that apportion active time."""
    READINGS = "readings"
    """Throttling, traffic and other values that usage does not depend on, queried every few
    seconds."""
    PROFILING = "profiling"
    """All other counters of the chip, queried every few seconds, on Hopper and newer."""
    HEALTH = "health"
    """Error counters, memory repairs, link states and limits, queried rarely."""

    # Members are singletons, and `Enum.__hash__` is a Python call, made about 250 times a tick.
    __hash__ = object.__hash__


class Clocks(Protocol):
    """A machine's clocks; the core must not wait, so this protocol cannot sleep."""

    def time_ns(self) -> int:
        """Return nanoseconds since the epoch."""

    def monotonic_ns(self) -> int:
        """Return nanoseconds of a clock that is never set."""

    def boottime_ns(self) -> int:
        """Return nanoseconds since boot."""


class ClockReading(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The clocks at one instant."""

    time_ns: int
    """Nanoseconds since the epoch."""
    monotonic_ns: int
    """Nanoseconds of the clock that is never set."""
    boottime_ns: int
    """Nanoseconds since boot."""

    @classmethod
    def read(cls, clock: Clocks) -> "ClockReading":
        """Read all clocks at one instant.

        If the process is suspended between reading two clocks, the tick's time is wrong by that
        pause. If reading the clocks took over a millisecond, they are therefore read again, up to
        three times in all.
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
    """The newest time stamp read from each ring buffer of the driver; 0 before the first sample."""

    gpu_us: int = 0
    """For the GPU's utilization."""
    memory_us: int = 0
    """For the memory controller's utilization."""
    process_us: int = 0
    """For the processes' utilization."""


class UtilizationSample(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One sample of a utilization, from one of the driver's ring buffers."""

    timestamp_us: int
    """End of the driver's sampling window, by the driver's clock."""
    percent: int
    """Utilization in that window, in whole percent."""


class ProcessUtilizationSample(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A process's use in one of the driver's sampling windows, or since the last query."""

    pid: int
    """Process id in the node's pid namespace."""
    timestamp_us: int
    """End of the window, by the driver's clock."""
    sm_percent: int
    """Percentage of the window in which the process's kernels ran."""
    memory_percent: int
    """Percentage of the window in which the process's accesses kept the memory controller busy."""
    encoder_percent: int = 0
    """Percentage of the window in which the video encoders worked for the process."""
    decoder_percent: int = 0
    """Percentage of the window in which the video decoders worked for the process."""
    since_us: int = 0
    """Begin of the time over which the values are means; 0 if they are from one window, or if the
    begin is unknown."""


class ListedProcess(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A process in one of the driver's lists."""

    pid: int
    """Process id in the node's pid namespace."""
    kind: ProcessKind
    """The kind of the list that contains the process."""
    memory_bytes: int | None
    """Device memory that the process holds; `None` if the driver does not report it."""
    gpu_instance: int | None = None
    """Id of the process's GPU instance, if the driver reports one."""
    compute_instance: int | None = None
    """Id of the process's compute instance in that GPU instance."""
    is_mps_client: bool = False
    """Whether the process is in the MPS list too."""


class EnergyReading(NamedTuple):
    """A board's energy readings at one instant; `None` means unknown."""

    at_ns: int
    """Time of the reading, by the monotonic clock."""
    counter: int | None
    """The energy counter, in millijoules."""
    power_milliwatts: int | None
    """The power draw, in milliwatts."""


class AnswerTime(NamedTuple):
    """The earliest and the latest possible time of the driver's answer, by the monotonic clock."""

    requested_ns: int
    """Time of the request: the earliest possible time of the answer."""
    answered_ns: int
    """Time at which the call returned: the latest possible time of the answer."""


def read_at(at: ClockReading, monotonic_ns: int) -> ClockReading:
    """Return the reading of the clocks at `monotonic_ns`, given their reading `at` another time."""
    later_ns = monotonic_ns - at.monotonic_ns
    return ClockReading(
        time_ns=at.time_ns + later_ns,
        monotonic_ns=monotonic_ns,
        boottime_ns=at.boottime_ns + later_ns,
    )


class FastPoll(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU's answers to one query between two ticks."""

    uuid: str
    """The GPU's UUID."""
    at: ClockReading
    """Time of the query."""
    since_us: int = 0
    """Time stamp after which process samples were requested."""
    samples: tuple[UtilizationSample, ...] | None = None
    """Utilization samples; `None` if they were not requested or not returned."""
    memory_samples: tuple[UtilizationSample, ...] | None = None
    """Samples of the memory controller's utilization."""
    process_samples: tuple[ProcessUtilizationSample, ...] | None = None
    """Process samples."""
    processes: tuple[ListedProcess, ...] | None = None
    """The driver's process lists; `None` if one of them failed."""
    listed: AnswerTime | None = None
    """When the driver returned `processes`; `None` means at the time of the query."""
    percent: int | None = None
    """Utilization in the driver's latest window, in percent."""
    sampled: AnswerTime | None = None
    """When the driver returned the samples; `None` means at the time of the query."""
    energy_millijoules: int | None = None
    """The board's energy counter, in millijoules."""
    power_milliwatts: int | None = None
    """The board's power draw, in milliwatts."""
    failed: bool = False
    """Whether the query failed because of an internal error; all answers are absent then."""


class InstanceIdentity(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A MIG instance's ids, and the part of the GPU that belongs to it; `None` means unknown."""

    uuid: str
    """The instance's UUID."""
    parent_uuid: str
    """The GPU's UUID."""
    index: int
    """The driver's index of the instance within the GPU."""
    gpu_instance: int | None = None
    """The driver's id of the GPU instance that contains the instance."""
    compute_instance: int | None = None
    """The driver's id of the compute instance within that GPU instance."""
    profile: str | None = None
    """The instance's profile, such as `1g.10gb`."""
    gpu_slices: int | None = None
    """Number of compute slices of the GPU instance."""
    compute_slices: int | None = None
    """Number of the GPU instance's compute slices that belong to this instance."""
    multiprocessors: int | None = None
    """Number of the instance's streaming multiprocessors."""
    memory_bytes: int | None = None
    """Memory of the GPU instance."""
    placement_start: int | None = None
    """First memory slice of the GPU instance; the driver reports it to privileged users only."""
    memory_slices: int | None = None
    """Number of memory slices of the GPU instance."""


class ProcessAccounting(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The driver's accounting entry for a process that has closed a GPU.

    A value of `None` means that it is unknown.
    """

    pid: int
    """Process id in the node's pid namespace."""
    started_us: int
    """When the process opened the GPU, in microseconds since the epoch by the node's clock."""
    lived_ms: int
    """How long the process had the GPU open."""
    gpu_percent: float | None
    """Percentage of that time in which the process's kernels ran."""
    memory_percent: float | None
    """Percentage of that time in which the process kept the memory controller busy."""
    max_memory_bytes: int | None
    """Maximum memory that the process held."""


class RawGpuSample(msgspec.Struct, frozen=True, kw_only=True):
    """All answers of one GPU in one tick; `None` means that the call is not supported or failed."""

    uuid: str
    """The GPU's UUID."""
    index: int
    """The driver's index of the GPU at the time of the query."""
    model: str | None = None
    """Product name."""
    samples: tuple[UtilizationSample, ...] | None = None
    """Utilization samples newer than the cursor; empty if no window has closed since."""
    memory_samples: tuple[UtilizationSample, ...] | None = None
    """Samples of the memory controller's utilization."""
    percent: int | None = None
    """Utilization in the driver's latest window, in percent."""
    memory_percent: int | None = None
    """The memory controller's utilization in its latest window, in percent."""
    memory_total_bytes: int | None = None
    """Size of the memory."""
    memory_used_bytes: int | None = None
    """Memory in use, without the driver's reserve."""
    memory_reserved_bytes: int | None = None
    """The driver's reserve."""
    memory_unified: bool = False
    """Whether the GPU has no memory of its own, and uses the machine's."""
    power_milliwatts: int | None = None
    """Power draw."""
    energy_millijoules: int | None = None
    """Energy counter since the driver was loaded."""
    sensors: Mapping[str, Any] = {}
    """Values of the sensors group that come from the driver, by their names in `core.readings`."""
    activity: Mapping[str, Any] = {}
    """Values of the sensors group that come from the chip's counters, by name."""
    activity_ns: int | None = None
    """Length of the time that `activity` covers."""
    readings: Mapping[str, Any] = {}
    """Values of the readings group; empty if it was not queried."""
    profiling: Mapping[str, Any] = {}
    """Values of the profiling group, including lists of values by engine."""
    profiling_ns: int | None = None
    """Length of the time that `profiling` covers."""
    health: Mapping[str, Any] = {}
    """Values of the health group; empty if it was not queried."""
    facts: GpuFacts | None = None
    """The GPU's hardware and configuration; queried with its health."""
    processes: tuple[ListedProcess, ...] | None = None
    """The compute, graphics and MPS lists, concatenated. `None` if one of them failed, because a
    process missing in a partial answer has not necessarily ended."""
    listed: AnswerTime | None = None
    """When the driver returned `processes`; `None` means at the time of the tick's query."""
    process_samples: tuple[ProcessUtilizationSample, ...] | None = None
    """Process samples newer than the cursor; empty if no process used the GPU."""
    sampled: AnswerTime | None = None
    """When the driver returned the samples; `None` means at the time of the tick's query."""
    process_stats: tuple[ProcessAccounting, ...] | None = None
    """The driver's accounting entries of processes that have recently closed the GPU; several
    answers may repeat an entry. `None` if the driver keeps none."""
    mig_enabled: bool | None = None
    """Whether MIG is on; `None` if the GPU does not support it."""
    mig_hidden: bool = False
    """Whether the agent is not permitted to see the MIG instances or their contents."""
    compute_slices: int | None = None
    """Number of compute slices of the GPU or of the instance."""
    memory_slices: int | None = None
    """Number of memory slices of the GPU or of the instance."""
    instances: tuple["RawGpuSample", ...] = ()
    """The answers of the GPU's MIG instances."""
    instance: InstanceIdentity | None = None
    """The instance's identity; `None` for a GPU."""
    instance_activity: Mapping[str, Mapping[str, Any]] = {}
    """For each MIG instance, by UUID: the fields `activity` and `activity_ns` of its
    `RawGpuSample`, by name."""
    instance_profiling: Mapping[str, Mapping[str, Any]] = {}
    """For each MIG instance, by UUID: the fields `profiling` and `profiling_ns` of its
    `RawGpuSample`, by name."""


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """The versions of a node's driver software and the node's GPUs, for the inventory record."""

    versions: Mapping[str, str | None]
    """The versions, by the name of their field in `Inventory`."""
    gpus: Sequence[GpuFacts]
    """The GPUs in the driver's order, including lost ones."""
