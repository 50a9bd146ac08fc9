"""Which container holds which GPU device, made of the kubelet's answer. Pure.

A holding is what the kubelet says; an allocation is a holding whose GPU is known.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import translate
from typing import Final

from agent.kubelet.devices import DeviceIndex, DevicePlace, Unresolved, find_claimed, find_device
from agent.kubelet.messages import ContainerResources, PodResources, ResourceClaim
from gpuledger.records import DeviceAllocation

CLAIM_DRIVER: Final = "gpu.nvidia.com"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceAssignment:
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


def find_holdings(
    pods: Iterable[PodResources], resource_names: Sequence[str]
) -> list[DeviceAssignment]:
    """Pick the GPU devices out of an answer; a name of a resource may hold `*` and `?`."""
    is_gpu = re.compile("|".join(map(translate, resource_names)) or r"(?!)")
    return [
        holding
        for pod in pods
        for container in pod.containers
        for holding in (*_from_plugins(pod, container, is_gpu), *_from_claims(pod, container))
    ]


def allocate(
    holdings: Iterable[DeviceAssignment], index: DeviceIndex
) -> tuple[list[DeviceAllocation], Counter[Unresolved]]:
    """Return the holdings whose GPU is known, and count the others by reason."""
    allocations: list[DeviceAllocation] = []
    unresolved: Counter[Unresolved] = Counter()
    for holding in holdings:
        place = _find(holding, index)
        if isinstance(place, Unresolved):
            unresolved[place] += 1
        else:
            allocations.append(_allocation(holding, place))
    return allocations, unresolved


def find_on(
    allocations: Iterable[DeviceAllocation], gpu_uuid: str, gpu_instance: int | None
) -> list[DeviceAllocation]:
    """Return what is allocated of a GPU, or of that instance alone where one is named.

    Who holds the GPU as a whole holds the instance too.
    """
    return [
        each
        for each in allocations
        if each.gpu_uuid == gpu_uuid
        and (gpu_instance is None or each.gpu_instance in (None, gpu_instance))
    ]


def _from_plugins(
    pod: PodResources, container: ContainerResources, is_gpu: re.Pattern[str]
) -> Iterator[DeviceAssignment]:
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


def _from_claims(pod: PodResources, container: ContainerResources) -> Iterator[DeviceAssignment]:
    for claim in container.claims:
        for device in claim.devices:
            if device.driver_name == CLAIM_DRIVER:
                yield DeviceAssignment(
                    namespace=pod.namespace,
                    pod=pod.name,
                    container=container.name,
                    resource_name=device.driver_name,
                    device_id=device.device_name,
                    claim=_name_claim(claim),
                    share_id=device.share_id,
                )


def _name_claim(claim: ResourceClaim) -> str:
    return f"{claim.namespace}/{claim.name}"


def _find(holding: DeviceAssignment, index: DeviceIndex) -> DevicePlace | Unresolved:
    if holding.claim is None:
        return find_device(holding.device_id, index)
    return find_claimed(holding.device_id, index, share_id=holding.share_id)


def _allocation(holding: DeviceAssignment, place: DevicePlace) -> DeviceAllocation:
    return DeviceAllocation(
        gpu_uuid=place.gpu_uuid,
        device_id=holding.device_id,
        resource_name=holding.resource_name,
        namespace=holding.namespace,
        pod=holding.pod,
        container=holding.container,
        gpu_instance=place.gpu_instance,
        replica=place.replica,
        claim=holding.claim,
    )
