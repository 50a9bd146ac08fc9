"""Pure functions for podwatch's records, used by both podwatch and the join.

`is_older` determines which of two versions of a Kubernetes object is older. podwatch may publish an
old version after a newer one: a leader that was suspended in the middle of a batch sends the rest
when it resumes. Consumers of the records rely only on this comparison.

`PodSharing` keeps equal parts of pod records in memory once. Each decoded record has its own
strings and dictionaries, but records are never changed, so equal parts can be the same object. This
saves more than half of the memory of a pod in the join, and a fifth in podwatch. A shared record is
equal to the original.
"""

from functools import lru_cache
from sys import intern
from typing import Final, Generic, cast

from msgspec.structs import replace
from typing_extensions import TypeVar

from gpuledger.records import (
    ContainerRequest,
    NamespaceRecord,
    NodeRecord,
    PendingPodRecord,
    PodRecord,
)

WatchedRecord = PodRecord | PendingPodRecord | NodeRecord | NamespaceRecord
"""A record that podwatch makes from an object of the API server."""
RecordT = TypeVar("RecordT", bound=WatchedRecord, default=PodRecord)
"""One kind of watched record; pods by default."""


def is_older(record: WatchedRecord, than: WatchedRecord) -> bool:
    """Return whether a record is older than another of the same UID; `False` if undecidable.

    Kubernetes defines an order of resource versions only for decimal integers without leading
    zeros. Versions may exceed 64 bits, so they are compared by length first.
    """
    version, other = record.resource_version, than.resource_version
    for one in (version, other):
        # Kubernetes defines only equality for any other form, and leading zeros would break the
        # comparison by length below.
        if not one.isascii() or not one.isdigit() or one.startswith("0"):
            return False
    return (len(version), version) < (len(other), other)


def with_known_version(record: RecordT, known: RecordT) -> RecordT:
    """Return a record with the resource version of another one."""
    return replace(record, resource_version=known.resource_version)


def gone_time_ns(record: WatchedRecord) -> int | None:
    """Return when an object was deleted, or left the waiting pods; `None` if it is still there."""
    return record.left_time_ns if isinstance(record, PendingPodRecord) else record.deleted_time_ns


def with_gone_time(record: RecordT, time_ns: int) -> RecordT:
    """Return the record of an object that is gone since `time_ns`."""
    if isinstance(record, PendingPodRecord):
        return replace(record, left_time_ns=time_ns)
    return replace(record, deleted_time_ns=time_ns)


V = TypeVar("V")
# A full cache is emptied: values in use are shared again by the next pods, and forged names cannot
# fill the memory.
MAX_SHARED: Final = 10_000
"""Maximum number of dictionaries of one kind that are remembered."""


@lru_cache(maxsize=MAX_SHARED)
def same(number: int | None) -> int | None:
    """Return an equal number; equal numbers share one object while it is cached."""
    return number


class Shared(Generic[V]):
    """Keeps one object for all equal dictionaries; the number of these objects is limited."""

    def __init__(self, *, max_shared: int = MAX_SHARED) -> None:
        self._max_shared = max_shared
        self._known: dict[tuple[tuple[str, V], ...], dict[str, V]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def of(self, items: dict[str, V]) -> dict[str, V]:
        """Return an equal dictionary; equal dictionaries share one object while it is cached."""
        known = self._known.get(tuple(items.items()))
        if known is not None:
            return known
        # Labels may differ in every pod, such as the labels of an indexed job. Then nothing can be
        # shared, and without this limit the cache would grow with every pod that ever existed.
        if len(self._known) >= self._max_shared:
            self._known.clear()
        shared = {
            intern(name): cast("V", intern(value)) if isinstance(value, str) else value
            for name, value in items.items()
        }
        self._known[tuple(shared.items())] = shared
        return shared


class SharedRequests:
    """Keeps one object for all equal requests of containers."""

    def __init__(self, *, max_shared: int = MAX_SHARED) -> None:
        self._max_shared = max_shared
        self._known: dict[tuple[object, ...], ContainerRequest] = {}

    def __len__(self) -> int:
        return len(self._known)

    def of(self, request: ContainerRequest) -> ContainerRequest:
        """Return an equal request; equal requests share one object while it is cached."""
        if request.claims:
            # A claim belongs to one pod or a few pods, so the request is not worth sharing.
            return request
        key = (*request.resources.items(), request.mps_active_thread_ratio)
        known = self._known.get(key)
        if known is not None:
            return known
        if len(self._known) >= self._max_shared:
            self._known.clear()
        return self._known.setdefault(key, request)


class PodSharing:
    """Makes pod records that were read from the topic share their equal parts."""

    def __init__(self, *, max_shared: int = MAX_SHARED) -> None:
        self._texts: Shared[str] = Shared(max_shared=max_shared)
        """Cache of labels and annotations."""
        self._requests = SharedRequests(max_shared=max_shared)

    def __len__(self) -> int:
        return len(self._texts) + len(self._requests)

    def share(self, pod: PodRecord) -> PodRecord:
        """Return an equal record that shares its parts with other records."""
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
            requested_cpu_millicores=same(pod.requested_cpu_millicores),
            requested_memory_bytes=same(pod.requested_memory_bytes),
            priority_class=pod.priority_class and intern(pod.priority_class),
            created_time_ns=same(pod.created_time_ns),
            scheduled_time_ns=same(pod.scheduled_time_ns),
            started_time_ns=same(pod.started_time_ns),
        )
