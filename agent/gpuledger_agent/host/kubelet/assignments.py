"""Which container holds which GPU device, made of the kubelet's answer. Pure.

An assignment is what the kubelet says; an allocation is an assignment whose GPU is known. Every
device plugin and driver has ids of its own for devices; what none of the known forms fits, or what
leads to no GPU that this node has now, is left unresolved with a reason, never guessed.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import translate
from typing import Final

import msgspec

from gpuledger.records import DeviceAllocation, GpuFacts, MigInstance
from gpuledger_agent.host.kubelet.messages import ContainerDevices, ContainerResources, PodResources

CLAIM_DRIVER: Final = "gpu.nvidia.com"
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


class ResolvedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """The GPU, or the part of a GPU, that a device id means."""

    gpu_uuid: str
    """The GPU."""
    gpu_instance: int | None = None
    """The driver's id of the GPU instance, where the device is a MIG instance."""
    replica: str | None = None
    """The share's name, where the device is one of several shares."""


@dataclass(frozen=True, kw_only=True)
class DeviceIndex:
    """The node's GPUs and MIG instances, by what device ids contain."""

    uuids: frozenset[str] = frozenset()
    """The GPUs."""
    by_minor: Mapping[int, str] = field(default_factory=dict)
    """GPU by the number in its device file."""
    instances: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """GPU and GPU instance by the UUID of a MIG instance."""
    layouts: Mapping[str, Sequence[MigInstance]] = field(default_factory=dict)
    """MIG instances by GPU."""
    by_index: Mapping[int, str] = field(default_factory=dict)
    """GPU by the driver's index."""

    @classmethod
    def of(cls, gpus: Iterable[GpuFacts]) -> "DeviceIndex":
        """Return the index of an inventory's GPUs."""
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
        )

    def has_instance(self, gpu_uuid: str, gpu_instance: int) -> bool:
        """Return whether a GPU has a GPU instance of this id now."""
        layout = self.layouts.get(gpu_uuid, ())
        return any(one.gpu_instance == gpu_instance for one in layout)


def find_device(device_id: str, index: DeviceIndex) -> ResolvedDevice | Unresolved:
    """Find the device that a device plugin calls so."""
    whole, _, replica = device_id.partition("::")
    if whole in index.uuids:
        return ResolvedDevice(gpu_uuid=whole, replica=replica or None)
    # A device of the plugin's `mixed` and `single` strategies is an instance by its own UUID.
    if whole in index.instances:
        gpu_uuid, instance = index.instances[whole]
        return ResolvedDevice(gpu_uuid=gpu_uuid, gpu_instance=instance, replica=replica or None)
    # Before driver R470 an instance's UUID was its GPU's, with the instance's numbers behind it.
    if match := _OLD_MIG.fullmatch(whole):
        return _resolve(
            match["gpu"], index, instance=int(match["instance"]), replica=replica or None
        )
    if match := _GKE.fullmatch(device_id):
        # GKE's plugin goes by device files, with instance and share behind them.
        return _resolve(
            index.by_minor.get(int(match["minor"])),
            index,
            instance=int(match["instance"]) if match["instance"] else None,
            replica=match["replica"],
        )
    # A MIG instance of a layout that is gone: no plugin would mean a GPU by it.
    if whole.startswith("MIG-"):
        return Unresolved.UNKNOWN_INSTANCE
    return _find_counted(whole, index)


def find_claimed(
    device_name: str, index: DeviceIndex, *, share_id: str | None
) -> ResolvedDevice | Unresolved:
    """Find the device that NVIDIA's driver for resource claims calls so."""
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
    return ResolvedDevice(gpu_uuid=gpu_uuid, gpu_instance=instance, replica=replica)


def _find_counted(device_id: str, index: DeviceIndex) -> ResolvedDevice | Unresolved:
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
    return ResolvedDevice(gpu_uuid=match["gpu"], replica=match["replica"])


def _find_instance(match: re.Match[str], layout: Sequence[MigInstance]) -> int | None:
    """Return the only GPU instance that the name can mean.

    The name ends in profile id, placement's start and size, or, in newer versions of the driver,
    in profile, profile id and placement's start.
    """
    is_newer = not match["profile"].isdigit()
    start = int(match["second"] if is_newer else match["first"])
    # Where the driver does not say where an instance lies, the profile alone may tell it apart.
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
    """Write a profile as names of devices do: `1g.10gb+me` is `1g10gb-me`."""
    return re.sub(r"[^a-z0-9]", "-", (profile or "").lower().replace(".", "")).strip("-")


class DeviceAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """A device of a container, as the kubelet names it."""

    namespace: str
    """Namespace of the pod."""
    pod: str
    """Name of the pod."""
    container: str
    """Name of the container in the pod."""
    resource_name: str
    """The resource; for a claim, the driver."""
    device_id: str
    """The device plugin's or the driver's name of the device."""
    claim: str | None = None
    """The claim, as `namespace/name`, where a claim gave it."""
    share_id: str | None = None
    """The share of the device that the claim holds."""


def find_assignments(
    pods: Iterable[PodResources], resource_names: Sequence[str]
) -> list[DeviceAssignment]:
    """Pick the GPU devices out of an answer; a name of a resource may hold `*` and `?`."""
    # Without any name nothing fits, where an empty pattern would fit everything.
    is_gpu = re.compile("|".join(map(translate, resource_names)) or r"(?!)")
    return [
        assignment
        for pod in pods
        for container in pod.containers
        for assignment in assignments_of(pod, container, is_gpu)
    ]


def assignments_of(
    pod: PodResources, container: ContainerResources, is_gpu: re.Pattern[str]
) -> Iterator[DeviceAssignment]:
    """Yield the GPU devices of one container: those of device plugins, then those of claims."""
    for devices in container.devices:
        if is_gpu.match(devices.resource_name):
            for device_id in devices.device_ids:
                yield DeviceAssignment(
                    namespace=pod.namespace,
                    pod=pod.name,
                    container=container.name,
                    resource_name=devices.resource_name,
                    device_id=device_id,
                )
    for claim in container.claims:
        for device in claim.devices:
            # A claim may hold devices of other drivers, such as network cards, as well.
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


SharedDevice = tuple[str, str, int | str | None]
"""A resource, a GPU, and the instance of it by its UUID or by the driver's id, if it is one."""
ReplicaCounts = Counter[SharedDevice]
"""How many shares there are of each device."""


def _shared_device(resource_name: str, device_id: str, device: ResolvedDevice) -> SharedDevice:
    # Compute instances of one GPU instance are told apart by their UUIDs alone.
    named = device_id.partition("::")[0]
    instance = named if named.startswith("MIG-") else device.gpu_instance
    return resource_name, device.gpu_uuid, instance


def count_replicas(there: Iterable[ContainerDevices], index: DeviceIndex) -> ReplicaCounts:
    """Return the number of replicas of each device among all that are allocatable."""
    counts = ReplicaCounts()
    for devices in there:
        # The kubelet may name a device once for each of its memory nodes.
        for device_id in set(devices.device_ids):
            found = find_device(device_id, index)
            if not isinstance(found, Unresolved) and found.replica is not None:
                counts[_shared_device(devices.resource_name, device_id, found)] += 1
    return counts


def allocate(
    assignments: Iterable[DeviceAssignment],
    index: DeviceIndex,
    replicas: ReplicaCounts | None = None,
    *,
    admin_access_namespaces: Collection[str] = (),
) -> tuple[list[DeviceAllocation], Counter[Unresolved]]:
    """Return the assignments whose GPU is known, and count the others by reason.

    `replicas` says how many shares there are of a device, `admin_access_namespaces` in which
    namespaces claims are for admin access.
    """
    counts = replicas or ReplicaCounts()
    allocations: list[DeviceAllocation] = []
    unresolved: Counter[Unresolved] = Counter()
    for assignment in assignments:
        if assignment.claim is None:
            resolved = find_device(assignment.device_id, index)
        else:
            resolved = find_claimed(assignment.device_id, index, share_id=assignment.share_id)
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
                    # A share of a claim is no replica of a plugin's.
                    device_replicas=counts.get(
                        _shared_device(assignment.resource_name, assignment.device_id, resolved)
                    )
                    if resolved.replica is not None and assignment.claim is None
                    else None,
                    admin_access=True
                    if assignment.claim is not None
                    and assignment.namespace in admin_access_namespaces
                    else None,
                )
            )
    return allocations, unresolved


def find_on(
    allocations: Iterable[DeviceAllocation], gpu_uuid: str, gpu_instance: int | None
) -> list[DeviceAllocation]:
    """Return what is allocated of a GPU, or of that instance alone where one is named.

    Who holds the GPU as a whole holds the instance too.
    """
    return [
        allocation
        for allocation in allocations
        if allocation.gpu_uuid == gpu_uuid
        and (gpu_instance is None or allocation.gpu_instance in (None, gpu_instance))
    ]
