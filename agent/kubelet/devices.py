"""From the id under which a device plugin or a driver knows a device to the GPU that it is.

Pure. Every plugin has ids of its own; what none of the known forms fits, or what leads to no GPU
that this node has now, is left unresolved with a reason, never guessed.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from gpuledger.records import GpuFacts, MigInstance

_OLD_MIG: Final = re.compile(r"MIG-(?P<gpu>GPU-[^/]+)/(?P<instance>\d+)/\d+")
_GKE: Final = re.compile(r"nvidia(?P<minor>\d+)(/gi(?P<instance>\d+))?(/vgpu(?P<replica>\d+))?")
_COUNTED: Final = re.compile(r"(?P<gpu>GPU-.+?)(-_)?-(?P<replica>\d+)")
_CLAIMED_GPU: Final = re.compile(r"gpu-(?P<minor>\d+)")
_CLAIMED_MIG: Final = re.compile(
    r"gpu-(?P<minor>\d+)-mig-(?P<profile>[a-z0-9-]+)-(?P<first>\d+)-(?P<second>\d+)"
)


class Unresolved(StrEnum):
    """Why a device leads to no GPU."""

    UNKNOWN_FORM = "unknown_form"
    """The id has none of the known forms."""
    UNKNOWN_GPU = "unknown_gpu"
    """The node has no such GPU now."""
    UNKNOWN_INSTANCE = "unknown_instance"
    """The node has no such MIG instance now, or more than one that it may be."""
    CHOSEN_ELSEWHERE = "chosen_elsewhere"
    """The plugin gives another GPU than the id says (it follows the pod's annotations), and the
    node has several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePlace:
    """Where a device is."""

    gpu_uuid: str
    """The GPU."""
    gpu_instance: int | None = None
    """The driver's id of the GPU instance, where the device is a MIG instance."""
    replica: str | None = None
    """The share's name, where the device is one of several shares."""


@dataclass(frozen=True, kw_only=True)
class DeviceIndex:
    """The node's GPUs and MIG instances, to be found by what ids say of them."""

    uuids: frozenset[str] = frozenset()
    """The GPUs."""
    by_minor: Mapping[int, str] = field(default_factory=dict)
    """GPU by the number in its device file."""
    instances: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """GPU and GPU instance by the UUID of a MIG instance."""
    layouts: Mapping[str, Sequence[MigInstance]] = field(default_factory=dict)
    """MIG instances by GPU."""

    @classmethod
    def of(cls, gpus: Iterable[GpuFacts]) -> "DeviceIndex":
        """Index what an inventory says of a node's GPUs."""
        found = list(gpus)
        return cls(
            uuids=frozenset(gpu.uuid for gpu in found),
            by_minor={gpu.minor_number: gpu.uuid for gpu in found if gpu.minor_number is not None},
            instances={
                one.uuid: (gpu.uuid, one.gpu_instance) for gpu in found for one in gpu.instances
            },
            layouts={gpu.uuid: gpu.instances for gpu in found},
        )


def find_device(device_id: str, index: DeviceIndex) -> DevicePlace | Unresolved:
    """Find the device that a device plugin calls so."""
    whole, _, replica = device_id.partition("::")
    if whole in index.uuids:
        return DevicePlace(gpu_uuid=whole, replica=replica or None)
    if whole in index.instances:
        gpu_uuid, instance = index.instances[whole]
        return DevicePlace(gpu_uuid=gpu_uuid, gpu_instance=instance, replica=replica or None)
    if match := _OLD_MIG.fullmatch(whole):
        return _place(match["gpu"], index, instance=int(match["instance"]), replica=replica or None)
    if match := _GKE.fullmatch(device_id):
        return _find_gke(match, index)
    if whole.startswith("MIG-"):
        return Unresolved.UNKNOWN_INSTANCE
    return _find_counted(whole, index)


def find_claimed(
    device_name: str, index: DeviceIndex, *, share_id: str | None
) -> DevicePlace | Unresolved:
    """Find the device that NVIDIA's driver for resource claims calls so."""
    if match := _CLAIMED_GPU.fullmatch(device_name):
        return _place(index.by_minor.get(int(match["minor"])), index, replica=share_id)
    match = _CLAIMED_MIG.fullmatch(device_name)
    if match is None:
        return Unresolved.UNKNOWN_FORM
    gpu_uuid = index.by_minor.get(int(match["minor"]))
    if gpu_uuid is None:
        return Unresolved.UNKNOWN_GPU
    instance = _find_instance(match, index.layouts[gpu_uuid])
    if instance is None:
        return Unresolved.UNKNOWN_INSTANCE
    return DevicePlace(gpu_uuid=gpu_uuid, gpu_instance=instance, replica=share_id)


def _place(
    gpu_uuid: str | None,
    index: DeviceIndex,
    *,
    instance: int | None = None,
    replica: str | None = None,
) -> DevicePlace | Unresolved:
    if gpu_uuid is None or gpu_uuid not in index.uuids:
        return Unresolved.UNKNOWN_GPU
    return DevicePlace(gpu_uuid=gpu_uuid, gpu_instance=instance, replica=replica)


def _find_gke(match: re.Match[str], index: DeviceIndex) -> DevicePlace | Unresolved:
    return _place(
        index.by_minor.get(int(match["minor"])),
        index,
        instance=int(match["instance"]) if match["instance"] else None,
        replica=match["replica"],
    )


def _find_counted(device_id: str, index: DeviceIndex) -> DevicePlace | Unresolved:
    """Find a GPU of which a plugin made several, numbered behind the UUID.

    HAMi (`UUID-n`) and Alibaba's plugin for memory (`UUID-_-n`) take the kubelet's choice as a
    count: which GPU it is, an annotation of the pod says. Where there is but one, it is that one.
    """
    if not device_id.startswith("GPU-"):
        return Unresolved.UNKNOWN_FORM
    match = _COUNTED.fullmatch(device_id)
    if match is None or match["gpu"] not in index.uuids:
        return Unresolved.UNKNOWN_GPU
    if len(index.uuids) > 1:
        return Unresolved.CHOSEN_ELSEWHERE
    return DevicePlace(gpu_uuid=match["gpu"], replica=match["replica"])


def _find_instance(match: re.Match[str], layout: Sequence[MigInstance]) -> int | None:
    """Find the one GPU instance that the name can mean.

    The name ends in profile id, placement's start and size, or, in newer versions of the driver,
    in profile, profile id and placement's start.
    """
    is_newer = not match["profile"].isdigit()
    start = int(match["second"] if is_newer else match["first"])
    if not is_newer and any(one.placement_start is None for one in layout):
        return None
    fitting = {
        one.gpu_instance
        for one in layout
        if one.placement_start in (start, None)
        and (not is_newer or _as_in_names(one.profile) == match["profile"])
    }
    return fitting.pop() if len(fitting) == 1 else None


def _as_in_names(profile: str | None) -> str:
    """Write a profile as names of devices do: `1g.10gb+me` is `1g10gb-me`."""
    return re.sub(r"[^a-z0-9]", "-", (profile or "").lower().replace(".", "")).strip("-")
