"""Who holds each device of a tick, by the kubelet's word.

The kubelet says which devices it has given to which container (`DeviceAllocation`). Which row of a
tick that is, is said in one of three ways, and each allocation in one alone:

- a GPU as a whole, by the GPU's UUID and no GPU instance: the GPU's own row, cut or not;
- a MIG instance by its UUID, in the device's id: the row with that UUID, so of the compute
  instances of one GPU instance the one that is meant;
- a MIG instance by its number on its GPU, as older drivers and GKE's plugin do: the rows of all
  compute instances of that GPU instance.

`devices_named_by` and `device_of` are this rule, for both who ask. They ask for different things:

- The join (`find_holders`) asks whose a device's idle part is. Several containers may hold one
  device, as replicas or pieces of memory: it is shared out among them by what each holds.
- The agent's page (`exclusive_holder`) asks who has all of a device, as dcgm-exporter's labels say
  that one container has it. Of replicas nobody has all, even while nobody has the others.

A device is shared out among the containers that it was given to, never among processes: the
kubelet names pods, a cgroup names UIDs, and one tick does not say which are the same. Pure.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from gpuledger.errors import GpuledgerError
from gpuledger.records import DeviceAllocation, GpuReading, NodeSample

_GIB: Final = 1 << 30
# Resources whose devices are pieces of memory, as Alibaba's plugin for cGPU counts them.
_UNIT_BYTES: Final = {"aliyun.com/gpu-mem": _GIB}
_INSTANCE_UUID: Final = re.compile(r"MIG-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


MAX_ENTRIES: Final = 65_536
"""More entries than this are more bytes than a message may have."""

# What one container holds of a device, or nobody: the position, in the tick's `allocations`, of its
# first one there, and how many pieces of the device it has.
Part = tuple[int | None, int]


class HeldParts(NamedTuple):
    """Into which parts a device is held: by containers, and by nobody."""

    parts: Sequence[Part]
    """By namespace, pod and container, nobody's last; the pieces of all are the whole."""
    whole: int
    """How many pieces the device has."""


NOBODYS: Final = HeldParts([(None, 1)], 1)
"""A device that nobody holds."""
# A GPU by its UUID alone; an instance by that of its GPU, and its own UUID or its number there.
DeviceKey = tuple[str, str | int | None]
_Devices = dict[DeviceKey, "_Device"]
# For each container, by namespace, pod and name: the position of its first, and how many it has.
_Held = dict[tuple[str, str, str], tuple[int, int]]


class TooManyEntriesError(GpuledgerError):
    """The books of a tick would have more entries than can be published; says of what."""


class HoldingContainer(NamedTuple):
    """A container as the kubelet names it."""

    namespace: str
    """Namespace of the pod."""
    pod: str
    """Name of the pod."""
    container: str
    """Name of the container in the pod."""


def device_of(allocation: DeviceAllocation) -> DeviceKey:
    """Return which device an allocation is of."""
    if allocation.gpu_instance is None:
        return allocation.gpu_uuid, None
    named = allocation.device_id.partition("::")[0]
    # Older drivers and GKE have no UUID there; then the number says which.
    is_uuid = _INSTANCE_UUID.fullmatch(named)
    return allocation.gpu_uuid, named if is_uuid else allocation.gpu_instance


def devices_named_by(reading: GpuReading) -> Sequence[DeviceKey]:
    """Return the devices that a row of a tick is: an instance by its UUID, and by its number."""
    gpu = reading.parent_uuid
    if gpu is None:
        return ((reading.uuid, None),)
    if reading.gpu_instance is None:
        return ((gpu, reading.uuid),)
    return (gpu, reading.uuid), (gpu, reading.gpu_instance)


def exclusive_holder(
    reading: GpuReading, allocations: Iterable[DeviceAllocation]
) -> HoldingContainer | None:
    """Return the one container that has all of a device; `None` where none or several have it."""
    devices = devices_named_by(reading)
    holders = set()
    for allocation in allocations:
        if device_of(allocation) not in devices:
            continue
        # Whatever the others have: a share is not the whole, even alone.
        if allocation.replica is not None:
            return None
        holders.add(HoldingContainer(allocation.namespace, allocation.pod, allocation.container))
    return holders.pop() if len(holders) == 1 else None


def find_holders(sample: NodeSample) -> Sequence[HeldParts]:
    """Return, for each row of the tick, what each container and nobody holds of it.

    Raises `TooManyEntriesError` where that is more than a message can hold: the kubelet may give
    every compute instance of a GPU instance to as many containers as there are.
    """
    if not sample.allocations:
        return [NOBODYS] * len(sample.gpus)
    devices = _devices_of(sample.allocations)
    left = MAX_ENTRIES
    found = []
    for reading in sample.gpus:
        held = _held_parts(reading, devices, sample.allocations)
        left -= len(held.parts)
        if left < 0:
            raise TooManyEntriesError(f"idle has more than {MAX_ENTRIES} holders")
        found.append(held)
    return found


class _Device:
    """What the kubelet has given of one device."""

    __slots__ = ("held", "indices", "unit_sizes")

    def __init__(self) -> None:
        self.indices: list[int] = []
        """Positions in the tick's `allocations`, in order."""
        self.held: _Held | None = None
        """What each container has of it, once that is asked: rows of one device share it."""
        self.unit_sizes: set[int] = set()
        """In pieces of how many bytes it is given out, 0 where in others; known with `held`."""


def _devices_of(allocations: Sequence[DeviceAllocation]) -> _Devices:
    """Return the allocations by the device that each is of: a GPU, or an instance of one."""
    devices: _Devices = {}
    for index, allocation in enumerate(allocations):
        device = devices.get(key := device_of(allocation))
        if device is None:
            devices[key] = device = _Device()
        device.indices.append(index)
    return devices


def _held_parts(
    reading: GpuReading, devices: _Devices, allocations: Sequence[DeviceAllocation]
) -> HeldParts:
    found = [devices[key] for key in devices_named_by(reading) if key in devices]
    if not found:
        return NOBODYS
    device = found[0]
    if len(found) == 1 and len(device.indices) == 1:
        # The common case: one container has all of it.
        index = device.indices[0]
        if allocations[index].resource_name not in _UNIT_BYTES:
            return HeldParts([(index, 1)], 1)
    held, count, sizes = _held(device, allocations), len(device.indices), device.unit_sizes
    if len(found) > 1:
        # By an instance's UUID and by its number, which no kubelet mixes; but anybody may write it.
        held, more = dict(held), found[1]
        for container, (first, number) in _held(more, allocations).items():
            before, had = held.get(container, (first, 0))
            held[container] = min(first, before), number + had
        count, sizes = count + len(more.indices), sizes | more.unit_sizes
    # Shared out by the number of devices that a container has of it.
    whole = max(count, _units(reading, sizes))
    # By their names, never by the order in which the kubelet told of them.
    parts: list[Part] = [held[container] for container in sorted(held)]
    if whole > count:
        parts.append((None, whole - count))
    return HeldParts(parts, whole)


def _held(device: _Device, allocations: Sequence[DeviceAllocation]) -> _Held:
    held = device.held
    if held is None:
        device.held = held = {}
        for index in device.indices:
            allocation = allocations[index]
            container = allocation.namespace, allocation.pod, allocation.container
            first, count = held.get(container, (index, 0))
            held[container] = first, count + 1
            device.unit_sizes.add(_UNIT_BYTES.get(allocation.resource_name, 0))
    return held


def _units(reading: GpuReading, sizes: Iterable[int]) -> int:
    """Return of how many pieces the device is, where the resource says so; else 0.

    The replicas of a time-sliced device are none: who has one may use all that the others leave.
    """
    # Resources of different kinds have no unit in common.
    size, *others = sizes
    return (reading.memory_total_bytes or 0) // size if size and not others else 0
