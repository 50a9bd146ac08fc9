"""Combines the devices that the kubelet reports with the shares that annotations state.

The kubelet's report is a fact, an annotation is a statement:

- If a device id names the container's GPU, the kubelet's allocation counts, and annotations of the
  container are ignored. Such a pod cannot make its GPU cheaper by an annotation.
- If the ids only count shares, as with HAMi, Volcano and cGPU, the shares of the annotation replace
  them, but only if the annotation is of the product that owns the resource. A container without
  such devices has no share of these products.
- If the ids show an exact share, as cGPU's do on a node with one GPU, the annotation replaces them
  only if it does not state less.
- No share takes from a device that the kubelet allocated to another container as a whole.
- A pod in a reservation namespace has its GPU for others, so nothing is allocated to it. The pods
  of its group have their shares of the GPU.

This module does no I/O.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from gpuledger.ledger.division import PPM
from gpuledger.records import AllocationSource, DeviceAllocation
from gpuledger_agent.host.kubelet.assignments import (
    DeviceAssignment,
    DeviceIndex,
    ReplicaCounts,
    ResolvedDevice,
    SharedDevice,
    Unresolved,
    allocate,
    counts_shares,
    find_device,
    is_gpu_id,
    resolve,
    shared_device,
)
from gpuledger_agent.host.kubelet.shares.find import ContainerKey, StatedPods
from gpuledger_agent.host.kubelet.shares.gpushare import GPUSHARE
from gpuledger_agent.host.kubelet.shares.hami import VOLCANO
from gpuledger_agent.host.kubelet.shares.stated import GpuName, ShareSource, StatedShare, of_parts

MAX_SHARES: Final = 1024
"""Maximum number of allocations of a node that annotations state: 16 GPUs, each in 64 shares."""
_OWNERS: Final = {"volcano.sh": VOLCANO, "aliyun.com": GPUSHARE}
"""The products whose resources have a domain of their own. HAMi uses NVIDIA's or any other."""
_NO_PODS: Final = StatedPods()
_EXPLAINED: Final[Mapping[Unresolved, str]] = {
    Unresolved.UNKNOWN_GPU: "the node does not have the GPU in the annotation",
    Unresolved.UNKNOWN_INSTANCE: "the annotation does not name a MIG instance of the node",
    Unresolved.UNKNOWN_FORM: "the annotation does not contain the UUID of a GPU",
    Unresolved.UNKNOWN_GROUP: "not exactly one GPU of the node is reserved for its group",
    Unresolved.ALLOCATED_WHOLE: "the kubelet allocated the whole GPU to another container",
    Unresolved.UNKNOWN_MEMORY: "the memory of the GPU is unknown, so its share is unknown too",
}


@dataclass(frozen=True, kw_only=True)
class Merged:
    """The allocations of a node."""

    allocations: list[DeviceAllocation] = field(default_factory=list)
    """The kubelet's allocations, then those of annotations."""
    unresolved: Counter[Unresolved] = field(default_factory=Counter)
    """Number of devices and shares whose GPU is unknown, by reason."""
    problems: Sequence[str] = ()
    """For each annotation that cannot be used: the pod and the reason."""
    unnamed: Sequence[ContainerKey] = ()
    """The containers whose share is unknown: they have no usable annotation, and their device ids
    only count shares."""
    stated_count: int = 0
    """Number of allocations that annotations state."""
    reserved: int = 0
    """Number of GPUs that reservation pods have."""


class _Reserved(NamedTuple):
    """A GPU that a reservation pod has."""

    resource_name: str
    device: ResolvedDevice
    groups: Sequence[str]


class _Sorted(NamedTuple):
    """The kubelet's devices, by how they relate to annotations."""

    own: list[DeviceAssignment]
    """The devices that are not reserved for other pods."""
    reserved: list[_Reserved]
    named: set[ContainerKey]
    """The containers with a device id that names the GPU."""
    counted: dict[ContainerKey, str]
    """The resource of each container with device ids that only count shares."""
    inexact: set[ContainerKey]
    """The containers in `counted` whose share the ids do not show."""
    whole: set[ResolvedDevice]
    """The devices that were allocated to containers in `named` as a whole."""
    pieces: Counter[tuple[ContainerKey, SharedDevice]]
    """Number of device ids of each container in `counted` that is not in `inexact`, by device."""


def merge_allocations(
    assignments: Iterable[DeviceAssignment],
    stated: StatedPods | None,
    index: DeviceIndex,
    replicas: ReplicaCounts | None = None,
    *,
    placeholder_namespaces: Collection[str] = (),
    admin_access_namespaces: Collection[str] = (),
) -> Merged:
    """Return the allocations of a node; `stated` are the shares that annotations state."""
    stated = stated or _NO_PODS
    by_kind = _sort(assignments, stated, index, placeholder_namespaces, admin_access_namespaces)
    counted = by_kind.counted
    placed: list[DeviceAllocation] = []
    problems = list(stated.problems)
    unresolved = Counter({Unresolved.BAD_ANNOTATION: len(problems)})
    exact = _exact_shares(by_kind.pieces, replicas or ReplicaCounts())
    # The maximum first applies to pods without devices, because anybody can state such shares.
    for key, by_source in sorted(stated.shares.items(), key=lambda item: item[0] not in counted):
        sums: Counter[tuple[ShareSource, str, ResolvedDevice]] = Counter()
        for source, share in _usable(key, by_source, by_kind):
            place = _place(share, index, by_kind)
            if isinstance(place, Unresolved):
                unresolved[place] += 1
                problems.append(f"pod {key[0]}/{key[1]}: {_EXPLAINED[place]}")
            else:
                resource_name, device, share_ppm = place
                resource_name = resource_name or counted.get(key, source.resource_name)
                sums[source, resource_name, device] += share_ppm
        if sums.total() < exact.get(key, 0):
            continue
        if len(placed) + len(sums) > MAX_SHARES:
            unresolved[Unresolved.BAD_ANNOTATION] += 1
            problems.append(f"pod {key[0]}/{key[1]}: the node has over {MAX_SHARES} shares")
            continue
        placed += [
            _allocated(key, source.source, resource_name, device, share_ppm)
            for (source, resource_name, device), share_ppm in sums.items()
        ]
    replaced = {(one.namespace, one.pod, one.container) for one in placed}
    kept = [one for one in by_kind.own if (one.namespace, one.pod, one.container) not in replaced]
    allocations, of_kubelet = allocate(
        kept, index, replicas, admin_access_namespaces=admin_access_namespaces
    )
    return Merged(
        allocations=allocations + placed,
        unresolved=unresolved + of_kubelet,
        problems=problems,
        unnamed=sorted(by_kind.inexact - replaced),
        stated_count=len(placed),
        reserved=len({one.device for one in by_kind.reserved}),
    )


def _sort(
    assignments: Iterable[DeviceAssignment],
    stated: StatedPods,
    index: DeviceIndex,
    placeholder_namespaces: Collection[str],
    admin_access_namespaces: Collection[str],
) -> _Sorted:
    found = _Sorted([], [], set(), {}, set(), set(), Counter())
    for assignment in assignments:
        pod = assignment.namespace, assignment.pod
        if not assignment.is_gpu_resource and not is_gpu_id(assignment.device_id, index):
            continue
        if assignment.namespace in placeholder_namespaces:
            device = resolve(assignment, index)
            if not isinstance(device, Unresolved) and pod not in stated.ended:
                groups = stated.groups.get(pod, ())
                found.reserved.append(_Reserved(assignment.resource_name, device, groups))
            continue
        found.own.append(assignment)
        key = *pod, assignment.container
        if assignment.claim is not None or not counts_shares(assignment.device_id, index):
            found.named.add(key)
            device = resolve(assignment, index)
            is_admin = assignment.claim and assignment.namespace in admin_access_namespaces
            is_current = not is_admin and pod not in stated.ended
            if is_current and not isinstance(device, Unresolved) and device.replica is None:
                found.whole.add(device)
            continue
        found.counted[key] = assignment.resource_name
        piece = find_device(assignment.device_id, index)
        # Ids of cGPU count memory or cores.
        if "-_-" in assignment.device_id and not isinstance(piece, Unresolved):
            shared = shared_device(assignment.resource_name, assignment.device_id, piece)
            found.pieces[key, shared] += 1
        else:
            found.inexact.add(key)
    return found


def _usable(
    key: ContainerKey, by_source: Mapping[ShareSource, Sequence[StatedShare]], by_kind: _Sorted
) -> list[tuple[ShareSource, StatedShare]]:
    """Return the shares of a container that the kubelet's devices allow.

    If the kubelet has no device for the container, the shares of all products add up, so that no
    annotation makes another one's share smaller.
    """
    if key in by_kind.named:
        return []
    resource_name = by_kind.counted.get(key)
    if resource_name is None:
        usable = [source for source in by_source if not source.has_devices]
    else:
        usable = [source for source in by_source if _owns(source, resource_name)][:1]
    return [(source, share) for source in usable for share in by_source[source]]


def _owns(source: ShareSource, resource_name: str) -> bool:
    """Return whether a product's devices may have this resource name."""
    owner = _OWNERS.get(resource_name.partition("/")[0], source)
    return source.has_devices and source is owner


def _exact_shares(
    pieces: Mapping[tuple[ContainerKey, SharedDevice], int], replicas: ReplicaCounts
) -> dict[ContainerKey, int]:
    """Return the exact shares of containers in millionths, if the kubelet lists all pieces.

    A container may have pieces of memory and of cores; the greater share counts.
    """
    exact: dict[ContainerKey, int] = {}
    for (key, device), number in pieces.items():
        if whole := replicas[device]:
            exact[key] = max(exact.get(key, 0), of_parts(number, whole))
    return exact


def _place(
    share: StatedShare, index: DeviceIndex, by_kind: _Sorted
) -> tuple[str, ResolvedDevice, int] | Unresolved:
    """Return the resource name, device and millionths of a share, or the reason if unknown.

    The resource name is empty unless a reservation pod has the GPU.
    """
    resource_name = ""
    if share.gpu.kind == "group":
        # The kubelet may list a GPU twice, and a group may have a new reservation pod already.
        found = {
            one.device: one.resource_name
            for one in by_kind.reserved
            if share.gpu.name in one.groups or not share.gpu.name
        }
        if len(found) != 1:
            return Unresolved.UNKNOWN_GROUP
        ((device, resource_name),) = found.items()
    else:
        resolved = _find_named(share.gpu, index)
        if isinstance(resolved, Unresolved):
            return resolved
        device = resolved
    # A whole GPU has its instances too.
    if not by_kind.whole.isdisjoint({device, ResolvedDevice(gpu_uuid=device.gpu_uuid)}):
        return Unresolved.ALLOCATED_WHOLE
    share_ppm = share.share_ppm
    if share.memory_bytes:
        total = index.memory_of(device)
        if total:
            share_ppm = max(share_ppm, of_parts(share.memory_bytes, total))
        elif not share_ppm:
            return Unresolved.UNKNOWN_MEMORY
    is_partitioned = device.gpu_instance is None and index.layouts.get(device.gpu_uuid)
    # Nothing runs outside of the instances, so the share is one of them.
    if is_partitioned and share_ppm < PPM:
        return Unresolved.UNKNOWN_INSTANCE
    return resource_name, device, share_ppm


def _find_named(gpu: GpuName, index: DeviceIndex) -> ResolvedDevice | Unresolved:
    if isinstance(gpu.name, str):
        return (
            Unresolved.UNKNOWN_FORM
            if counts_shares(gpu.name, index)
            else find_device(gpu.name, index)
        )
    uuid = index.by_minor.get(gpu.name)
    return Unresolved.UNKNOWN_GPU if uuid is None else ResolvedDevice(gpu_uuid=uuid)


def _allocated(
    key: ContainerKey,
    source: AllocationSource,
    resource_name: str,
    device: ResolvedDevice,
    share_ppm: int,
) -> DeviceAllocation:
    return DeviceAllocation(
        gpu_uuid=device.gpu_uuid,
        device_id=device.gpu_uuid,
        resource_name=resource_name,
        namespace=key[0],
        pod=key[1],
        container=key[2],
        gpu_instance=device.gpu_instance,
        source=source,
        # Without a share, the whole device is allocated.
        share_ppm=share_ppm if share_ppm < PPM else None,
    )
