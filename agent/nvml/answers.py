"""What one GPU answered at one instant, in the driver's own units: the raw material of a tick.

Here live the value types between the seam to NVML and the pure core. Nothing is judged here.
"""

from dataclasses import dataclass
from enum import Enum

from gpuledger.records import ProcessKind


class CallGroup(Enum):
    """Questions that are asked together, in the order of their weight; each has a deadline."""

    BOOKS = "books"
    """What is booked: samples, memory, energy, processes. Without it the GPU is not in the tick."""
    READINGS = "readings"
    """Clocks, temperatures, throttling, traffic: each tick."""
    PROFILING = "profiling"
    """The chip's own counters: each tick, on Hopper and newer."""
    HEALTH = "health"
    """Errors, wear and limits: rarely."""


@dataclass(frozen=True, kw_only=True)
class LastSeen:
    """The newest time stamp seen of each of the driver's ring buffers, 0 before the first."""

    gpu_us: int = 0
    """Of the GPU's utilization."""
    memory_us: int = 0
    """Of the memory controller's utilization."""
    process_us: int = 0
    """Of the processes' utilization."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sample of a ring buffer."""

    timestamp_us: int
    """End of the driver's sampling window, by the driver's clock."""
    percent: int
    """Whole percents of the window."""


@dataclass(frozen=True, kw_only=True)
class ProcessSample:
    """One process in one of the driver's sampling windows."""

    pid: int
    """Process id in the node's pid namespace."""
    timestamp_us: int
    """End of the window, by the driver's clock."""
    sm_percent: int
    """Share of the window in which its kernels ran."""
    memory_percent: int
    """Share of the window in which its memory accesses kept the controller busy."""


@dataclass(frozen=True, kw_only=True)
class ListedProcess:
    """A process in one of the driver's lists."""

    pid: int
    """Process id in the node's pid namespace."""
    kind: ProcessKind
    """The list."""
    memory_bytes: int | None
    """Device memory it holds; `None` where the driver does not say."""


@dataclass(frozen=True, kw_only=True)
class GpuAnswers:
    """All answers of one GPU; `None` is a call that the driver does not support or that failed."""

    uuid: str
    """The GPU's identity."""
    index: int
    """The driver's index at this time."""
    model: str | None = None
    """Product name."""
    samples: tuple[Sample, ...] | None = None
    """Utilization samples newer than the last seen; empty where no window has closed since."""
    memory_samples: tuple[Sample, ...] | None = None
    """The same of the memory controller."""
    percent: int | None = None
    """Utilization in the driver's latest window; asked only where there are no samples."""
    memory_percent: int | None = None
    """The same of the memory controller."""
    memory_total_bytes: int | None = None
    """Size of the memory."""
    memory_used_bytes: int | None = None
    """Memory in use, without the driver's reserve."""
    memory_reserved_bytes: int | None = None
    """The driver's reserve."""
    power_milliwatts: int | None = None
    """Draw."""
    energy_millijoules: int | None = None
    """Counter since the driver was loaded."""
    temperature_celsius: int | None = None
    """Temperature of the die."""
    sm_clock_megahertz: int | None = None
    """Clock of the multiprocessors."""
    memory_clock_megahertz: int | None = None
    """Clock of the memory."""
    processes: tuple[ListedProcess, ...] | None = None
    """The compute, graphics and MPS lists, one after the other; `None` where one of them failed,
    as a process missing from half an answer has not ended."""
    process_samples: tuple[ProcessSample, ...] | None = None
    """Process samples newer than the last seen; empty where no process used the GPU."""
