"""Tracks pods that appear in a tick before their pod record has arrived.

Events do not wait for the record, and describe such a pod as pending. If the record does not arrive
in time, the pod is reported as unknown. This module does not affect events. It does no I/O; all
times are by the worker's clock.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from gpuledger.clock import NS_PER_SECOND
from gpuledger.keys import key_in, split_key
from gpuledger.records import PodRecord
from gpuledger_enricher.join.pods.describe import Identity
from gpuledger_enricher.join.pods.pods import ids_of

MAX_PENDING: Final = 10_000
"""Maximum number of pending pods. With all their names, they take 60 MB."""
_MAX_NAMES: Final = 16
_SWEEP_NS: Final = NS_PER_SECOND


class PendingPod(msgspec.Struct):
    """A pod whose record has not been read yet."""

    names: list[str]
    """Possible names of the pod, each with the cluster: the UID from the cgroup path, and container
    ids."""
    node: str
    """The key of the node that named the pod."""
    partition: int
    """The partition of that node."""
    first_ns: int
    """When a tick first named the pod, by the worker's clock."""
    last_ns: int
    """When a tick last named the pod, by the worker's clock."""
    is_unknown: bool = False
    """Whether the pod has waited for too long and counts as unknown."""


class PendingPods:
    """The pending pods, at most `max_pods`; unknown pods that ticks no longer name are dropped."""

    def __init__(self, *, pending_pod_timeout_seconds: float, max_pods: int = MAX_PENDING) -> None:
        self._pending_ns = round(pending_pod_timeout_seconds * 1e9)
        self._max_pods = max_pods
        self._waiting: OrderedDict[str, PendingPod] = OrderedDict()
        self._by_name: dict[str, PendingPod] = {}
        self._unknown = 0
        self._swept_ns = 0
        self._crowded_out: list[PendingPod] = []

    def __len__(self) -> int:
        return len(self._waiting) - self._unknown

    def record(
        self, identities: Iterable[Identity], *, node: str, partition: int, now_ns: int
    ) -> None:
        """Record that a tick named pods whose records have not arrived."""
        cluster, _ = split_key(node)
        for uid, container_id in identities:
            key = key_in(cluster, uid or container_id or "")
            waiting = self._waiting.get(key)
            if waiting is None:
                if len(self._waiting) >= self._max_pods:
                    # The pod that has waited longest makes room. It is reported together with the
                    # expired pods, because otherwise no log line would mention it.
                    eldest = next(iter(self._waiting.values()))
                    self._drop(eldest)
                    if not eldest.is_unknown:
                        self._crowded_out.append(eldest)
                waiting = PendingPod([], node, partition, now_ns, now_ns)
                self._waiting[key] = waiting
            waiting.last_ns = now_ns
            # A tick may name a pod by a new container each time, so the pod's names are limited.
            for name in (key, key_in(cluster, container_id) if container_id else key):
                if name not in waiting.names and len(waiting.names) < _MAX_NAMES:
                    waiting.names.append(name)
                    self._by_name[name] = waiting

    def resolve(self, pod: PodRecord) -> list[PendingPod]:
        """Record that a pod's record was read; return the pending pods that it resolves."""
        if not self._waiting:
            return []
        # The UID in a static pod's cgroup path is its configuration hash.
        names = (pod.uid, pod.config_hash or pod.uid, *ids_of(pod))
        found = [self._by_name.get(key_in(pod.cluster, name)) for name in names]
        resolved = {waiting.names[0]: waiting for waiting in found if waiting}
        for waiting in resolved.values():
            self._drop(waiting)
        return list(resolved.values())

    def expire(self, now_ns: int) -> Sequence[PendingPod]:
        """Return the pods whose records did not arrive in time, each pod only once.

        Return nothing if the previous call was less than a second ago.
        """
        if 0 <= now_ns - self._swept_ns < _SWEEP_NS:
            return ()
        self._swept_ns = now_ns
        eldest_ns = now_ns - self._pending_ns
        expired, self._crowded_out = self._crowded_out, []
        for waiting in list(self._waiting.values()):
            if waiting.first_ns <= eldest_ns and not waiting.is_unknown:
                waiting.is_unknown = True
                self._unknown += 1
                expired.append(waiting)
            # Kept while ticks name the pod, so that it is reported once and not with each tick.
            if waiting.is_unknown and waiting.last_ns <= eldest_ns:
                self._drop(waiting)
        return expired

    def forget(self, partition: int) -> None:
        """Forget the pods that the nodes of a partition named."""
        for waiting in [
            pending for pending in self._waiting.values() if pending.partition == partition
        ]:
            self._drop(waiting)

    def _drop(self, waiting: PendingPod) -> None:
        del self._waiting[waiting.names[0]]
        self._unknown -= waiting.is_unknown
        for name in waiting.names:
            # If ticks listed a container id with different UIDs, the id refers to the later pod.
            if self._by_name.get(name) is waiting:
                del self._by_name[name]
