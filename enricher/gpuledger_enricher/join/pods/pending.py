"""Pods that ticks name and whose records have not come: how many, for how long, and which never.

An event waits for nobody: it leaves with such a pod as pending. Here is only kept track of it. Pure
state; its times are the worker's own.
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
_MAX_NAMES: Final = 16
_SWEEP_NS: Final = NS_PER_SECOND


class PendingPod(msgspec.Struct):
    """One pod whose record is waited for."""

    names: list[str]
    """What its record may call it by, in its cluster: the UID that the cgroup showed, and its
    containers' ids."""
    node: str
    """The key of the node that named it."""
    partition: int
    """The partition of that node."""
    first_ns: int
    """When it was named first."""
    last_ns: int
    """When it was named last."""
    is_unknown: bool = False
    """Whether its time is over."""


class PendingPods:
    """The pods waited for; at most `max_pods` of them, and none that is not named any more."""

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
        """Record that a tick named pods whose records have not come."""
        cluster, _ = split_key(node)
        for uid, container_id in identities:
            key = key_in(cluster, uid or container_id or "")
            waiting = self._waiting.get(key)
            if waiting is None:
                if len(self._waiting) >= self._max_pods:
                    # Room is made at the cost of who has waited longest. That one is reported with
                    # those whose time is over: it would be lost in silence otherwise.
                    eldest = next(iter(self._waiting.values()))
                    self._drop(eldest)
                    if not eldest.is_unknown:
                        self._crowded_out.append(eldest)
                waiting = PendingPod([], node, partition, now_ns, now_ns)
                self._waiting[key] = waiting
            waiting.last_ns = now_ns
            # A tick may name a pod by a new container each time, so the names of one are bounded.
            for name in (key, key_in(cluster, container_id) if container_id else key):
                if name not in waiting.names and len(waiting.names) < _MAX_NAMES:
                    waiting.names.append(name)
                    self._by_name[name] = waiting

    def resolve(self, pod: PodRecord) -> list[PendingPod]:
        """Record that a pod's record has come; return who waited for it."""
        if not self._waiting:
            return []
        # The UID in the cgroup path of a static pod is its configuration's hash.
        names = (pod.uid, pod.config_hash or pod.uid, *ids_of(pod))
        found = [self._by_name.get(key_in(pod.cluster, name)) for name in names]
        resolved = {waiting.names[0]: waiting for waiting in found if waiting}
        for waiting in resolved.values():
            self._drop(waiting)
        return list(resolved.values())

    def expire(self, now_ns: int) -> Sequence[PendingPod]:
        """Return the pods that were waited for in vain for too long, each once.

        None where it is asked again within a second.
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
            # Kept while ticks name it, so that it is reported once and not with every tick.
            if waiting.is_unknown and waiting.last_ns <= eldest_ns:
                self._drop(waiting)
        return expired

    def forget(self, partition: int) -> None:
        """Forget what the nodes of a partition named."""
        for waiting in [
            pending for pending in self._waiting.values() if pending.partition == partition
        ]:
            self._drop(waiting)

    def _drop(self, waiting: PendingPod) -> None:
        del self._waiting[waiting.names[0]]
        self._unknown -= waiting.is_unknown
        for name in waiting.names:
            # A container id that two ticks put under different UIDs leads to the later one.
            if self._by_name.get(name) is waiting:
                del self._by_name[name]
