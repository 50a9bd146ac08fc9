"""Resolves the kubelet's device ids to GPUs and MIG instances.

An assignment is a device in the kubelet's response; an allocation is an assignment whose GPU is
known. Each device plugin and DRA driver has its own format of device ids. An id stays unresolved,
with a reason, if its format is unknown or the node does not have the GPU now.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import translate
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

from gpuledger.ledger.allocated_parts import DeviceKey, device_of
from gpuledger.records import DeviceAllocation, GpuFacts, MigInstance
from gpuledger_agent.host.kubelet.messages import ContainerDevices, ContainerResources, PodResources

CLAIM_DRIVER: Final = "gpu.nvidia.com"
_OLD_MIG: Final = re.compile(r"MIG-(?P<gpu>GPU-[^/]+)/(?P<instance>\d+)/\d+")
_GKE: Final = re.compile(r"nvidia(?P<minor>\d+)(/gi(?P<instance>\d+))?(/vgpu(?P<replica>\d+))?")
_COUNTED: Final = re.compile(r"(?P<gpu>GPU-.+?)(-_)?-(?P<replica>\d+)")
_COUNTED_OF_ANY: Final = re.compile(r"GPU-(.+-_|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12})-\d+")
"""An id in `_COUNTED`'s form that is recognized even if the node does not have the GPU."""
_CLAIMED_GPU: Final = re.compile(r"gpu-(?P<minor>\d+)")
_CLAIMED_MIG: Final = re.compile(
    r"gpu-(?P<minor>\d+)-mig-(?P<profile>[a-z0-9-]+)-(?P<first>\d+)-(?P<second>\d+)"
)


class Unresolved(StrEnum):
    """Why a device id could not be resolved to a GPU."""

    UNKNOWN_FORM = "unknown_form"
    """The id has an unknown format."""
    UNKNOWN_GPU = "unknown_gpu"
    """The node has no such GPU now."""
    UNKNOWN_INSTANCE = "unknown_instance"
    """The node has no such MIG instance now, or several instances match."""
    CHOSEN_ELSEWHERE = "chosen_elsewhere"
    """The device plugin selects the GPU by the pod's annotations, so that it may be another GPU
    than the one in the id, and the node has several GPUs."""
    BAD_ANNOTATION = "bad_annotation"
    """An annotation that states shares cannot be read, or the pod or node has too many shares."""
    UNKNOWN_GROUP = "unknown_group"
    """A pod has a share of a reserved GPU, but the GPU of its group is unknown."""
    ALLOCATED_WHOLE = "allocated_whole"
    """An annotation states a share of a GPU that the kubelet allocated to another container as a
    whole."""
    UNKNOWN_MEMORY = "unknown_memory"
    """An annotation states a share as memory, and the memory of the GPU is unknown."""


class ResolvedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """The GPU, or the part of a GPU, that a device id refers to."""

    gpu_uuid: str
    """The GPU's UUID."""
    gpu_instance: int | None = None
    """The driver's id of the GPU instance, if the device is a MIG instance."""
    replica: str | None = None
    """The name of the share, if the device is one of several shares of a GPU or instance."""


@dataclass(frozen=True, kw_only=True)
class DeviceIndex:
    """The node's GPUs and MIG instances, indexed by the values that device ids contain."""

    uuids: frozenset[str] = frozenset()
    """The GPUs' UUIDs."""
    by_minor: Mapping[int, str] = field(default_factory=dict)
    """GPU UUIDs by the number in the device file's name."""
    instances: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """GPU UUID and GPU instance id by MIG instance UUID."""
    layouts: Mapping[str, Sequence[MigInstance]] = field(default_factory=dict)
    """MIG instances by GPU UUID."""
    by_index: Mapping[int, str] = field(default_factory=dict)
    """GPU UUIDs by the driver's index."""
    memory_bytes: Mapping[str, int | None] = field(default_factory=dict)
    """Size of the device memory by GPU UUID."""

    @classmethod
    def of(cls, gpus: Iterable[GpuFacts]) -> "DeviceIndex":
        """Return the index of the GPUs in an inventory."""
        found = list(gpus)
        return cls(
            uuids=frozenset(gpu.uuid for gpu in found),
            by_minor={gpu.minor_number: gpu.uuid for gpu in found if gpu.minor_number is not None},
            instances={
                instance.uuid: (gpu.uuid, instance.gpu_instance)
                for gpu in found
                for instance in gpu.instances
            },
            layouts={gpu.uuid: gpu.instances for gpu in found},
            by_index={gpu.index: gpu.uuid for gpu in found},
            memory_bytes={gpu.uuid: gpu.memory_total_bytes for gpu in found},
        )

    def memory_of(self, device: ResolvedDevice) -> int | None:
        """Return the size of a GPU's or instance's memory; `None` if it is unknown."""
        if device.gpu_instance is None:
            return self.memory_bytes.get(device.gpu_uuid)
        layout = self.layouts.get(device.gpu_uuid, ())
        sizes = (
            one.memory_total_bytes for one in layout if one.gpu_instance == device.gpu_instance
        )
        return next(sizes, None)

    def has_instance(self, gpu_uuid: str, gpu_instance: int) -> bool:
        """Return whether a GPU currently has a GPU instance with this id."""
        layout = self.layouts.get(gpu_uuid, ())
        return any(one.gpu_instance == gpu_instance for one in layout)


def find_device(device_id: str, index: DeviceIndex) -> ResolvedDevice | Unresolved:
    """Return the device to which a device plugin's id refers, or the reason if that is unknown."""
    whole, _, replica = device_id.partition("::")
    if whole in index.uuids:
        return ResolvedDevice(gpu_uuid=whole, replica=replica or None)
    # With the plugin's strategies `mixed` and `single`, an id is the MIG instance's UUID.
    if whole in index.instances:
        gpu_uuid, instance = index.instances[whole]
        return ResolvedDevice(gpu_uuid=gpu_uuid, gpu_instance=instance, replica=replica or None)
    # Before driver R470, an instance's UUID was its GPU's UUID followed by the instance's numbers.
    if match := _OLD_MIG.fullmatch(whole):
        return _resolve(
            match["gpu"], index, instance=int(match["instance"]), replica=replica or None
        )
    if match := _GKE.fullmatch(device_id):
        # GKE's plugin uses names of device files, followed by the instance and the share.
        return _resolve(
            index.by_minor.get(int(match["minor"])),
            index,
            instance=int(match["instance"]) if match["instance"] else None,
            replica=match["replica"],
        )
    # The id is of a MIG instance of a former layout, because plugins do not name GPUs like this.
    if whole.startswith("MIG-"):
        return Unresolved.UNKNOWN_INSTANCE
    return _find_counted(whole, index)


def counts_shares(device_id: str, index: DeviceIndex) -> bool:
    """Return whether a device id only counts shares, so that an annotation names the GPU."""
    if device_id in index.uuids:
        return False
    match = _COUNTED.fullmatch(device_id)
    # A GPU may be gone although the annotation names another one.
    if match and (match["gpu"] in index.uuids or _COUNTED_OF_ANY.fullmatch(device_id)):
        return True
    return find_device(device_id, index) is Unresolved.UNKNOWN_FORM


def is_gpu_id(device_id: str, index: DeviceIndex) -> bool:
    """Return whether a device id is the UUID of a GPU or MIG instance of the node.

    The UUID may be followed by `::` and the number of a share of the device.
    """
    whole = device_id.partition("::")[0]
    return whole in index.uuids or whole in index.instances


def find_claimed(
    device_name: str, index: DeviceIndex, *, share_id: str | None
) -> ResolvedDevice | Unresolved:
    """Return the device to which a name of NVIDIA's DRA driver refers, or the reason if unknown."""
    if match := _CLAIMED_GPU.fullmatch(device_name):
        return _resolve(index.by_minor.get(int(match["minor"])), index, replica=share_id)
    match = _CLAIMED_MIG.fullmatch(device_name)
    if match is None:
        return Unresolved.UNKNOWN_FORM
    gpu_uuid = index.by_minor.get(int(match["minor"]))
    if gpu_uuid is None:
        return Unresolved.UNKNOWN_GPU
    instance = _find_instance(match, index.layouts[gpu_uuid])
    if instance is None:
        return Unresolved.UNKNOWN_INSTANCE
    return ResolvedDevice(gpu_uuid=gpu_uuid, gpu_instance=instance, replica=share_id)


def _resolve(
    gpu_uuid: str | None,
    index: DeviceIndex,
    *,
    instance: int | None = None,
    replica: str | None = None,
) -> ResolvedDevice | Unresolved:
    if gpu_uuid is None or gpu_uuid not in index.uuids:
        return Unresolved.UNKNOWN_GPU
    if instance is not None and not index.has_instance(gpu_uuid, instance):
        return Unresolved.UNKNOWN_INSTANCE
    return ResolvedDevice(gpu_uuid=gpu_uuid, gpu_instance=instance, replica=replica)


def _find_counted(device_id: str, index: DeviceIndex) -> ResolvedDevice | Unresolved:
    """Return the device to which an id of a GPU-sharing plugin refers: a UUID and a number.

    The plugins of HAMi (`UUID-n`) and Alibaba (memory, `UUID-_-n`) only count shares with these
    ids. An annotation of the pod contains the GPU. The id is therefore resolved only if the node
    has one GPU.
    """
    if not device_id.startswith("GPU-"):
        return Unresolved.UNKNOWN_FORM
    match = _COUNTED.fullmatch(device_id)
    if match is None or match["gpu"] not in index.uuids:
        return Unresolved.UNKNOWN_GPU
    if len(index.uuids) > 1:
        return Unresolved.CHOSEN_ELSEWHERE
    return ResolvedDevice(gpu_uuid=match["gpu"], replica=match["replica"])


def _find_instance(match: re.Match[str], layout: Sequence[MigInstance]) -> int | None:
    """Return the id of the GPU instance to which a DRA device name refers.

    Return `None` if no instance or several instances match. The name ends with profile id,
    placement start and size or, in newer versions of the DRA driver, with profile, profile id and
    placement start.
    """
    is_newer = not match["profile"].isdigit()
    start = int(match["second"] if is_newer else match["first"])
    # An instance of unknown placement can only be identified by a profile, which older names lack.
    if not is_newer and any(instance.placement_start is None for instance in layout):
        return None
    fitting = {
        instance.gpu_instance
        for instance in layout
        if instance.placement_start in (start, None)
        and (not is_newer or _as_in_names(instance.profile) == match["profile"])
    }
    return fitting.pop() if len(fitting) == 1 else None


def _as_in_names(profile: str | None) -> str:
    """Return a MIG profile as DRA device names contain it, such as `1g10gb-me` for `1g.10gb+me`."""
    return re.sub(r"[^a-z0-9]", "-", (profile or "").lower().replace(".", "")).strip("-")


class DeviceAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """A device that the kubelet's response lists for a container."""

    namespace: str
    """The pod's namespace."""
    pod: str
    """The pod's name."""
    container: str
    """The container's name in the pod."""
    resource_name: str
    """The resource, such as `nvidia.com/gpu`, or the DRA driver of a resource claim."""
    device_id: str
    """The device plugin's or the DRA driver's name of the device."""
    claim: str | None = None
    """The resource claim that allocated the device, as `namespace/name`; `None` if the device was
    allocated by a device plugin."""
    share_id: str | None = None
    """The share of the device that the resource claim allocated; `None` for the whole device."""
    is_gpu_resource: bool = True
    """Whether the resource is in `kubelet.resource_names`, or the driver is NVIDIA's. Devices of
    other resources, such as network cards, are used only if their id is the UUID of a GPU."""


def find_assignments(
    pods: Iterable[PodResources], resource_names: Sequence[str]
) -> list[DeviceAssignment]:
    """Return the devices of all containers in the kubelet's list.

    `resource_names` are the names of GPU resources and may contain `*` and `?`.
    """
    is_gpu = _pattern_of(tuple(resource_names))
    return [
        assignment
        for pod in pods
        for container in pod.containers
        for assignment in assignments_of(pod, container, is_gpu)
    ]


@lru_cache(maxsize=1)
def _pattern_of(resource_names: tuple[str, ...]) -> re.Pattern[str]:
    # Without names, match nothing; an empty pattern would match everything.
    return re.compile("|".join(map(translate, resource_names)) or r"(?!)")


def assignments_of(
    pod: PodResources, container: ContainerResources, is_gpu: re.Pattern[str]
) -> Iterator[DeviceAssignment]:
    """Yield one container's devices: first those of device plugins, then those of resource claims.

    `is_gpu` matches the names of GPU resources.
    """
    for devices in container.devices:
        for device_id in devices.device_ids:
            yield DeviceAssignment(
                namespace=pod.namespace,
                pod=pod.name,
                container=container.name,
                resource_name=devices.resource_name,
                device_id=device_id,
                is_gpu_resource=is_gpu.match(devices.resource_name) is not None,
            )
    for claim in container.claims:
        for device in claim.devices:
            # A claim may also contain devices of other drivers, such as network cards.
            if device.driver_name == CLAIM_DRIVER:
                yield DeviceAssignment(
                    namespace=pod.namespace,
                    pod=pod.name,
                    container=container.name,
                    resource_name=device.driver_name,
                    device_id=device.device_name,
                    claim=f"{claim.namespace}/{claim.name}",
                    share_id=device.share_id,
                )


def resolve(assignment: DeviceAssignment, index: DeviceIndex) -> ResolvedDevice | Unresolved:
    """Return the device of an assignment, or the reason if it is unknown."""
    if assignment.claim is None:
        return find_device(assignment.device_id, index)
    return find_claimed(assignment.device_id, index, share_id=assignment.share_id)


def find_unmatched(
    assignments: Iterable[DeviceAssignment], index: DeviceIndex
) -> list[DeviceAssignment]:
    """Return the devices of GPU resources that match no GPU of the node.

    Ids that only count shares are left out, because annotations contain their GPU.
    """
    return [
        one
        for one in assignments
        if one.is_gpu_resource
        and (one.claim is not None or not counts_shares(one.device_id, index))
        and isinstance(resolve(one, index), Unresolved)
    ]


SharedDevice = tuple[str, str, int | str | None]
"""A resource name, a GPU's UUID and, for a MIG instance, its UUID or the driver's id."""
ReplicaCounts = Counter[SharedDevice]
"""Number of shares into which a device plugin divides each device."""


def shared_device(resource_name: str, device_id: str, device: ResolvedDevice) -> SharedDevice:
    """Return the key of a device that its plugin divides into shares."""
    # Compute instances of one GPU instance differ only in their UUIDs.
    named = device_id.partition("::")[0]
    instance = named if named.startswith("MIG-") else device.gpu_instance
    return resource_name, device.gpu_uuid, instance


def count_replicas(there: Iterable[ContainerDevices], index: DeviceIndex) -> ReplicaCounts:
    """Return the number of shares of each device; `there` are the node's allocatable devices."""
    counts = ReplicaCounts()
    for devices in there:
        # The kubelet may list a device once for each NUMA node.
        for device_id in set(devices.device_ids):
            found = find_device(device_id, index)
            if not isinstance(found, Unresolved) and found.replica is not None:
                counts[shared_device(devices.resource_name, device_id, found)] += 1
    return counts


def allocate(
    assignments: Iterable[DeviceAssignment],
    index: DeviceIndex,
    replicas: ReplicaCounts | None = None,
    *,
    admin_access_namespaces: Collection[str] = (),
) -> tuple[list[DeviceAllocation], Counter[Unresolved]]:
    """Return the allocations of the assignments whose GPU is in `index`.

    Also return the number of assignments that could not be resolved, by reason. Equal shares of a
    device are one allocation with a `count`. Devices of resources that are not GPU resources are
    ignored unless they are GPUs of the node. `replicas` is the number of shares of each device.
    Allocations by resource claims in `admin_access_namespaces` are marked as admin access.
    """
    counts = replicas or ReplicaCounts()
    allocations: list[DeviceAllocation] = []
    unresolved: Counter[Unresolved] = Counter()
    for assignment in assignments:
        if not assignment.is_gpu_resource and not is_gpu_id(assignment.device_id, index):
            continue
        resolved = resolve(assignment, index)
        if isinstance(resolved, Unresolved):
            unresolved[resolved] += 1
        else:
            allocations.append(
                DeviceAllocation(
                    gpu_uuid=resolved.gpu_uuid,
                    device_id=assignment.device_id,
                    resource_name=assignment.resource_name,
                    namespace=assignment.namespace,
                    pod=assignment.pod,
                    container=assignment.container,
                    gpu_instance=resolved.gpu_instance,
                    replica=resolved.replica,
                    claim=assignment.claim,
                    # A claim's share is not a device plugin's replica.
                    device_replicas=counts.get(
                        shared_device(assignment.resource_name, assignment.device_id, resolved)
                    )
                    if resolved.replica is not None and assignment.claim is None
                    else None,
                    admin_access=True
                    if assignment.claim is not None
                    and assignment.namespace in admin_access_namespaces
                    else None,
                )
            )
    return combine_equal_shares(allocations), unresolved


def combine_equal_shares(allocations: Sequence[DeviceAllocation]) -> list[DeviceAllocation]:
    """Return the allocations, with a container's equal shares of a device as one with a `count`.

    Shares of resource claims stay apart, because they may have equal device ids. So do shares that
    are allocated to several containers, because such a share counts once.
    """
    keys = [_share_key(allocation) for allocation in allocations]
    users: dict[tuple[str, str], set[_ShareKey]] = {}
    for allocation, key in zip(allocations, keys, strict=True):
        if key:
            users.setdefault((allocation.resource_name, allocation.device_id), set()).add(key)
    together: dict[_ShareKey, list[str]] = {}
    for (_, device_id), of_users in users.items():
        (key, *others) = of_users
        if not others and key.claim is None:
            together.setdefault(key, []).append(device_id)
    # Always the same share, because the kubelet's order changes.
    first_ids = {key: min(ids) for key, ids in together.items()}
    combined: list[DeviceAllocation] = []
    for allocation, key in zip(allocations, keys, strict=True):
        is_shared = len(users.get((allocation.resource_name, allocation.device_id), ())) > 1
        if key not in first_ids or is_shared:
            combined.append(allocation)
        elif allocation.device_id == first_ids[key]:
            count = len(together[key])
            combined.append(
                msgspec.structs.replace(allocation, count=count) if count > 1 else allocation
            )
    return combined


class _ShareKey(NamedTuple):
    """The facts in which equal shares agree."""

    device: DeviceKey
    container: tuple[str, str, str]
    resource_name: str
    device_replicas: int | None
    claim: str | None


def _share_key(allocation: DeviceAllocation) -> _ShareKey | None:
    """Return the key of a share that the kubelet allocated; `None` for other allocations."""
    if allocation.replica is None or allocation.share_ppm is not None:
        return None
    return _ShareKey(
        device_of(allocation),
        (allocation.namespace, allocation.pod, allocation.container),
        allocation.resource_name,
        allocation.device_replicas,
        allocation.claim,
    )


def find_on(
    allocations: Iterable[DeviceAllocation], gpu_uuid: str, gpu_instance: int | None
) -> list[DeviceAllocation]:
    """Return the allocations of a GPU or, if `gpu_instance` is given, of one of its instances.

    An allocation of the whole GPU is also an allocation of each instance.
    """
    return [
        allocation
        for allocation in allocations
        if allocation.gpu_uuid == gpu_uuid
        and (gpu_instance is None or allocation.gpu_instance in (None, gpu_instance))
    ]
