"""What podwatch's records have in common for whoever makes or reads them. Pure.

Which of two versions of a Kubernetes object is the older one (`is_older`). What podwatch publishes
can come behind what is newer: a leader that was stopped in the middle of a batch sends the rest of
it when it wakes. Whoever reads its records judges them by this alone.

And what many pods say alike is kept once (`PodSharing`). A record that was decoded has strings and
dictionaries of its own. Nobody changes a record, so equal ones can be the same object: that is more
than half of a pod that the join keeps, and a fifth of one that podwatch does. Records are equal
before and after.
"""

from functools import lru_cache
from sys import intern
from typing import Final, Generic, cast

from msgspec.structs import replace
from typing_extensions import TypeVar

from gpuledger.records import ContainerRequest, NamespaceRecord, NodeRecord, PodRecord

WatchedRecord = PodRecord | NodeRecord | NamespaceRecord
"""What podwatch makes of an object of the API server."""
RecordT = TypeVar("RecordT", bound=WatchedRecord, default=PodRecord)
"""One kind of them; pods, where nothing else is said."""


def is_older(record: WatchedRecord, than: WatchedRecord) -> bool:
    """Return whether a record is older than another of the same UID; never if that is open.

    Kubernetes declares the versions of one resource comparable where they are decimal integers, of
    which the shorter one is the smaller (they may have more digits than a machine's integer).
    """
    version, other = record.resource_version, than.resource_version
    for one in (version, other):
        # Of any other kind Kubernetes says nothing but whether they are equal; and with a zero in
        # front the comparison by length below would not hold.
        if not one.isascii() or not one.isdigit() or one.startswith("0"):
            return False
    return (len(version), version) < (len(other), other)


V = TypeVar("V")
# When one of them is full it is emptied: what is in use is shared again with the next pods, and
# names that tenants make up cannot fill the memory.
MAX_SHARED: Final = 10_000
"""Dictionaries of one kind that are remembered for those that are equal."""


@lru_cache(maxsize=MAX_SHARED)
def same(number: int | None) -> int | None:
    """Return an equal number, the same object each time while it is remembered."""
    return number


class Shared(Generic[V]):
    """One dictionary for all that are equal."""

    def __init__(self, *, max_shared: int = MAX_SHARED) -> None:
        self._max_shared = max_shared
        self._known: dict[tuple[tuple[str, V], ...], dict[str, V]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def of(self, items: dict[str, V]) -> dict[str, V]:
        """Return an equal dictionary, the same one each time while it is remembered."""
        known = self._known.get(tuple(items.items()))
        if known is not None:
            return known
        # Labels may be different in each pod, as an indexed job's are: then there is nothing to
        # share, and what is remembered would grow with the pods that were ever there.
        if len(self._known) >= self._max_shared:
            self._known.clear()
        shared = {
            intern(name): cast("V", intern(value)) if isinstance(value, str) else value
            for name, value in items.items()
        }
        self._known[tuple(shared.items())] = shared
        return shared


class SharedRequests:
    """One request for all containers that ask for the same."""

    def __init__(self, *, max_shared: int = MAX_SHARED) -> None:
        self._max_shared = max_shared
        self._known: dict[tuple[object, ...], ContainerRequest] = {}

    def __len__(self) -> int:
        return len(self._known)

    def of(self, request: ContainerRequest) -> ContainerRequest:
        """Return an equal request, the same one each time while it is remembered."""
        if request.claims:
            # A claim is one pod's, or a few pods': nothing to share.
            return request
        key = (*request.resources.items(), request.mps_active_thread_ratio)
        known = self._known.get(key)
        if known is not None:
            return known
        if len(self._known) >= self._max_shared:
            self._known.clear()
        return self._known.setdefault(key, request)


class PodSharing:
    """Lets the records that were read from the topic hold what is equal once."""

    def __init__(self, *, max_shared: int = MAX_SHARED) -> None:
        self._texts: Shared[str] = Shared(max_shared=max_shared)
        """Labels and annotations."""
        self._requests = SharedRequests(max_shared=max_shared)

    def __len__(self) -> int:
        return len(self._texts) + len(self._requests)

    def share(self, pod: PodRecord) -> PodRecord:
        """Return an equal record that shares with others what it can."""
        return replace(
            pod,
            namespace=intern(pod.namespace),
            cluster=intern(pod.cluster),
            node=intern(pod.node),
            owner_kind=pod.owner_kind and intern(pod.owner_kind),
            owner_name=pod.owner_name and intern(pod.owner_name),
            labels=self._texts.of(pod.labels),
            annotations=self._texts.of(pod.annotations) if pod.annotations else pod.annotations,
            containers=[
                replace(
                    each,
                    name=intern(each.name),
                    kind=each.kind and intern(each.kind),
                    requested=each.requested and self._requests.of(each.requested),
                )
                for each in pod.containers
            ],
            phase=intern(pod.phase),
            qos_class=pod.qos_class and intern(pod.qos_class),
            priority_class=pod.priority_class and intern(pod.priority_class),
            created_time_ns=same(pod.created_time_ns),
            started_time_ns=same(pod.started_time_ns),
        )
