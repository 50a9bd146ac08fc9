"""Sizes, watts and clocks of the GPUs that a scenario may name without describing them.

Here live product facts alone. Which GPU sits in which node is the scenario's business.
"""

from dataclasses import dataclass
from typing import Final

_GIB: Final = 1 << 30
_MIB: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class GpuModel:
    """What a product is made of."""

    memory_bytes: int
    """Size of the device memory, the driver's reserve included."""
    reserved_bytes: int
    """What the driver and the firmware keep for themselves."""
    idle_watts: float
    """Draw of the board while no kernel runs."""
    max_watts: float
    """Draw of the board while kernels run without a pause."""
    sm_clock_megahertz: int
    """Clock of the multiprocessors under load."""
    memory_clock_megahertz: int
    """Clock of the device memory."""
    architecture: str = "hopper"
    """Its generation, one of `ARCHITECTURES`."""
    nvlinks: int = 0
    """Links to other GPUs."""
    pcie_generation: int = 5
    """The PCIe generation that it can do."""
    has_hbm: bool = True
    """Whether its memory tells its own temperature."""


MODELS: Final = {
    "NVIDIA H200": GpuModel(
        memory_bytes=143_771 * _MIB,
        reserved_bytes=620 * _MIB,
        idle_watts=76,
        max_watts=700,
        sm_clock_megahertz=1980,
        memory_clock_megahertz=3201,
        nvlinks=18,
    ),
    "NVIDIA H100 80GB HBM3": GpuModel(
        memory_bytes=81_559 * _MIB,
        reserved_bytes=571 * _MIB,
        idle_watts=70,
        max_watts=700,
        sm_clock_megahertz=1980,
        memory_clock_megahertz=2619,
        nvlinks=18,
    ),
    "NVIDIA A100-SXM4-80GB": GpuModel(
        memory_bytes=81_920 * _MIB,
        reserved_bytes=696 * _MIB,
        idle_watts=55,
        max_watts=400,
        sm_clock_megahertz=1410,
        memory_clock_megahertz=1593,
        architecture="ampere",
        nvlinks=12,
        pcie_generation=4,
    ),
    "NVIDIA L4": GpuModel(
        memory_bytes=23_034 * _MIB,
        reserved_bytes=565 * _MIB,
        idle_watts=16,
        max_watts=72,
        sm_clock_megahertz=2040,
        memory_clock_megahertz=6251,
        architecture="ada",
        pcie_generation=4,
        has_hbm=False,
    ),
    "Tesla T4": GpuModel(
        memory_bytes=15 * _GIB,
        reserved_bytes=446 * _MIB,
        idle_watts=10,
        max_watts=70,
        sm_clock_megahertz=1590,
        memory_clock_megahertz=5001,
        architecture="turing",
        pcie_generation=3,
        has_hbm=False,
    ),
}

UNLISTED: Final = GpuModel(
    memory_bytes=16 * _GIB,
    reserved_bytes=512 * _MIB,
    idle_watts=30,
    max_watts=300,
    sm_clock_megahertz=1500,
    memory_clock_megahertz=1500,
    architecture="ampere",
    pcie_generation=4,
    has_hbm=False,
)
"""What a scenario's own model is made of where the scenario does not say."""


# What a generation of GPUs can be asked for. Facts of NVIDIA's architectures alone.


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
