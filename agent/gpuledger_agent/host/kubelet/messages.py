"""Parses the responses of the kubelet's `v1.PodResourcesLister`: the devices of containers.

Only the fields that concern devices are parsed, by their numbers in Kubernetes'
`pkg/apis/podresources/v1/api.proto`; CPUs, memory and topology are ignored. ADR 010 explains why
generated code is not used; tests compare the results with those of the Protocol Buffers library.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from gpuledger.errors import UnavailableError
from gpuledger.protobuf import MessageFields

_EXPLAINED: Final[Mapping[str, str]] = {
    "missing": "the socket does not exist",
    "refused": "connection refused",
    "forbidden": "permission denied; run the agent as user 0, without capabilities",
    "unimplemented": "the kubelet does not support pod-resources v1; use Kubernetes 1.20 or later",
}


class KubeletError(UnavailableError):
    """The kubelet did not return the devices; `reason` is a label value of the metric."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(_EXPLAINED.get(reason) or detail or reason)
        self.reason = reason


METHOD: Final = "/v1.PodResourcesLister/List"
ALLOCATABLE_METHOD: Final = "/v1.PodResourcesLister/GetAllocatableResources"


class ContainerDevices(msgspec.Struct, frozen=True, kw_only=True):
    """Devices that a device plugin allocated to a container under one resource name."""

    resource_name: str
    """The resource, such as `nvidia.com/gpu`."""
    device_ids: list[str]
    """The device plugin's ids of the devices."""


class ClaimedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device that a resource claim allocated to a container."""

    driver_name: str
    """The driver, such as `gpu.nvidia.com`."""
    pool_name: str
    """The driver's pool, usually the node's name."""
    device_name: str
    """The device's name in the pool."""
    share_id: str | None
    """The share of the device that the claim allocated; `None` for the whole device."""


class ResourceClaim(msgspec.Struct, frozen=True, kw_only=True):
    """A resource claim that a container uses."""

    name: str
    """The claim's name."""
    namespace: str
    """The claim's namespace."""
    devices: list[ClaimedDevice]
    """The devices that the claim allocated to the container."""


class ContainerResources(msgspec.Struct, frozen=True, kw_only=True):
    """A container of a pod, with its devices."""

    name: str
    """The container's name in the pod."""
    devices: list[ContainerDevices]
    """Devices allocated by device plugins."""
    claims: list[ResourceClaim]
    """The container's resource claims."""


class PodResources(msgspec.Struct, frozen=True, kw_only=True):
    """A pod in the kubelet's list, with its containers."""

    name: str
    """The pod's name."""
    namespace: str
    """The pod's namespace."""
    containers: list[ContainerResources]
    """The pod's containers."""


def parse_answer(answer: bytes) -> list[PodResources]:
    """Parse a `ListPodResourcesResponse`; raises ValueError if it is malformed."""
    return [
        PodResources(
            name=pod.text(1),
            namespace=pod.text(2),
            containers=[_container(container) for container in pod.messages(3)],
        )
        for pod in MessageFields(answer).messages(1)
    ]


def parse_allocatable(answer: bytes) -> list[ContainerDevices]:
    """Parse an `AllocatableResourcesResponse`; raises ValueError if it is malformed."""
    return [_devices(devices) for devices in MessageFields(answer).messages(1)]


def _devices(devices: MessageFields) -> ContainerDevices:
    return ContainerDevices(resource_name=devices.text(1), device_ids=devices.texts(2))


def _container(container: MessageFields) -> ContainerResources:
    return ContainerResources(
        name=container.text(1),
        devices=[_devices(devices) for devices in container.messages(2)],
        claims=[
            ResourceClaim(
                name=claim.text(2),
                namespace=claim.text(3),
                devices=[
                    ClaimedDevice(
                        driver_name=device.text(2),
                        pool_name=device.text(3),
                        device_name=device.text(4),
                        share_id=device.text(5) or None,
                    )
                    for device in claim.messages(4)
                ],
            )
            for claim in container.messages(5)
        ],
    )
