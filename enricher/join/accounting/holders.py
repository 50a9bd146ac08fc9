"""Who holds each GPU of a tick, by the kubelet's word: whose a GPU's idle part is.

Pure. A device is shared out among the containers that it was given to, never among processes: the
kubelet names pods, a cgroup names UIDs, and one tick does not say which are the same.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from gpuledger.records import DeviceAllocation, GpuReading, NodeSample

_GIB: Final = 1 << 30
# Resources whose devices are pieces of memory, as Alibaba's plugin for cGPU counts them.
_UNIT_BYTES: Final = {"aliyun.com/gpu-mem": _GIB}
_INSTANCE_UUID: Final = re.compile(r"MIG-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


# What one container holds of a device: the position, in the tick's `allocations`, of its first one
# there, and which part of the device that is. The parts of all holders are 1 in sum at most.
Part = tuple[int, float]
Parts = Sequence[Part]
_NOBODY: Final[Parts] = ()


def find_holders(sample: NodeSample) -> Sequence[Parts]:
    """Give, for each row of the tick, what each container holds of it."""
    if not sample.allocations:
        return [_NOBODY] * len(sample.gpus)
    places: dict[str, list[int]] = {}
    for place, one in enumerate(sample.allocations):
        places.setdefault(one.gpu_uuid, []).append(place)
    return [_parts(reading, places, sample.allocations) for reading in sample.gpus]


def _parts(
    reading: GpuReading, places: Mapping[str, list[int]], allocations: Sequence[DeviceAllocation]
) -> Parts:
    on_gpu = places.get(reading.parent_uuid or reading.uuid)
    if on_gpu is None:
        return _NOBODY
    own = [place for place in on_gpu if _is_of(allocations[place], reading)]
    if len(own) == 1 and allocations[own[0]].resource_name not in _UNIT_BYTES:
        return [(own[0], 1.0)]
    return _share_out(reading, own, allocations)


def _is_of(allocation: DeviceAllocation, reading: GpuReading) -> bool:
    if allocation.gpu_instance is None or reading.parent_uuid is None:
        return allocation.gpu_instance is None and reading.parent_uuid is None
    named = allocation.device_id.partition("::")[0]
    if _INSTANCE_UUID.fullmatch(named):
        # Of the compute instances of one GPU instance, it names the one that is meant.
        return named == reading.uuid
    return allocation.gpu_instance == reading.gpu_instance


def _share_out(
    reading: GpuReading, own: Iterable[int], allocations: Sequence[DeviceAllocation]
) -> Parts:
    """Share a device out by the number of devices that a container has of it."""
    first: dict[tuple[str, str, str], int] = {}
    count: dict[int, int] = {}
    for place in own:
        one = allocations[place]
        holder = first.setdefault((one.namespace, one.pod, one.container), place)
        count[holder] = count.get(holder, 0) + 1
    held = sum(count.values())
    whole = max(held, _units(reading, [allocations[place] for place in first.values()]))
    return [(place, number / whole) for place, number in count.items()]


def _units(reading: GpuReading, held: Iterable[DeviceAllocation]) -> int:
    """Give of how many pieces the device is, where the resource says so; else 0.

    The replicas of a time-sliced device are none: who has one may use all that the others leave.
    """
    sizes = {_UNIT_BYTES.get(one.resource_name) for one in held}
    size = sizes.pop() if len(sizes) == 1 else None
    return (reading.memory_total_bytes or 0) // size if size else 0
