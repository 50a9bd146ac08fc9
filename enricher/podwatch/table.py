"""The pods as last seen, and which of them Kafka does not know yet. Pure: no clock, no waiting.

Memory is bounded by the pods of the cluster and the deleted ones that wait for their tombstone;
while Kafka is away, a pod's newer state takes the place of its older one.
"""

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Final, NamedTuple

from msgspec.structs import replace

from enricher.versions import is_older
from gpuledger.records import PodRecord

_NS: Final = 1_000_000_000


class PendingMessage(NamedTuple):
    """One message that is due: a pod's newest state, or a tombstone where it has none."""

    uid: str
    node: str
    pod: PodRecord | None
    seen_time_ns: int


class PodTable:
    """Takes what the reflector saw, gives what is to be published."""

    def __init__(self, *, tombstone_after_seconds: float, max_tombstones: int) -> None:
        self._tombstone_after_ns = round(tombstone_after_seconds * _NS)
        self._max_tombstones = max_tombstones
        self._alive: dict[str, PodRecord] = {}
        self._deleted: dict[str, PodRecord] = {}
        self._tombstones: dict[str, str] = {}
        self._unpublished: dict[str, int] = {}
        self._listed: set[str] | None = None

    def __len__(self) -> int:
        return len(self._alive)

    @property
    def unpublished(self) -> int:
        """How many pods have a state that was not acknowledged."""
        return len(self._unpublished)

    def restore(self, pods: Iterable[PodRecord]) -> None:
        """Take what Kafka knows from before, into an empty table: nothing of it is due."""
        deleted = []
        for pod in pods:
            if pod.deleted_time_ns is None:
                self._alive[pod.uid] = pod
            else:
                deleted.append(pod)
        deleted.sort(key=_deletion)
        self._deleted = {pod.uid: pod for pod in deleted}

    def repeat(self, uids: Iterable[str], *, time_ns: int) -> None:
        """Have what was restored published again: something older stands behind it."""
        self._unpublished |= dict.fromkeys(uids, time_ns)

    def repeat_all(self, *, time_ns: int) -> None:
        """Have every pod published again: the topic that knew them is gone."""
        for uid in chain(self._deleted, self._alive):
            self._unpublished.setdefault(uid, time_ns)

    def see(self, pod: PodRecord, *, time_ns: int) -> None:
        """Take a pod's state; one that only differs in its version is the same."""
        if self._listed is not None:
            self._listed.add(pod.uid)
        known = self._alive.get(pod.uid)
        if known is None or replace(pod, resource_version=known.resource_version) != known:
            dead = self._deleted.pop(pod.uid, None)
            if dead and is_older(pod, than=dead):
                pod = replace(pod, resource_version=dead.resource_version)
            self._tombstones.pop(pod.uid, None)
            self._alive[pod.uid] = pod
            self._unpublished[pod.uid] = time_ns
        elif pod.uid not in self._unpublished:
            # A pod just read shares its strings with others; one from the topic has its own.
            self._alive[pod.uid] = pod

    def delete(self, pod: PodRecord, *, time_ns: int) -> None:
        """Record that a pod left the API server."""
        self._alive.pop(pod.uid, None)
        self._deleted[pod.uid] = replace(pod, deleted_time_ns=time_ns)
        self._unpublished[pod.uid] = time_ns

    def keep(self, uid: str) -> None:
        """Record that a pod is there in a state that cannot be read: what is known of it stays.

        Without a UID it may be any, so that no pod is missing from the list that it is in.
        """
        if self._listed is not None:
            self._listed.update([uid] if uid else self._alive)

    def delete_known(self, uid: str, *, version: str, time_ns: int) -> None:
        """Record that a pod left the API server, of which only the UID can be read."""
        if known := self._alive.get(uid):
            as_of = version or known.resource_version
            self.delete(replace(known, resource_version=as_of), time_ns=time_ns)

    def begin_list(self) -> None:
        """Record that a complete list begins; one that broke off before is forgotten."""
        self._listed = set()

    def end_list(self, *, time_ns: int, version: str | None = None) -> int:
        """Delete what the list did not have; return how many.

        They are deleted as of the list's version, which is above that of every record of them.
        """
        listed, self._listed = self._listed or set(), None
        gone = [pod for uid, pod in self._alive.items() if uid not in listed]
        for pod in gone:
            as_of = version or pod.resource_version
            self.delete(replace(pod, resource_version=as_of), time_ns=time_ns)
        return len(gone)

    def expire(self, *, time_ns: int) -> int:
        """Make tombstones of the deleted pods whose time is over; return how many came early."""
        early = max(0, len(self._deleted) - self._max_tombstones)
        for uid in [*islice(self._deleted, early), *self._due(time_ns)]:
            if pod := self._deleted.pop(uid, None):
                self._tombstones[uid] = pod.node
                self._unpublished[uid] = time_ns
        return early

    def _due(self, time_ns: int) -> Iterator[str]:
        """Yield the deleted pods that are due, the oldest first; the deletion goes before."""
        for uid, pod in self._deleted.items():
            if _deletion(pod) + self._tombstone_after_ns > time_ns:
                return
            if uid not in self._unpublished:
                yield uid

    def batch(self, maximum: int) -> list[PendingMessage]:
        """Return what is to be published, oldest first; it stays due until acknowledged."""
        return [
            self._pending(uid, time_ns)
            for uid, time_ns in islice(self._unpublished.items(), maximum)
        ]

    def _pending(self, uid: str, time_ns: int) -> PendingMessage:
        pod = self._state(uid)
        node = pod.node if pod else self._tombstones[uid]
        return PendingMessage(uid=uid, node=node, pod=pod, seen_time_ns=time_ns)

    def _state(self, uid: str) -> PodRecord | None:
        return self._alive.get(uid) or self._deleted.get(uid)

    def acknowledge(self, batch: Iterable[PendingMessage]) -> None:
        """Record that these were published; what changed meanwhile stays due."""
        for one in batch:
            if self._state(one.uid) is not one.pod:
                continue
            self._unpublished.pop(one.uid, None)
            if one.pod is None:
                self._tombstones.pop(one.uid, None)
        if not self._unpublished:
            # Empty, it would still hold the room that the first list took: 5 MB for 100,000 pods.
            self._unpublished.clear()


def _deletion(pod: PodRecord) -> int:
    return pod.deleted_time_ns or 0
