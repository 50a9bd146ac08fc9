"""One node's kubelet at work: its pods now, their devices, and the names of their logs.

The real one lists a pod until it is removed, long after its containers have ended; so does this.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from gpuledger.clock import Clock
from simulator.device import SimulatedGpu
from simulator.kubelet.devices import GivenDevice, hand_out
from simulator.plan import PlannedPod

ENDED_SECONDS: Final = 5
"""For how long a pod is listed after its end."""
_NS: Final = 1_000_000_000


class SimulatedKubelet:
    """The kubelet of one node."""

    def __init__(
        self,
        pods: Sequence[PlannedPod],
        gpus: Sequence[SimulatedGpu],
        *,
        node: str,
        clock: Clock,
        epoch_ns: int,
        uid_of: Callable[[PlannedPod], str | None],
    ) -> None:
        self._pods = [pod for pod in pods if pod.spec.node == node]
        self._given = hand_out(self._pods, gpus)
        self._node = node
        self._clock = clock
        self._epoch_ns = epoch_ns
        self._uid_of = uid_of

    async def list_pods(self) -> bytes:
        """Return the answer to `v1.PodResourcesLister/List` at this time."""
        return write_answer(self._write(pod) for pod in self._listed())

    def log_names(self) -> list[str]:
        """Return the names of the links in `/var/log/containers` at this time."""
        return [
            f"{pod.spec.name}_{pod.spec.namespace}_{name}-{container_id}.log"
            for pod in self._listed()
            for name, container_id in pod.container_ids.items()
        ]

    def _listed(self) -> list[PlannedPod]:
        now_ns = self._clock.time_ns() - self._epoch_ns
        return [
            pod
            for pod in self._pods
            if pod.start_ns <= now_ns < pod.end_ns + ENDED_SECONDS * _NS
            # Before the API server has given it one, no kubelet can have heard of it.
            and self._uid_of(pod) is not None
        ]

    def _write(self, pod: PlannedPod) -> bytes:
        return write_pod(
            pod.spec.name,
            pod.spec.namespace,
            [(one.name, self._given[pod.key, one.name]) for one in pod.spec.containers],
            node=self._node,
        )


# The kubelet's answer in Protocol Buffers' wire form: Kubernetes' `podresources/v1/api.proto`.
#
# Here live the field numbers and the writing of them, as much as the answer needs.

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
