"""A load as it is requested, and as it was."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """A load on one GPU, which its processes share equally."""

    gpu: int
    """Index of the GPU in the driver's order."""
    busy_ratio: float
    """Fraction of time in which a kernel runs."""
    process_bytes: int
    """GPU memory that each process allocates."""
    processes: int
    """Number of processes."""
    seconds: float
    """Duration."""


@dataclass(frozen=True, kw_only=True)
class LoadResult:
    """The use that a monitor should show."""

    gpu_uuid: str
    """UUID of the GPU."""
    start_ns: int
    """Start of the load."""
    end_ns: int
    """End of the load."""
    busy_ratios: Mapping[int, float]
    """Fraction of time in which each process's kernels ran, by pid; they never ran together."""
