"""Who holds each GPU of a tick, by the kubelet's word: whose a GPU's idle part is.

Pure. A device is shared out among the containers that it was given to, never among processes: the
kubelet names pods, a cgroup names UIDs, and one tick does not say which are the same.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Final

from gpuledger.errors import GpuledgerError
from gpuledger.records import DeviceAllocation, GpuReading, NodeSample

_GIB: Final = 1 << 30
# Resources whose devices are pieces of memory, as Alibaba's plugin for cGPU counts them.
_UNIT_BYTES: Final = {"aliyun.com/gpu-mem": _GIB}
_INSTANCE_UUID: Final = re.compile(r"MIG-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


MAX_ENTRIES: Final = 65_536
"""More entries than this are more bytes than a message may have."""

# What one container holds of a device: the position, in the tick's `allocations`, of its first one
# there, and which part of the device that is. The parts of all holders are 1 in sum at most.
Part = tuple[int, float]
Parts = Sequence[Part]
_NOBODY: Final[Parts] = ()
# A GPU by its UUID alone; an instance by that of its GPU, and its own UUID or its number there.
_Key = tuple[str, str | int | None]
_Devices = dict[_Key, "_Device"]
# For each container, by namespace, pod and name: the position of its first, and how many it has.
_Held = dict[tuple[str, str, str], tuple[int, int]]


class TooManyEntriesError(GpuledgerError):
    """The books of a tick would have more entries than can be published; says of what."""


def find_holders(sample: NodeSample) -> Sequence[Parts]:
    """Return, for each row of the tick, what each container holds of it.

    Raises `TooManyEntriesError` where that is more than a message can hold: the kubelet may give
    every compute instance of a GPU instance to as many containers as there are.
    """
    if not sample.allocations:
        return [_NOBODY] * len(sample.gpus)
    devices = _devices_of(sample.allocations)
    left = MAX_ENTRIES
    found = []
    for reading in sample.gpus:
        parts = _parts(reading, devices, sample.allocations)
        left -= len(parts)
        if left < 0:
            raise TooManyEntriesError(f"idle has more than {MAX_ENTRIES} holders")
        found.append(parts)
    return found


class _Device:
    """What the kubelet has given of one device."""

    __slots__ = ("held", "places")

    def __init__(self) -> None:
        self.places: list[int] = []
        """Positions in the tick's `allocations`, in order."""
        self.held: _Held | None = None
        """What each container has of it, once that is asked: rows of one device share it."""


def _devices_of(allocations: Sequence[DeviceAllocation]) -> _Devices:
    """Return the allocations by the device that each is of: a GPU, or an instance of one."""
    devices: _Devices = {}
    for place, allocation in enumerate(allocations):
        device = devices.get(key := _key_of(allocation))
        if device is None:
            devices[key] = device = _Device()
        device.places.append(place)
    return devices


def _key_of(allocation: DeviceAllocation) -> _Key:
    if allocation.gpu_instance is None:
        return allocation.gpu_uuid, None
    named = allocation.device_id.partition("::")[0]
    # Of the compute instances of one GPU instance, a UUID names the one that is meant.
    is_meant = _INSTANCE_UUID.fullmatch(named)
    return allocation.gpu_uuid, named if is_meant else allocation.gpu_instance


def _parts(
    reading: GpuReading, devices: _Devices, allocations: Sequence[DeviceAllocation]
) -> Parts:
    gpu = reading.parent_uuid or reading.uuid
    numbered = None
    if reading.parent_uuid is None:
        device = devices.get((gpu, None))
    else:
        device = devices.get((gpu, reading.uuid))
        if reading.gpu_instance is not None:
            numbered = devices.get((gpu, reading.gpu_instance))
    if device is None:
        device, numbered = numbered, None
    if device is None:
        return _NOBODY
    places = device.places
    if numbered is None and len(places) == 1:
        place = places[0]
        if allocations[place].resource_name not in _UNIT_BYTES:
            return [(place, 1.0)]
    held = _held(device, allocations)
    if numbered is not None:
        held = _both(held, _held(numbered, allocations))
    return _share_out(reading, held, allocations)


def _held(device: _Device, allocations: Sequence[DeviceAllocation]) -> _Held:
    held = device.held
    if held is None:
        device.held = held = {}
        for place in device.places:
            one = allocations[place]
            container = one.namespace, one.pod, one.container
            first, count = held.get(container, (place, 0))
            held[container] = first, count + 1
    return held


def _both(one: _Held, other: _Held) -> _Held:
    """Return what is held by an instance's UUID and by its number, which no kubelet mixes."""
    both = dict(one)
    for container, (first, count) in other.items():
        before, more = both.get(container, (first, 0))
        both[container] = min(first, before), count + more
    return dict(sorted(both.items(), key=lambda item: item[1]))


def _share_out(reading: GpuReading, held: _Held, allocations: Sequence[DeviceAllocation]) -> Parts:
    """Share a device out by the number of devices that a container has of it."""
    count = sum([number for _, number in held.values()])
    whole = max(count, _units(reading, [allocations[place] for place, _ in held.values()]))
    return [(place, number / whole) for place, number in held.values()]


def _units(reading: GpuReading, held: Iterable[DeviceAllocation]) -> int:
    """Return of how many pieces the device is, where the resource says so; else 0.

    The replicas of a time-sliced device are none: who has one may use all that the others leave.
    """
    sizes = {_UNIT_BYTES.get(one.resource_name) for one in held}
    size = sizes.pop() if len(sizes) == 1 else None
    return (reading.memory_total_bytes or 0) // size if size else 0
