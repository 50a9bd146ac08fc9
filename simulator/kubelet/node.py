"""One node's kubelet at work: its pods now, their devices, and the names of their logs.

The real one lists a pod until it is removed, long after its containers have ended; so does this.
"""

from collections.abc import Callable, Sequence
from typing import Final

from gpuledger.clock import Clock
from simulator.device import SimulatedGpu
from simulator.kubelet.answer import write_answer, write_pod
from simulator.kubelet.devices import hand_out
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
