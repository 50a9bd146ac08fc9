"""Allocation of each device of a tick, by the kubelet to containers and by a scheduler to jobs.

The node reports the devices that are allocated to each container (`DeviceAllocation`), according to
the kubelet or to an annotation of the pod. An allocation identifies rows of the tick in exactly one
of three ways:

- a whole GPU, by its UUID without a GPU instance: the GPU's own row;
- a MIG instance by its UUID, in the device's id: the row with that UUID, which is only one of the
  compute instances of its GPU instance;
- a MIG instance by its number on its GPU, with older drivers and GKE's plugin: the rows of all
  compute instances of that GPU instance.

`devices_named_by` and `device_of` implement this rule for two callers with different needs:

- The join (`find_allocated_parts`) needs each container's part of a device, which also determines
  to whom the idle part is allocated. Several containers may share a device as replicas or pieces of
  memory.
- The agent's HTTP endpoint (`exclusive_container`) needs the container that has all of a device,
  because dcgm-exporter's labels name one container. A replica is never all of the device, even if
  no other replica is allocated.

A device is divided among the containers to which it was allocated, never among processes: the
kubelet reports names of pods, a cgroup has UIDs, and one tick cannot match them.

A container's part of a device is a fraction of whole numbers and does not depend on use:

- for a whole GPU or instance: 1;
- for replicas: the container's number of replicas (`count`), divided by the number that the kubelet
  has (`device_replicas`), or if that is unknown, by the number of allocated replicas;
- for pieces of memory and of cores: the greater of the two parts. Pieces of memory are relative to
  the pieces of the device, pieces of cores to 100. A plugin divides a GPU's memory into pieces of
  one GiB or MiB, but the ids of the pieces do not contain the unit. The number of pieces therefore
  comes from the kubelet; without it, a piece is taken to be one GiB;
- for a share that an annotation states (`share_ppm`): that share;
- for a resource claim of several pods: an equal part for each pod, divided equally among the pod's
  containers;
- for a claim with admin access: 0, because it leaves the device to its other users.

The rest up to 1 is not allocated. If the parts add up to more than 1, each part is divided by their
sum.

A scheduler such as Slurm allocates a whole GPU or instance to a job (`JobAllocation`); several jobs
on a device have equal parts, which add up to 1. In the list of parts, jobs follow the containers,
sorted by id. If a device is allocated both to a job and to a container, both count, and each part
is divided by the sum of all parts.

If allocations of the node are unknown (`NodeSample.allocations_unknown`), the rest is unknown
instead: it may be allocated to any container.

A partitioned GPU runs nothing outside its instances. Its own row, which stands for the slices
without an instance, therefore counts as not allocated. An allocation of the whole GPU covers the
instances that are not allocated separately.

This module does no I/O.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import lcm
from typing import Final, NamedTuple

from gpuledger.errors import GpuledgerError
from gpuledger.ledger.division import PPM
from gpuledger.records import DeviceAllocation, GpuReading, JobAllocation, NodeSample

_GIB: Final = 1 << 30
# Resources whose devices are pieces of memory, with the size of a piece, which Alibaba's plugin for
# cGPU defines.
_UNIT_BYTES: Final = {"aliyun.com/gpu-mem": _GIB}
# Resources whose devices are pieces of a GPU's cores, and the number of pieces of a GPU.
_CORES: Final = {"aliyun.com/gpu-core": 100, "aliyun.com/gpu-core.percentage": 100}
# Larger common denominators are rounded to this; no kubelet allocates devices in such parts.
_MAX_WHOLE: Final = 1 << 60
_INSTANCE_UUID: Final = re.compile(r"MIG-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


MAX_ENTRIES: Final = 65_536
"""Maximum number of entries; more would exceed the maximum size of a message."""

# One part of a device: its allocatee and its share of `AllocatedParts.whole`. The allocatee is a
# container's position among the tick's `allocated_containers`, a job's id, or `None` for the part
# that is not allocated.
Part = tuple[int | str | None, int]


class AllocatedParts(NamedTuple):
    """How a device is divided: the parts of containers and jobs, and the unallocated part."""

    parts: Sequence[Part]
    """The parts of the containers, sorted by namespace, pod and container, then of the jobs, sorted
    by id, then the part that is not allocated. They add up to `whole`."""
    whole: int
    """The whole device, the denominator of all parts."""
    is_rest_unknown: bool = False
    """Whether the unallocated part may be allocated (`NodeSample.allocations_unknown`)."""
    is_scaled: bool = False
    """Whether more than the device is allocated, so that each part was divided by their sum."""


UNALLOCATED_PARTS: Final = AllocatedParts([(None, 1)], 1)
"""The parts of a device that is not allocated: a single part without container or job."""
# For a GPU: its UUID and `None`. For an instance: the GPU's UUID, and the instance's UUID or
# number.
DeviceKey = tuple[str, str | int | None]
_Devices = dict[DeviceKey, "_Device"]
# Namespace, pod and container, as in `AllocatedContainer`.
_Name = tuple[str, str, str]


class TooManyEntriesError(GpuledgerError):
    """A tick would have too many entries for one message; the error names the kind of entry."""


class AllocatedContainer(NamedTuple):
    """A container, by the kubelet's names."""

    namespace: str
    """Namespace of the pod."""
    pod: str
    """Name of the pod."""
    container: str
    """Name of the container in the pod."""


def device_of(allocation: DeviceAllocation) -> DeviceKey:
    """Return the key of the device that an allocation is for: a GPU, or a MIG instance of a GPU."""
    if allocation.gpu_instance is None:
        return allocation.gpu_uuid, None
    named = allocation.device_id.partition("::")[0]
    # With older drivers and on GKE, the device id has no UUID, so the number identifies it.
    is_uuid = _INSTANCE_UUID.fullmatch(named)
    return allocation.gpu_uuid, named if is_uuid else allocation.gpu_instance


def is_share(allocation: DeviceAllocation) -> bool:
    """Return whether only a share of the device is allocated, not the whole device."""
    return allocation.replica is not None or allocation.share_ppm is not None


def devices_named_by(reading: GpuReading) -> Sequence[DeviceKey]:
    """Return the keys by which allocations identify a row's device; a MIG instance may have two."""
    gpu = reading.parent_uuid
    if gpu is None:
        return ((reading.uuid, None),)
    if reading.gpu_instance is None:
        return ((gpu, reading.uuid),)
    return (gpu, reading.uuid), (gpu, reading.gpu_instance)


def exclusive_container(
    reading: GpuReading, allocations: Iterable[DeviceAllocation]
) -> AllocatedContainer | None:
    """Return the container to which the whole device is allocated; `None` if none or several."""
    devices = devices_named_by(reading)
    candidates = set()
    for allocation in allocations:
        if allocation.admin_access or device_of(allocation) not in devices:
            continue
        # A share is never the whole device, even if it is the only allocated one.
        if is_share(allocation):
            return None
        candidates.add(
            AllocatedContainer(allocation.namespace, allocation.pod, allocation.container)
        )
    return candidates.pop() if len(candidates) == 1 else None


def allocated_containers(allocations: Iterable[DeviceAllocation]) -> list[AllocatedContainer]:
    """Return the containers with an allocation, sorted by name; entries refer to them by position.

    Claims with admin access do not count.
    """
    return sorted(
        {
            AllocatedContainer(allocation.namespace, allocation.pod, allocation.container)
            for allocation in allocations
            if not allocation.admin_access
        }
    )


def find_allocated_parts(sample: NodeSample) -> Sequence[AllocatedParts]:
    """Return, for each row of the tick, how its device is divided among containers and jobs.

    Raises `TooManyEntriesError` if there are more than `MAX_ENTRIES` parts: the kubelet may
    allocate every compute instance of a GPU instance to every container.
    """
    allocated = _allocated_to_containers(sample)
    if sample.job_allocations:
        allocated = _with_jobs(allocated, sample)
    return _with_unknown(allocated, sample) if sample.allocations_unknown else allocated


def jobs_by_device(allocations: Iterable[JobAllocation]) -> dict[DeviceKey, list[str]]:
    """Return the jobs to which each device is allocated, sorted and without duplicates."""
    found: dict[DeviceKey, set[str]] = {}
    for allocation in allocations:
        device = allocation.gpu_uuid, allocation.gpu_instance
        found.setdefault(device, set()).add(allocation.job_id)
    return {device: sorted(jobs) for device, jobs in found.items()}


def jobs_of(
    reading: GpuReading, jobs: Mapping[DeviceKey, Sequence[str]], *, is_allocated: bool = False
) -> Sequence[str]:
    """Return the jobs to which a device is allocated.

    If a MIG instance has no jobs, the jobs of its GPU are returned, unless the instance is
    allocated to containers (`is_allocated`).
    """
    own = [job for key in devices_named_by(reading) for job in jobs.get(key, ())]
    if own or reading.parent_uuid is None or is_allocated:
        return own
    return jobs.get((reading.parent_uuid, None), ())


def _with_jobs(allocated: Sequence[AllocatedParts], sample: NodeSample) -> Sequence[AllocatedParts]:
    """Return the parts of the tick's devices, with jobs added to the containers in `allocated`."""
    jobs = jobs_by_device(sample.job_allocations or ())
    cut = {reading.parent_uuid for reading in sample.gpus}
    left = MAX_ENTRIES
    found = []
    for reading, parts in zip(sample.gpus, allocated, strict=True):
        is_allocated = parts.parts[0][0] is not None
        names = () if reading.uuid in cut else jobs_of(reading, jobs, is_allocated=is_allocated)
        left -= len(names)
        if left < 0:
            raise TooManyEntriesError(f"a tick has more than {MAX_ENTRIES} idle entries of jobs")
        found.append(_beside_jobs(parts, names) if names else parts)
    return found


def _with_unknown(
    allocated: Sequence[AllocatedParts], sample: NodeSample
) -> Sequence[AllocatedParts]:
    """Return the parts in `allocated`, with the unallocated part marked as unknown.

    The row of a partitioned GPU is known: nothing runs outside the instances.
    """
    cut = {reading.parent_uuid for reading in sample.gpus}
    return [
        parts if reading.uuid in cut else parts._replace(is_rest_unknown=True)
        for reading, parts in zip(sample.gpus, allocated, strict=True)
    ]


def _beside_jobs(allocated: AllocatedParts, jobs: Sequence[str]) -> AllocatedParts:
    """Return a device's parts if jobs are added to its containers; no part stays unallocated.

    Each job gets an equal part of the whole device before all parts are scaled to the device.
    """
    number, whole = len(jobs), allocated.whole
    parts: list[Part] = [
        (container, part * number) for container, part in allocated.parts if container is not None
    ]
    if not parts:
        return AllocatedParts([(job, 1) for job in jobs], number)
    total = sum(part for _, part in parts) + whole * number
    return AllocatedParts([*parts, *((job, whole) for job in jobs)], total, is_scaled=True)


def _allocated_to_containers(sample: NodeSample) -> Sequence[AllocatedParts]:
    if not sample.allocations:
        return [UNALLOCATED_PARTS] * len(sample.gpus)
    whole = _whole_gpus(sample.allocations)
    cut = {reading.parent_uuid for reading in sample.gpus}
    if len(whole) == len(sample.allocations) and cut == {None}:
        names = sorted(set(whole.values()))
        positions = {name: position for position, name in enumerate(names)}
        # Fast path for the common case that all allocations are for whole GPUs; takes a quarter of
        # the time.
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
        # Limits the total cost, which grows with the number of resource names times rows.
        left -= max(len(allocated.parts), *(len(device.pieces or ()) for device in of_row), 0)
        if left < 0:
            raise TooManyEntriesError(f"a tick has more than {MAX_ENTRIES} idle entries")
        found.append(allocated)
    return found


def _whole_gpus(allocations: Iterable[DeviceAllocation]) -> dict[str, _Name]:
    """Return the container of each GPU that is allocated as a whole, by the GPU's UUID.

    Leaves out allocations of parts of a GPU and allocations with admin access, and all but one of
    several allocations of the same GPU. In these cases, the result has fewer items than
    `allocations`.
    """
    return {
        allocation.gpu_uuid: (allocation.namespace, allocation.pod, allocation.container)
        for allocation in allocations
        if allocation.gpu_instance is None
        and not is_share(allocation)
        and not allocation.admin_access
    }


@lru_cache(maxsize=256)
def _whole_of(position: int) -> AllocatedParts:
    """Return the parts of a device that is allocated entirely to the container at `position`."""
    return AllocatedParts([(position, 1)], 1)


class _Piece(NamedTuple):
    """One container's share of a device that was allocated by one resource name or one claim."""

    container: AllocatedContainer
    resource_name: str
    number: int
    """Number of the kubelet's devices in this allocation, or its share in millionths."""
    sharers: int
    """Number of containers that share each of these devices."""
    whole: int | None
    """The number that makes up a whole GPU or instance; `None` if the resource defines it."""


class _Device:
    """The allocations of one device."""

    __slots__ = ("given", "indices", "pieces", "replicas")

    def __init__(self) -> None:
        self.indices: list[int] = []
        """Positions in the tick's `allocations`, in order."""
        self.pieces: list[_Piece] | None = None
        """Each container's pieces, computed on first use; rows of one device share them."""
        self.given: dict[str, int] = {}
        """Number of allocated replicas by resource. `pieces`, `given` and `replicas` are set
        together."""
        self.replicas: dict[str, int] = {}
        """Total number of replicas by resource, if the kubelet reports it."""


def _devices_of(allocations: Sequence[DeviceAllocation]) -> _Devices:
    """Return the allocations grouped by their device, which is a GPU or a MIG instance."""
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
        # The common case: one container has the whole device.
        allocated = allocations[device.indices[0]]
        if not is_share(allocated):
            container = AllocatedContainer(allocated.namespace, allocated.pod, allocated.container)
            return _whole_of(positions[container])
    parts: list[tuple[_Piece, int]] = []
    # There are several devices if some allocations name an instance by UUID and others by number.
    # No kubelet mixes these, but a forged tick may.
    for device in devices:
        if device.pieces is None:
            _gather_pieces(device, allocations)
        wholes: dict[str, int] = {}
        for piece in device.pieces or ():
            whole = piece.whole or wholes.get(piece.resource_name)
            if whole is None:
                whole = wholes[piece.resource_name] = _pieces_of(
                    reading, device, piece.resource_name
                )
            parts.append((piece, piece.sharers * whole))
    return _normalised(positions, parts)


def _normalised(
    positions: Mapping[_Name, int], parts: Iterable[tuple[_Piece, int]]
) -> AllocatedParts:
    """Return the containers' parts of a device, converted to a common denominator.

    `parts` has each piece with its denominator: the piece is `piece.number` of that many equal
    parts of the device. `positions` has the position of each container.
    """
    common = 1
    for _, denominator in parts:
        common = lcm(common, denominator)
        if common > _MAX_WHOLE:
            common = _MAX_WHOLE
            break
    # A container's parts through the same resource add up. If a container has several resources,
    # only the one with the largest part counts.
    by_resource: dict[tuple[AllocatedContainer, str], int] = {}
    for piece, denominator in parts:
        key = piece.container, piece.resource_name
        before = by_resource.get(key, 0)
        part = max(1, common * piece.number // denominator)
        by_resource[key] = min(common, before + part)
    allocated: dict[AllocatedContainer, int] = {}
    for (container, _), part in by_resource.items():
        allocated[container] = max(allocated.get(container, 0), part)
    # Sorted by name, so that the result does not depend on the order in the kubelet's answer.
    found: list[Part] = [
        (positions[container], allocated[container]) for container in sorted(allocated)
    ]
    total = sum(allocated.values())
    if total < common:
        found.append((None, common - total))
    return AllocatedParts(found, max(common, total), is_scaled=total > common)


def _gather_pieces(device: _Device, allocations: Sequence[DeviceAllocation]) -> None:
    """Set `pieces`, `given` and `replicas` of a device from its allocations."""
    # By claim and pod: the containers that share the claim.
    claims: dict[str, dict[tuple[str, str], set[str]]] = {}
    # The number of shares by device id. If several allocations have one id, its shares count once.
    ids: dict[str, dict[str, int]] = {}
    numbers: dict[tuple[AllocatedContainer, str, str | None, bool], dict[str, int]] = {}
    stated: dict[tuple[AllocatedContainer, str], int] = {}
    for index in device.indices:
        allocation = allocations[index]
        pod = allocation.namespace, allocation.pod
        container = AllocatedContainer(*pod, allocation.container)
        resource_name = allocation.resource_name
        claim = allocation.claim
        if allocation.share_ppm is not None:
            stated_key = container, resource_name
            stated[stated_key] = stated.get(stated_key, 0) + allocation.share_ppm
            continue
        if claim is not None:
            claims.setdefault(claim, {}).setdefault(pod, set()).add(container[2])
        is_whole = allocation.replica is None
        if not is_whole:
            _count_shares(ids.setdefault(resource_name, {}), allocation)
            if allocation.device_replicas:
                device.replicas[resource_name] = max(
                    allocation.device_replicas, device.replicas.get(resource_name, 0)
                )
        key = container, resource_name, claim, is_whole
        _count_shares(numbers.setdefault(key, {}), allocation)
    device.given = {resource_name: sum(found.values()) for resource_name, found in ids.items()}
    device.pieces = [
        _Piece(
            container,
            resource_name,
            # A whole device counts once, with a claim or without.
            1 if is_whole else sum(shares.values()),
            1 if claim is None else len(claims[claim]) * len(claims[claim][container[:2]]),
            1 if is_whole else None,
        )
        for (container, resource_name, claim, is_whole), shares in numbers.items()
    ]
    device.pieces += [
        _Piece(container, resource_name, share_ppm, 1, PPM)
        for (container, resource_name), share_ppm in stated.items()
    ]


def _count_shares(shares: dict[str, int], allocation: DeviceAllocation) -> None:
    """Record the number of an allocation's shares by its device id."""
    device_id = allocation.device_id
    shares[device_id] = max(shares.get(device_id, 0), allocation.count or 1)


def _pieces_of(reading: GpuReading, device: _Device, resource_name: str) -> int:
    """Return the number of pieces that a device has under a resource name; at least 1."""
    if resource_name in _CORES:
        return _CORES[resource_name]
    replicas = device.replicas.get(resource_name)
    if replicas is not None:
        return replicas
    given = device.given.get(resource_name, 1)
    unit_bytes = _UNIT_BYTES.get(resource_name)
    if unit_bytes is None:
        return given
    # Replicas of a time-sliced device are not pieces: each replica may use everything that the
    # others leave unused.
    return (reading.memory_total_bytes or 0) // unit_bytes or given
