"""The kubelet's answer in Protocol Buffers' wire form: Kubernetes' `podresources/v1/api.proto`.

Here live the field numbers and the writing of them, as much as the answer needs.
"""

from collections.abc import Iterable, Sequence

from simulator.kubelet.devices import GivenDevice

_LENGTH = 2
_SEVEN_BITS = 0x7F


def write_answer(pods: Iterable[bytes]) -> bytes:
    """Write a `ListPodResourcesResponse` of pods that are written already."""
    return b"".join(_field(1, pod) for pod in pods)


def write_pod(
    name: str, namespace: str, containers: Iterable[tuple[str, Sequence[GivenDevice]]], *, node: str
) -> bytes:
    """Write a `PodResources`."""
    written = (_container(container, given, namespace, node) for container, given in containers)
    head = _text(1, name) + _text(2, namespace)
    return head + b"".join(_field(3, container) for container in written)


def _container(name: str, given: Sequence[GivenDevice], namespace: str, node: str) -> bytes:
    plugged = [_field(2, _devices(one)) for one in given if one.claim is None]
    claimed = [_field(5, _claim(one, namespace, node)) for one in given if one.claim]
    return _text(1, name) + b"".join((*plugged, *claimed))


def _devices(given: GivenDevice) -> bytes:
    return _text(1, given.resource) + _text(2, given.device_id)


def _claim(given: GivenDevice, namespace: str, node: str) -> bytes:
    cdi = _text(1, f"k8s.{given.resource}/claim={given.claim}-{given.device_id}")
    names = _text(2, given.resource) + _text(3, node) + _text(4, given.device_id)
    return _text(2, given.claim or "") + _text(3, namespace) + _field(4, _field(1, cdi) + names)


def _text(number: int, text: str) -> bytes:
    return _field(number, text.encode())


def _field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | _LENGTH) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    written = bytearray()
    while value > _SEVEN_BITS:
        written.append(value & _SEVEN_BITS | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)
