"""Parses the responses of the kubelet's `v1.PodResourcesLister`: the devices of containers.

Only the fields that concern devices are parsed, by their numbers in Kubernetes'
`pkg/apis/podresources/v1/api.proto`; CPUs, memory and topology are ignored. The parser supports the
part of the Protocol Buffers wire format that these messages use. ADR 010 explains why generated
code is not used; tests compare the results with the results of the Protocol Buffers library.
"""

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from gpuledger.errors import UnavailableError

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


_VARINT: Final = 0
_FIXED_BYTES: Final = {1: 8, 5: 4}
_LENGTH: Final = 2
_MAX_VARINT_BYTES: Final = 10
_MORE: Final = 0x80


def read_fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the bytes of each length-delimited field of a message.

    All other fields are skipped.

    Raise `ValueError` if the message is malformed.
    """
    position, end = 0, len(message)
    while position < end:
        tag, position = _read_varint(message, position)
        number, kind = tag >> 3, tag & 7
        if kind == _LENGTH:
            size, position = _read_varint(message, position)
            if position + size > end:
                raise ValueError(f"field {number} is {position + size - end} bytes too long")
            yield number, message[position : position + size]
            position += size
        # Skip numeric fields, because they do not concern devices.
        elif kind == _VARINT:
            _, position = _read_varint(message, position)
        elif kind in _FIXED_BYTES:
            position += _FIXED_BYTES[kind]
        else:
            raise ValueError(f"unknown wire type: {kind}")
    if position > end:
        raise ValueError("the last field is truncated")


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    for byte in message[position : position + _MAX_VARINT_BYTES]:
        position += 1
        value |= (byte & 0x7F) << shift
        if not byte & _MORE:
            return value, position
        shift += 7
    raise ValueError("a number is truncated or too long")


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


class MessageFields:
    """The length-delimited fields of one message, by number."""

    def __init__(self, message: bytes) -> None:
        """Parse a message; raises ValueError if it is malformed."""
        self._values: dict[int, list[bytes]] = {}
        for number, value in read_fields(message):
            self._values.setdefault(number, []).append(value)

    def text(self, number: int) -> str:
        """Return a field's text; an empty text if the field is missing.

        If the field occurs more than once, the last value counts; the wire format requires this.
        """
        return self._values[number][-1].decode() if number in self._values else ""

    def texts(self, number: int) -> list[str]:
        """Return all texts of a repeated field."""
        return [value.decode() for value in self._values.get(number, ())]

    def messages(self, number: int) -> "list[MessageFields]":
        """Return all messages of a repeated field."""
        return [MessageFields(value) for value in self._values.get(number, ())]


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
