"""Product data: GPU models, their generations, and the MIG instances that they support.

This module contains only product data and MIG geometry. The scenario assigns GPUs to nodes, and
`gpuledger_simulator.device` simulates the load of an instance.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from gpuledger.clock import NS_PER_SECOND
from gpuledger.errors import UserError
from gpuledger.mig_profiles import MigGpu, MigSlices
from gpuledger_simulator import identities
from gpuledger_simulator.schema import ScenarioMigLayout

_GIB: Final = 1 << 30
_MIB: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class GpuModel:
    """The properties of a product."""

    memory_bytes: int
    """Size of the device memory, including the driver's reserve."""
    reserved_bytes: int
    """Memory that the driver and the firmware reserve."""
    idle_watts: float
    """Power draw while no kernel runs."""
    max_watts: float
    """Power draw while kernels run without a pause."""
    sm_clock_megahertz: int
    """Clock of the multiprocessors under load, in MHz."""
    memory_clock_megahertz: int
    """Clock of the device memory, in MHz."""
    architecture: str = "hopper"
    """Generation, one of `ARCHITECTURES`."""
    nvlinks: int = 0
    """Number of NVLinks."""
    pcie_generation: int = 5
    """Highest PCIe generation."""
    has_hbm: bool = True
    """Whether the memory has its own temperature sensor."""


MODELS: Final = {
    "NVIDIA B200": GpuModel(
        memory_bytes=183_359 * _MIB,
        reserved_bytes=712 * _MIB,
        idle_watts=140,
        max_watts=1000,
        sm_clock_megahertz=1965,
        memory_clock_megahertz=3996,
        architecture="blackwell",
        nvlinks=18,
    ),
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
    "NVIDIA A30": GpuModel(
        memory_bytes=24_576 * _MIB,
        reserved_bytes=451 * _MIB,
        idle_watts=28,
        max_watts=165,
        sm_clock_megahertz=1440,
        memory_clock_megahertz=1215,
        architecture="ampere",
        nvlinks=4,
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
"""Properties of models that are not in `MODELS`, unless the scenario sets them."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A generation of GPUs."""

    number: int
    """NVML's number of the generation."""
    compute_capability: tuple[int, int]
    """CUDA compute capability of its data center chip."""
    has_profiling: bool = False
    """Whether the chip's counters can be read without a profiler (GPM)."""
    remaps_rows: bool = True
    """Whether the generation remaps memory rows; older generations retire pages."""
    has_thresholds: bool = True
    """Whether the driver reports temperature thresholds."""
    has_margins: bool = False
    """Whether the driver reports the margin between the temperature and its limit."""
    has_instant_power: bool = True
    """Whether the driver reports instantaneous power in addition to the average."""
    nvlink_generation: int = 3
    """NVLink generation; each generation counts errors in different fields."""


ARCHITECTURES: Final = {
    "turing": Architecture(
        number=6, compute_capability=(7, 5), remaps_rows=False, has_instant_power=False
    ),
    "ampere": Architecture(number=7, compute_capability=(8, 0)),
    "ada": Architecture(
        number=8, compute_capability=(8, 9), has_thresholds=False, has_margins=True
    ),
    "hopper": Architecture(
        number=9,
        compute_capability=(9, 0),
        has_profiling=True,
        has_margins=True,
        nvlink_generation=4,
    ),
    "blackwell": Architecture(
        number=10,
        compute_capability=(10, 0),
        has_profiling=True,
        has_thresholds=False,
        has_margins=True,
        nvlink_generation=5,
    ),
}


_PROFILE: Final = re.compile(r"(?:(\d)c\.)?(.+)")


@dataclass(frozen=True, kw_only=True)
class SimulatedInstance:
    """One MIG instance of a layout."""

    uuid: str
    """UUID in NVML's format."""
    device_index: int
    """NVML's index of the instance; index 0 stays unused if the layout leaves room on the GPU."""
    gpu_instance: int
    """NVML's id of the instance's GPU instance."""
    compute_instance: int
    """NVML's id of the instance's compute instance within the GPU instance."""
    profile: str
    """MIG profile, such as `1g.18gb`."""
    mig_gpu: MigSlices
    """Slices of the whole GPU."""
    gpu_slices: int
    """Compute slices of the instance's GPU instance."""
    compute_slices: int
    """Compute slices of the instance itself."""
    memory_bytes: int
    """Memory of the instance's GPU instance, in bytes."""
    start: int
    """Start of the instance's GPU instance on the GPU, in memory slices."""
    slices: int
    """Memory slices of the instance's GPU instance."""

    @property
    def share(self) -> float:
        """The instance's share of the GPU's multiprocessors, from 0 to 1."""
        return self.compute_slices / self.mig_gpu.compute


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A GPU's MIG layout from a given time."""

    start_ns: int
    """Start time, in nanoseconds since the scenario's start."""
    instances: tuple[SimulatedInstance, ...]
    """Instances in the scenario's order."""


def plan_cuts(
    layouts: Sequence[ScenarioMigLayout], *, gpu_uuid: str, mig_gpu: MigGpu | None, room_bytes: int
) -> list[Cut]:
    """Return a GPU's MIG layouts; `room_bytes` is the GPU's memory without the driver's reserve.

    Raise `UserError` if the GPU does not support a layout.
    """
    if layouts and mig_gpu is None:
        raise UserError("gpus.mig: this GPU model does not support MIG; remove gpus.mig")
    return [
        Cut(
            start_ns=round(layout.start_seconds * NS_PER_SECOND),
            instances=tuple(_instances(layout, mig_gpu, f"{gpu_uuid}/{number}", room_bytes)),
        )
        for number, layout in enumerate(layouts)
        if mig_gpu
    ]


def cut_at(cuts: Sequence[Cut], time_ns: int) -> Cut | None:
    """Return the layout at a given time; `None` while the GPU is unpartitioned."""
    found = [cut for cut in cuts if cut.start_ns <= time_ns]
    return found[-1] if found else None


def _instances(
    layout: ScenarioMigLayout, mig_gpu: MigGpu, layout_id: str, room_bytes: int
) -> Iterator[SimulatedInstance]:
    """Yield a layout's instances; their GPU instances are placed one after another.

    Raise `UserError` if a profile is unknown or the instances need more slices than the GPU has.
    """
    listed = [[given] if isinstance(given, str) else given for given in layout.instances]
    whole = mig_gpu.whole
    # The driver leaves index 0 unused if the layout leaves room on the GPU, and also after a GPU
    # instance was destroyed. An agent that stops at the first unused index would find no instance.
    device_index = 1 if sum(map(len, listed)) < whole.compute else 0
    taken = MigSlices(0, 0)
    for gpu_instance, profiles in enumerate(listed, start=1):
        start = taken.memory
        for compute_instance, profile in enumerate(profiles):
            own, compute_slices = _read_profile(profile, mig_gpu)
            yield SimulatedInstance(
                uuid=identities.instance_uuid(f"{layout_id}/{gpu_instance}/{compute_instance}"),
                device_index=device_index,
                gpu_instance=gpu_instance,
                compute_instance=compute_instance,
                profile=profile,
                mig_gpu=whole,
                gpu_slices=own.compute,
                compute_slices=compute_slices,
                memory_bytes=room_bytes * own.memory // whole.memory,
                start=start,
                slices=own.memory,
            )
            device_index += 1
        own, _ = _read_profile(profiles[0], mig_gpu)
        taken = MigSlices(taken.compute + own.compute, start + own.memory)
    if taken.compute > whole.compute or taken.memory > whole.memory:
        raise UserError(
            f"gpus.mig: instances: they need {taken.compute} compute slices and {taken.memory}"
            f" memory slices, but the GPU has {whole.compute} and {whole.memory}; remove some"
        )


def _read_profile(profile: str, mig_gpu: MigGpu) -> tuple[MigSlices, int]:
    """Return the slices of a profile's GPU instance, and the profile's own compute slices.

    Raise `UserError` if the profile is unknown.
    """
    found = _PROFILE.fullmatch(profile)
    own = mig_gpu.profiles.get(found[2]) if found else None
    if found is None or own is None:
        raise UserError(
            f"gpus.mig: instances: unknown profile {profile!r} for {mig_gpu.product} with"
            f" {mig_gpu.gigabytes} GB; available: {', '.join(mig_gpu.profiles)}"
        )
    return own, int(found[1] or own.compute)
