"""What a generation of GPUs can be asked for. Facts of NVIDIA's architectures alone."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A generation of GPUs."""

    number: int
    """NVML's number of it."""
    compute_capability: tuple[int, int]
    """CUDA's version of its data centre chip."""
    has_profiling: bool = False
    """Whether the chip's own counters can be read without a profiler (GPM)."""
    remaps_rows: bool = True
    """Whether it replaces rows of memory; older ones retire pages."""
    has_thresholds: bool = True
    """Whether its temperature limits are told as temperatures; newer ones tell margins."""
    has_instant_power: bool = True
    """Whether the draw of the instant is told beside the average."""


ARCHITECTURES: Final = {
    "turing": Architecture(
        number=6, compute_capability=(7, 5), remaps_rows=False, has_instant_power=False
    ),
    "ampere": Architecture(number=7, compute_capability=(8, 0)),
    "ada": Architecture(number=8, compute_capability=(8, 9), has_thresholds=False),
    "hopper": Architecture(number=9, compute_capability=(9, 0), has_profiling=True),
    "blackwell": Architecture(
        number=10, compute_capability=(10, 0), has_profiling=True, has_thresholds=False
    ),
}
