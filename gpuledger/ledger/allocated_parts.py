"""Who holds each device of a tick, by the kubelet's allocations and the scheduler's to jobs.

The kubelet says which devices it has given to which container (`DeviceAllocation`). Which row of a
tick that is, is said in one of three ways, and each allocation in one alone:

- a GPU as a whole, by the GPU's UUID and no GPU instance: the GPU's own row;
- a MIG instance by its UUID, in the device's id: the row with that UUID, so of the compute
  instances of one GPU instance the one that is meant;
- a MIG instance by its number on its GPU, as older drivers and GKE's plugin do: the rows of all
  compute instances of that GPU instance.

`devices_named_by` and `device_of` are this rule, for both who ask. They ask for different things:

- The join (`find_allocated_parts`) asks how much of a device each holds, and so whose its idle part
  is. Several containers may hold one device, as replicas or pieces of memory.
- The agent's page (`exclusive_container`) asks who has all of a device, as dcgm-exporter's labels
  say that one container has it. Of replicas nobody has all, even while nobody has the others.

A device is shared out among the containers that it was given to, never among processes: the
kubelet names pods, a cgroup names UIDs, and one tick does not say which are the same.

How much of a device a container holds is a fraction of whole numbers, and independent of use:

- a GPU or an instance as a whole is 1;
- of replicas, those it has of those that the kubelet has to give (`device_replicas`), else of those
  that are given;
- of pieces of memory and of cores, the greater of the two parts: pieces of memory of those that the
  device has, pieces of cores of 100. A plugin makes as many pieces of a GPU as its memory has of
  its unit, be that a GiB or a MiB, which no id says. So the kubelet's own count of them is the
  device's memory in pieces; without it, pieces are a GiB each;
- what a resource claim gives to several pods is each one's equally, and of a pod its containers';
- what a claim for admin access gives is nothing: it takes the device from nobody.

What nobody holds is what is left of 1. Where more than 1 is held, each has its part of the sum.

A scheduler such as Slurm gives a job a GPU or an instance as a whole (`JobAllocation`): the jobs of
a device have equal parts of 1. They come behind the containers, by their ids. A device that is both
a job's and a container's is held twice, and each has its part of the sum.

A GPU that is cut runs nothing outside its instances. So its own row, the slices that no instance
has, is nobody's whatever was given; and who has the whole GPU holds the instances that were given
to nobody themselves.
Pure.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import lcm
from typing import Final, NamedTuple

from gpuledger.errors import GpuledgerError
from gpuledger.records import DeviceAllocation, GpuReading, JobAllocation, NodeSample

_GIB: Final = 1 << 30
# Resources whose devices are pieces of memory, as Alibaba's plugin for cGPU counts them.
_UNIT_BYTES: Final = {"aliyun.com/gpu-mem": _GIB}
# Resources whose devices are pieces of a GPU's cores, and how many the GPU has.
_CORES: Final = {"aliyun.com/gpu-core": 100, "aliyun.com/gpu-core.percentage": 100}
# Beyond this a common denominator is rounded to it: no kubelet gives devices out in such parts.
_MAX_WHOLE: Final = 1 << 60
_INSTANCE_UUID: Final = re.compile(r"MIG-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


MAX_ENTRIES: Final = 65_536
"""More entries than this are more bytes than a message may have."""

# What one container, one job or nobody holds of a device: the position among the tick's
# `allocated_containers` or the job's id, and how much of `AllocatedParts.whole` it has.
Part = tuple[int | str | None, int]


class AllocatedParts(NamedTuple):
    """Into which parts a device is held: by containers, by jobs, and by nobody."""

    parts: Sequence[Part]
    """By namespace, pod and container, behind them jobs by their ids, nobody's last; all together
    have the whole."""
    whole: int
    """What the device comes to, over which each part is a fraction of it."""


UNALLOCATED_PARTS: Final = AllocatedParts([(None, 1)], 1)
"""A device that nobody holds."""
# A GPU by its UUID alone; an instance by that of its GPU, and its own UUID or its number there.
DeviceKey = tuple[str, str | int | None]
_Devices = dict[DeviceKey, "_Device"]
# Namespace, pod and container, as `AllocatedContainer` names them.
_Name = tuple[str, str, str]


class TooManyEntriesError(GpuledgerError):
    """The books of a tick would have more entries than can be published; says of what."""


class AllocatedContainer(NamedTuple):
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


def exclusive_container(
    reading: GpuReading, allocations: Iterable[DeviceAllocation]
) -> AllocatedContainer | None:
    """Return the container that alone has all of a device; `None` where none or several have it."""
    devices = devices_named_by(reading)
    candidates = set()
    for allocation in allocations:
        if allocation.admin_access or device_of(allocation) not in devices:
            continue
        # Whatever the others have: a share is not the whole, even alone.
        if allocation.replica is not None:
            return None
        candidates.add(
            AllocatedContainer(allocation.namespace, allocation.pod, allocation.container)
        )
    return candidates.pop() if len(candidates) == 1 else None


def allocated_containers(allocations: Iterable[DeviceAllocation]) -> list[AllocatedContainer]:
    """Return the containers that hold something, by their names: entries point to them so."""
    return sorted(
        {
            AllocatedContainer(allocation.namespace, allocation.pod, allocation.container)
            for allocation in allocations
            if not allocation.admin_access
        }
    )


def find_allocated_parts(sample: NodeSample) -> Sequence[AllocatedParts]:
    """Return, for each row of the tick, what each container, each job and nobody holds of it.

    Raises `TooManyEntriesError` where that is more than a message can hold: the kubelet may give
    every compute instance of a GPU instance to as many containers as there are.
    """
    allocated = _allocated_to_containers(sample)
    return _with_jobs(allocated, sample) if sample.job_allocations else allocated


def jobs_by_device(allocations: Iterable[JobAllocation]) -> dict[DeviceKey, list[str]]:
    """Return the jobs to which each device is given, sorted, each once."""
    found: dict[DeviceKey, set[str]] = {}
    for allocation in allocations:
        device = allocation.gpu_uuid, allocation.gpu_instance
        found.setdefault(device, set()).add(allocation.job_id)
    return {device: sorted(jobs) for device, jobs in found.items()}


def jobs_of(
    reading: GpuReading, jobs: Mapping[DeviceKey, Sequence[str]], *, is_allocated: bool = False
) -> Sequence[str]:
    """Return the jobs that hold a device: its own, else those that have the whole GPU.

    `is_allocated`: containers hold it, and what the whole GPU's jobs have is the rest of it.
    """
    own = [job for key in devices_named_by(reading) for job in jobs.get(key, ())]
    if own or reading.parent_uuid is None or is_allocated:
        return own
    return jobs.get((reading.parent_uuid, None), ())


def _with_jobs(allocated: Sequence[AllocatedParts], sample: NodeSample) -> Sequence[AllocatedParts]:
    """Return what containers hold, and jobs beside them."""
    jobs = jobs_by_device(sample.job_allocations or ())
    cut = {reading.parent_uuid for reading in sample.gpus}
    left = MAX_ENTRIES
    found = []
    for reading, parts in zip(sample.gpus, allocated, strict=True):
        is_allocated = parts.parts[0][0] is not None
        names = () if reading.uuid in cut else jobs_of(reading, jobs, is_allocated=is_allocated)
        left -= len(names)
        if left < 0:
            raise TooManyEntriesError(f"idle has more than {MAX_ENTRIES} jobs")
        found.append(_beside_jobs(parts, names) if names else parts)
    return found


def _beside_jobs(allocated: AllocatedParts, jobs: Sequence[str]) -> AllocatedParts:
    """Return the parts of containers and of jobs, which together have all of the device."""
    number, whole = len(jobs), allocated.whole
    parts: list[Part] = [
        (container, part * number) for container, part in allocated.parts if container is not None
    ]
    if not parts:
        return AllocatedParts([(job, 1) for job in jobs], number)
    total = sum(part for _, part in parts) + whole * number
    return AllocatedParts([*parts, *((job, whole) for job in jobs)], total)


def _allocated_to_containers(sample: NodeSample) -> Sequence[AllocatedParts]:
    if not sample.allocations:
        return [UNALLOCATED_PARTS] * len(sample.gpus)
    whole = _whole_gpus(sample.allocations)
    cut = {reading.parent_uuid for reading in sample.gpus}
    if len(whole) == len(sample.allocations) and cut == {None}:
        names = sorted(set(whole.values()))
        positions = {name: position for position, name in enumerate(names)}
        # The common case, in a quarter of the time: each GPU as a whole is one container's.
        all_of = list(map(_whole_of, range(len(names))))
        parts = {uuid: all_of[positions[name]] for uuid, name in whole.items()}
        return [parts.get(reading.uuid, UNALLOCATED_PARTS) for reading in sample.gpus]
    allocations = [each for each in sample.allocations if not each.admin_access]
    devices = _devices_of(allocations)
    containers = allocated_containers(allocations)
    positions = {container: position for position, container in enumerate(containers)}
    left = MAX_ENTRIES
    found = []
    for reading in sample.gpus:
        if reading.uuid in cut:
            found.append(UNALLOCATED_PARTS)
            continue
        of_row = [devices[key] for key in devices_named_by(reading) if key in devices]
        gpu = reading.parent_uuid
        if not of_row and gpu is not None and (gpu, None) in devices:
            of_row = [devices[gpu, None]]
        allocated = _allocated_parts(reading, of_row, allocations, positions)
        # Whoever names very many resources may not make each of very many rows cost as much.
        left -= max(len(allocated.parts), *(len(device.pieces or ()) for device in of_row), 0)
        if left < 0:
            raise TooManyEntriesError(f"idle has more than {MAX_ENTRIES} holders")
        found.append(allocated)
    return found


def _whole_gpus(allocations: Iterable[DeviceAllocation]) -> dict[str, _Name]:
    """Return the holder of each GPU that is allocated as a whole, by the GPU's UUID.

    They are fewer than the allocations where one is of a part, or holds nothing, or is of the same
    GPU as another one.
    """
    return {
        allocation.gpu_uuid: (allocation.namespace, allocation.pod, allocation.container)
        for allocation in allocations
        if allocation.gpu_instance is None
        and allocation.replica is None
        and not allocation.admin_access
    }


@lru_cache(maxsize=256)
def _whole_of(position: int) -> AllocatedParts:
    """Return the parts of a device that one container has all of."""
    return AllocatedParts([(position, 1)], 1)


class _Piece(NamedTuple):
    """What one container holds of a device by one resource, or by one claim."""

    container: AllocatedContainer
    resource_name: str
    number: int
    """How many devices of the kubelet's it has there."""
    sharers: int
    """Among how many containers each of these is divided."""
    is_whole: bool
    """Whether each of them is all of the device."""


class _Device:
    """The allocations of one device."""

    __slots__ = ("given", "indices", "pieces", "replicas")

    def __init__(self) -> None:
        self.indices: list[int] = []
        """Positions in the tick's `allocations`, in order."""
        self.pieces: list[_Piece] | None = None
        """What each container has of it, once that is asked: rows of one device share it."""
        self.given: dict[str, int] = {}
        """How many replicas are given by each resource; known with `pieces`, as the next."""
        self.replicas: dict[str, int] = {}
        """How many the kubelet has to give, where it says so."""


def _devices_of(allocations: Sequence[DeviceAllocation]) -> _Devices:
    """Return the allocations by the device that each is of: a GPU, or an instance of one."""
    devices: _Devices = {}
    for index, allocation in enumerate(allocations):
        device = devices.get(key := device_of(allocation))
        if device is None:
            devices[key] = device = _Device()
        device.indices.append(index)
    return devices


def _allocated_parts(
    reading: GpuReading,
    devices: Sequence[_Device],
    allocations: Sequence[DeviceAllocation],
    positions: Mapping[_Name, int],
) -> AllocatedParts:
    if not devices:
        return UNALLOCATED_PARTS
    device = devices[0]
    if len(devices) == 1 and len(device.indices) == 1:
        # The common case: one container has all of it.
        allocated = allocations[device.indices[0]]
        if allocated.replica is None:
            container = AllocatedContainer(allocated.namespace, allocated.pod, allocated.container)
            return _whole_of(positions[container])
    parts: list[tuple[_Piece, int]] = []
    # By an instance's UUID and by its number, which no kubelet mixes; but anybody may write it.
    for device in devices:
        if device.pieces is None:
            _gather_pieces(device, allocations)
        wholes: dict[str, int] = {}
        for piece in device.pieces or ():
            whole = wholes.get(piece.resource_name)
            if whole is None:
                whole = wholes[piece.resource_name] = _pieces_of(
                    reading, device, piece.resource_name
                )
            parts.append((piece, piece.sharers * (1 if piece.is_whole else whole)))
    return _normalised(positions, parts)


def _normalised(
    positions: Mapping[_Name, int], parts: Iterable[tuple[_Piece, int]]
) -> AllocatedParts:
    """Return each container's part of the device: of pieces, each one over a denominator."""
    common = 1
    for _, denominator in parts:
        common = lcm(common, denominator)
        if common > _MAX_WHOLE:
            common = _MAX_WHOLE
            break
    # What a container has by one resource adds up; of several resources the greatest counts.
    by_resource: dict[tuple[AllocatedContainer, str], int] = {}
    for piece, denominator in parts:
        key = piece.container, piece.resource_name
        before = by_resource.get(key, 0)
        part = max(1, common * piece.number // denominator)
        by_resource[key] = min(common, before + part)
    allocated: dict[AllocatedContainer, int] = {}
    for (container, _), part in by_resource.items():
        allocated[container] = max(allocated.get(container, 0), part)
    # By their names, never by the order in which the kubelet told of them.
    found: list[Part] = [
        (positions[container], allocated[container]) for container in sorted(allocated)
    ]
    total = sum(allocated.values())
    if total < common:
        found.append((None, common - total))
    return AllocatedParts(found, max(common, total))


def _gather_pieces(device: _Device, allocations: Sequence[DeviceAllocation]) -> None:
    """Set what each container has of a device, and how many replicas of it there are."""
    # Of each claim its pods, and the containers of each.
    claims: dict[str, dict[tuple[str, str], set[str]]] = {}
    ids: dict[str, set[str]] = {}
    numbers: dict[tuple[AllocatedContainer, str, str | None, bool], set[str]] = {}
    for index in device.indices:
        allocation = allocations[index]
        pod = allocation.namespace, allocation.pod
        container = AllocatedContainer(*pod, allocation.container)
        resource_name = allocation.resource_name
        claim, device_id = allocation.claim, allocation.device_id
        if claim is not None:
            claims.setdefault(claim, {}).setdefault(pod, set()).add(container[2])
        is_whole = allocation.replica is None
        if not is_whole:
            ids.setdefault(resource_name, set()).add(device_id)
            if allocation.device_replicas:
                device.replicas[resource_name] = max(
                    allocation.device_replicas, device.replicas.get(resource_name, 0)
                )
        numbers.setdefault((container, resource_name, claim, is_whole), set()).add(device_id)
    device.given = {resource_name: len(found) for resource_name, found in ids.items()}
    device.pieces = [
        _Piece(
            container,
            resource_name,
            # By a claim or without: a device that is whole counts once.
            1 if is_whole else len(device_ids),
            1 if claim is None else len(claims[claim]) * len(claims[claim][container[:2]]),
            is_whole,
        )
        for (container, resource_name, claim, is_whole), device_ids in numbers.items()
    ]


def _pieces_of(reading: GpuReading, device: _Device, resource_name: str) -> int:
    """Return into how many pieces a device is divided by a resource; at least 1."""
    if resource_name in _CORES:
        return _CORES[resource_name]
    replicas = device.replicas.get(resource_name)
    if replicas is not None:
        return replicas
    given = device.given.get(resource_name, 1)
    unit_bytes = _UNIT_BYTES.get(resource_name)
    if unit_bytes is None:
        return given
    # The replicas of a time-sliced device are none: who has one may use all that the others leave.
    return (reading.memory_total_bytes or 0) // unit_bytes or given
