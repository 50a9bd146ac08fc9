"""GPUs cut into instances: which instances there are at a time, and what each has of the GPU.

Here lives the geometry. What runs in an instance is `device`'s business, how NVML tells of it
`nvml.mig`'s.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from simulator import identities
from simulator.scenario.schema import ScenarioMigLayout

MAX_INSTANCES: Final = 7
_MEMORY_SLICES: Final = 8
_GB: Final = 1 << 30
_NS: Final = 1_000_000_000
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
            start_ns=round(layout.start_seconds * _NS),
            instances=_instances(layout, f"{gpu_uuid}/{number}", room_bytes),
        )
        for number, layout in enumerate(layouts)
    ]


def cut_at(cuts: Sequence[Cut], time_ns: int) -> Cut | None:
    """Return the cut at a time; `None` while the GPU is whole."""
    found = [cut for cut in cuts if cut.start_ns <= time_ns]
    return found[-1] if found else None


def _instances(
    layout: ScenarioMigLayout, what: str, room_bytes: int
) -> tuple[SimulatedInstance, ...]:
    parts = [
        (gpu_instance, compute_instance, profile)
        for gpu_instance, given in enumerate(layout.instances, start=1)
        for compute_instance, profile in enumerate([given] if isinstance(given, str) else given)
    ]
    hole = 1 if len(parts) < MAX_INSTANCES else 0
    starts = _starts(layout, room_bytes)
    return tuple(
        _instance(
            profile,
            uuid=identities.instance_uuid(f"{what}/{gpu_instance}/{compute_instance}"),
            device_index=place + hole,
            ids=(gpu_instance, compute_instance),
            start=starts[gpu_instance],
            room_bytes=room_bytes,
        )
        for place, (gpu_instance, compute_instance, profile) in enumerate(parts)
    )


def _starts(layout: ScenarioMigLayout, room_bytes: int) -> dict[int, int]:
    """Return where each GPU instance begins: one behind the other."""
    starts: dict[int, int] = {}
    start = 0
    for gpu_instance, given in enumerate(layout.instances, start=1):
        starts[gpu_instance] = start
        start += _slices(_match(given if isinstance(given, str) else given[0]), room_bytes)
    return starts


def _match(profile: str) -> re.Match[str]:
    found = _PROFILE.fullmatch(profile)
    if found is None:
        raise ValueError(profile)
    return found


def _slices(profile: re.Match[str], room_bytes: int) -> int:
    nominal_bytes = int(profile[3]) * _GB
    return min(_MEMORY_SLICES, max(1, round(_MEMORY_SLICES * nominal_bytes / room_bytes)))


def _instance(
    profile: str, *, uuid: str, device_index: int, ids: tuple[int, int], start: int, room_bytes: int
) -> SimulatedInstance:
    found = _match(profile)
    slices = _slices(found, room_bytes)
    return SimulatedInstance(
        uuid=uuid,
        device_index=device_index,
        gpu_instance=ids[0],
        compute_instance=ids[1],
        profile=profile,
        gpu_slices=int(found[2]),
        compute_slices=int(found[1] or found[2]),
        memory_bytes=room_bytes * slices // _MEMORY_SLICES,
        start=start,
        slices=slices,
    )
