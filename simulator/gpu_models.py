"""What GPUs are made of: products, their generations, and the instances that they are cut into.

Here live product facts and the geometry of MIG alone. Which GPU sits in which node is the
scenario's business, what runs in an instance `simulator.device`'s.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from gpuledger.clock import NS_PER_SECOND
from simulator import identities
from simulator.scenario.schema import ScenarioMigLayout

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


MAX_INSTANCES: Final = 7
MEMORY_SLICES: Final = 8
_PROFILE: Final = re.compile(r"(?:(\d)c\.)?(\d)g\.(\d+)gb")


@dataclass(frozen=True, kw_only=True)
class SimulatedInstance:
    """One instance of a cut."""

    uuid: str
    """Its UUID as NVML writes it."""
    device_index: int
    """NVML's index of it; a cut with room for more leaves a hole at 0."""
    gpu_instance: int
    """NVML's id of its GPU instance."""
    compute_instance: int
    """NVML's id of it in the GPU instance."""
    profile: str
    """Its profile."""
    gpu_slices: int
    """Compute slices of its GPU instance, of seven."""
    compute_slices: int
    """Those of them that it has."""
    memory_bytes: int
    """Memory of its GPU instance."""
    start: int
    """Where its GPU instance begins on the GPU, in memory slices."""
    slices: int
    """Memory slices of its GPU instance, of eight."""

    @property
    def share(self) -> float:
        """Return its share of the GPU's multiprocessors."""
        return self.compute_slices / MAX_INSTANCES


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A GPU's instances from a time on."""

    start_ns: int
    """From when on."""
    instances: tuple[SimulatedInstance, ...]
    """In the scenario's order."""


def plan_cuts(layouts: Sequence[ScenarioMigLayout], *, gpu_uuid: str, room_bytes: int) -> list[Cut]:
    """Lay out a GPU's cuts; `room_bytes` is its memory without the driver's reserve."""
    return [
        Cut(
            start_ns=round(layout.start_seconds * NS_PER_SECOND),
            instances=tuple(_instances(layout, f"{gpu_uuid}/{number}", room_bytes)),
        )
        for number, layout in enumerate(layouts)
    ]


def cut_at(cuts: Sequence[Cut], time_ns: int) -> Cut | None:
    """Return the cut at a time; `None` while the GPU is whole."""
    found = [cut for cut in cuts if cut.start_ns <= time_ns]
    return found[-1] if found else None


def _instances(
    layout: ScenarioMigLayout, layout_id: str, room_bytes: int
) -> Iterator[SimulatedInstance]:
    """Yield a layout's instances; their GPU instances lie one behind the other."""
    listed = [[given] if isinstance(given, str) else given for given in layout.instances]
    # Where the GPU has room for more, the driver leaves index 0 free, as it does after a GPU
    # instance was destroyed: whoever stops at the first hole sees nothing at all.
    device_index = 1 if sum(map(len, listed)) < MAX_INSTANCES else 0
    start = 0
    for gpu_instance, profiles in enumerate(listed, start=1):
        for compute_instance, profile in enumerate(profiles):
            found, slices = _read_profile(profile, room_bytes)
            yield SimulatedInstance(
                uuid=identities.instance_uuid(f"{layout_id}/{gpu_instance}/{compute_instance}"),
                device_index=device_index,
                gpu_instance=gpu_instance,
                compute_instance=compute_instance,
                profile=profile,
                gpu_slices=int(found[2]),
                compute_slices=int(found[1] or found[2]),
                memory_bytes=room_bytes * slices // MEMORY_SLICES,
                start=start,
                slices=slices,
            )
            device_index += 1
        start += _read_profile(profiles[0], room_bytes)[1]


def _read_profile(profile: str, room_bytes: int) -> tuple[re.Match[str], int]:
    """Return a profile's parts, and how many memory slices of the GPU it has."""
    found = _PROFILE.fullmatch(profile)
    if found is None:
        raise ValueError(profile)
    # Its name rounds the size, and by product differently: the nearest number of slices is meant.
    slices = round(MEMORY_SLICES * int(found[3]) * _GIB / room_bytes)
    return found, min(MEMORY_SLICES, max(1, slices))
