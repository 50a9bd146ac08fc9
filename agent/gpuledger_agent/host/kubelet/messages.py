"""The kubelet's answer to `v1.PodResourcesLister/List`: which pod's container holds which device.

Here lives the part of it that concerns devices, by the field numbers of Kubernetes'
`pkg/apis/podresources/v1/api.proto`; CPUs, memory and topology are passed over. Of the wire
form of Protocol Buffers as much is read as one message needs: its fields, one by one. ADR 010 says
why no generated code is used; the tests hold this to Protocol Buffers' own.
"""

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from gpuledger.errors import UnavailableError

_EXPLAINED: Final[Mapping[str, str]] = {
    "missing": "there is no socket",
    "refused": "nobody listens",
    "forbidden": "the socket is root's: run the agent as user 0, without capabilities",
    "unimplemented": "the kubelet does not know pod-resources v1: Kubernetes 1.20 brought it",
}


class KubeletError(UnavailableError):
    """The kubelet did not list which container holds which device; `reason` is a metric's label."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(_EXPLAINED.get(reason) or detail or reason)
        self.reason = reason


_VARINT: Final = 0
_FIXED_BYTES: Final = {1: 8, 5: 4}
_LENGTH: Final = 2
_MAX_VARINT_BYTES: Final = 10
_MORE: Final = 0x80


def read_fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield number and bytes of each field that has bytes; the others are passed over.

    Raises ValueError where the bytes are no message.
    """
    position, end = 0, len(message)
    while position < end:
        tag, position = _read_varint(message, position)
        number, kind = tag >> 3, tag & 7
        if kind == _LENGTH:
            size, position = _read_varint(message, position)
            if position + size > end:
                raise ValueError(f"field {number} ends {position + size - end} bytes too late")
            yield number, message[position : position + size]
            position += size
        # A field without bytes of its own: nothing of the answer that concerns devices.
        elif kind == _VARINT:
            _, position = _read_varint(message, position)
        elif kind in _FIXED_BYTES:
            position += _FIXED_BYTES[kind]
        else:
            raise ValueError(f"no such kind of field: {kind}")
    if position > end:
        raise ValueError("the last field is cut off")


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    for byte in message[position : position + _MAX_VARINT_BYTES]:
        position += 1
        value |= (byte & 0x7F) << shift
        if not byte & _MORE:
            return value, position
        shift += 7
    raise ValueError("a number is cut off")


METHOD: Final = "/v1.PodResourcesLister/List"
ALLOCATABLE_METHOD: Final = "/v1.PodResourcesLister/GetAllocatableResources"


class ContainerDevices(msgspec.Struct, frozen=True, kw_only=True):
    """Devices that a device plugin gave to a container under one resource."""

    resource_name: str
    """The resource, such as `nvidia.com/gpu`."""
    device_ids: list[str]
    """The plugin's ids of the devices."""


class ClaimedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device that a resource claim gave to a container."""

    driver_name: str
    """The driver, such as `gpu.nvidia.com`."""
    pool_name: str
    """The driver's pool, most often the node's name."""
    device_name: str
    """The driver's name of the device in the pool."""
    share_id: str | None
    """Where the claim holds a share of the device: the share."""


class ResourceClaim(msgspec.Struct, frozen=True, kw_only=True):
    """A resource claim of a container."""

    name: str
    """Its name."""
    namespace: str
    """Its namespace."""
    devices: list[ClaimedDevice]
    """What it gave."""


class ContainerResources(msgspec.Struct, frozen=True, kw_only=True):
    """A container of a pod."""

    name: str
    """Its name in the pod."""
    devices: list[ContainerDevices]
    """What device plugins gave it."""
    claims: list[ResourceClaim]
    """What resource claims gave it."""


class PodResources(msgspec.Struct, frozen=True, kw_only=True):
    """A pod that the kubelet knows."""

    name: str
    """Its name."""
    namespace: str
    """Its namespace."""
    containers: list[ContainerResources]
    """Its containers."""


class MessageFields:
    """The fields of one message that have bytes, by number."""

    def __init__(self, message: bytes) -> None:
        """Read a message; raises ValueError where the bytes are none."""
        self._values: dict[int, list[bytes]] = {}
        for number, value in read_fields(message):
            self._values.setdefault(number, []).append(value)

    def text(self, number: int) -> str:
        """Return a text; of one that comes twice the last counts, as the format demands."""
        return self._values[number][-1].decode() if number in self._values else ""

    def texts(self, number: int) -> list[str]:
        """Return all texts of a field that may come again."""
        return [value.decode() for value in self._values.get(number, ())]

    def messages(self, number: int) -> "list[MessageFields]":
        """Return all messages of a field that may come again."""
        return [MessageFields(value) for value in self._values.get(number, ())]


def parse_answer(answer: bytes) -> list[PodResources]:
    """Read a `ListPodResourcesResponse`; raises ValueError where the bytes are none."""
    return [
        PodResources(
            name=pod.text(1),
            namespace=pod.text(2),
            containers=[_container(container) for container in pod.messages(3)],
        )
        for pod in MessageFields(answer).messages(1)
    ]


def parse_allocatable(answer: bytes) -> list[ContainerDevices]:
    """Read an `AllocatableResourcesResponse`; raises ValueError where the bytes are none."""
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
