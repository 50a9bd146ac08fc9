"""Turns the API server's bytes into small records. Pure; an invalid object raises an error.

About 100,000 records may be kept, so they are small and the garbage collector never visits them.
Equal parts are kept once, because the pods of a workload have the same labels and requests. Records
can share a dictionary, because they are never changed. Shared parts and parsed times save a quarter
of the memory.

This module has, in this order, the cache of times, the readers of pods, nodes and namespaces, and
the truncation of JSON that is nested too deeply.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from sys import intern
from typing import Annotated, Any, ClassVar, Final, Generic, TypeVar, cast

import msgspec
from msgspec import Meta, Raw
from typing_extensions import override

from gpuledger.clock import NS_PER_SECOND
from gpuledger.errors import UndecodableError
from gpuledger.records import (
    NamespaceRecord,
    NodeRecord,
    PendingContainer,
    PendingPodRecord,
    PodRecord,
)
from gpuledger.records.base import NodeName
from gpuledger.records.bounds import MAX_SENTENCE_LENGTH, Label
from gpuledger_enricher.podwatch.node_facts import (
    INSTANCE_TYPE_LABELS,
    POOL_LABELS,
    REGION_LABELS,
    ZONE_LABELS,
    capacity_type_of,
    first_of,
)
from gpuledger_enricher.podwatch.objects import (
    AddedEvent,
    Annotations,
    ApiNode,
    ApiPod,
    BookmarkEvent,
    DeletedEvent,
    ErrorEvent,
    IdentityMeta,
    IdentityOnly,
    MetadataOnly,
    ModifiedEvent,
    NodeStatus,
    PodAnnotations,
    PodCondition,
    PodSpec,
    PodStatus,
    QueueAnnotations,
)
from gpuledger_enricher.podwatch.pod_facts import (
    ChosenAnnotations,
    ContainerReader,
    amounts_of,
    known_owner,
    last_end_ns,
    mirrored_hash,
    parse_amount,
    pod_scheduled,
    queue_of,
    requested_of,
)
from gpuledger_enricher.podwatch.pod_settings import ALL_LABELS
from gpuledger_enricher.watched_records import RecordT, Shared, same

T = TypeVar("T")
# A full cache is emptied; times that are still in use are then parsed again.
_MAX_TIMES: Final = 2_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
# A grace period may last centuries, but the times in a record end in the year 2262.
_LAST_NS: Final = 2**63 - 1
_Time = Annotated[datetime, Meta(tz=True)]


class Times:
    """Parses and caches the API server's times, which are in whole seconds and therefore repeat."""

    def __init__(self) -> None:
        self._known: dict[str, int | None] = {}

    def nanoseconds(self, text: str | None) -> int | None:
        """Return nanoseconds since the epoch; `None` for a missing or empty time and for the epoch.

        The kubelet writes the epoch if the runtime does not report a time. Raise
        `msgspec.ValidationError` if the text is not a time.
        """
        if not text:
            return None
        if text not in self._known:
            if len(self._known) >= _MAX_TIMES:
                self._known.clear()
            # Integers only: a float cannot represent today's time in nanoseconds exactly.
            since = msgspec.convert(text, _Time) - _EPOCH
            time_ns = (
                since.days * 86_400 + since.seconds
            ) * NS_PER_SECOND + since.microseconds * 1000
            self._known[text] = min(time_ns, _LAST_NS) if time_ns > 0 else None
        return self._known[text]


UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError)
"""The errors that decoding raises."""
ObjectEvent = (
    AddedEvent[MetadataOnly[Any]]
    | ModifiedEvent[MetadataOnly[Any]]
    | DeletedEvent[MetadataOnly[Any]]
)
WatchLine = ObjectEvent | BookmarkEvent | ErrorEvent
"""A decoded line of a watch."""
_NO_SPEC: Final = PodSpec()
_NO_STATUS: Final = PodStatus()
_NO_CONDITION: Final = PodCondition()
_NO_NODE_STATUS: Final = NodeStatus()
_OVER: Final = frozenset({"Succeeded", "Failed"})


class ObjectReader(ABC, Generic[RecordT]):
    """Reads objects of one kind, with the labels and annotations that the settings name."""

    what: ClassVar[str]
    """The kind of object with its article, for error messages, such as `a pod`."""

    def __init__(
        self,
        struct: type[MetadataOnly[Any]],
        *,
        cluster: str,
        labels: Iterable[str],
        annotations: Iterable[str] = (),
        fixed_annotations: type[Annotations] = Annotations,
    ) -> None:
        self.cluster = intern(cluster)
        """The cluster of the objects."""
        self._labels = tuple(labels)
        self._all_labels = ALL_LABELS in self._labels
        self._annotations = ChosenAnnotations(annotations, base=fixed_annotations)
        self._shared_labels: Shared[str] = Shared()
        self._shared_annotations: Shared[str] = Shared()
        self.nanoseconds = Times().nanoseconds
        chosen = cast("Any", struct)[self._annotations.struct]
        self._decode = msgspec.json.Decoder(chosen).decode
        line: Any = BookmarkEvent | ErrorEvent
        for event in (AddedEvent, ModifiedEvent, DeletedEvent):
            line |= cast("Any", event)[chosen]
        self._decode_line: Callable[[bytes | Raw], WatchLine] = msgspec.json.Decoder(line).decode

    @abstractmethod
    def record(self, found: Any) -> RecordT | None:  # noqa: ANN401  # the struct that was given
        """Return the record of a decoded object; `None` for a pod that has none.

        Raise `msgspec.MsgspecError` if the object is invalid.
        """

    def read(self, data: bytes | Raw) -> RecordT | None:
        """Return the record of an encoded object; `None` for a pod that has none.

        Raise `UndecodableError` if the object is invalid.
        """
        try:
            return self.record_of(decode_cut(self._decode, data))
        except UNREADABLE as error:
            raise UndecodableError(
                f"not {self.what} as the API server describes it: {error}"
            ) from error

    def read_line(self, line: bytes) -> WatchLine:
        """Decode a line of a watch in one pass; raise one of `UNREADABLE` if it is invalid."""
        return decode_cut(self._decode_line, line)

    def record_of(self, found: MetadataOnly[Any]) -> RecordT | None:
        """Return the record of a decoded object; `None` for a pod that has none.

        Raise `msgspec.MsgspecError` if the object is invalid or has no UID.
        """
        if not found.metadata.uid:
            raise msgspec.ValidationError("metadata.uid is empty")
        return self.record(found)

    def labels_of(self, labels: Mapping[str, str]) -> dict[str, str]:
        """Return the chosen labels of an object; objects with equal labels share one dictionary."""
        wanted = labels if self._all_labels else [name for name in self._labels if name in labels]
        return self._shared_labels.of({intern(name): intern(labels[name]) for name in wanted})

    def annotations_of(self, annotations: Annotations | None) -> dict[str, str] | None:
        """Return the chosen annotations; `None` if the object has none of these."""
        # Most objects have no chosen annotations, so they get no empty dictionary either.
        chosen = self._annotations.of(annotations) if annotations else None
        return self._shared_annotations.of(chosen) if chosen else None


class PodReader(ObjectReader[PodRecord]):
    """Reads pods that have a node, with their requests for the GPU resources of the settings."""

    what = "a pod"

    def __init__(
        self,
        *,
        cluster: str,
        labels: Iterable[str],
        gpu_resource_prefixes: Iterable[str],
        annotations: Iterable[str] = (),
    ) -> None:
        super().__init__(
            ApiPod,
            cluster=cluster,
            labels=labels,
            annotations=annotations,
            fixed_annotations=PodAnnotations,
        )
        self._containers = ContainerReader(
            nanoseconds=self.nanoseconds, gpu_resource_prefixes=gpu_resource_prefixes
        )

    @override
    def record(self, found: ApiPod[PodAnnotations]) -> PodRecord | None:
        meta, spec, status = found.metadata, found.spec or _NO_SPEC, found.status or _NO_STATUS
        if not spec.node_name:
            return None
        labels, notes = meta.labels or {}, meta.annotations
        created_time_ns = self.nanoseconds(meta.creation_timestamp) or 0
        owner_kind, owner_name = known_owner(
            meta.owner_references, labels, created_time_ns=created_time_ns
        )
        containers = self._containers.read(spec, status)
        scheduled = pod_scheduled(status)
        requested = requested_of(spec)
        # A container of a pod that is not over may be restarted, so the end of its last container
        # is not the end of the pod.
        is_over = status.phase in _OVER or meta.deletion_timestamp is not None
        return PodRecord(
            cluster=self.cluster,
            uid=meta.uid,
            namespace=intern(meta.namespace),
            name=meta.name,
            node=intern(spec.node_name),
            owner_kind=owner_kind and intern(owner_kind),
            owner_name=owner_name and intern(owner_name),
            labels=self.labels_of(labels),
            annotations=self.annotations_of(notes),
            containers=containers,
            config_hash=mirrored_hash(notes, spec, meta.owner_references) if notes else None,
            phase=intern(status.phase or "Unknown"),
            qos_class=intern(status.qos_class) if status.qos_class else None,
            requested_cpu_millicores=same(requested and requested.cpu_millicores),
            requested_memory_bytes=same(requested and requested.memory_bytes),
            priority=same(spec.priority),
            priority_class=intern(spec.priority_class_name) if spec.priority_class_name else None,
            created_time_ns=created_time_ns,
            scheduled_time_ns=self.nanoseconds(scheduled.last_transition_time)
            if scheduled and scheduled.status == "True"
            else None,
            started_time_ns=self.nanoseconds(status.start_time),
            ended_time_ns=last_end_ns(containers) if is_over else None,
            deletion_time_ns=self.nanoseconds(meta.deletion_timestamp),
            resource_version=meta.resource_version,
        )


class PendingPodReader(ObjectReader[PendingPodRecord]):
    """Reads pods that wait for a node; pods that do not request GPUs have no record.

    Claims count as requests for GPUs, because a pod does not contain the kind of their devices. The
    selector excludes pods with a node. They are not excluded here, because a server may send the
    node in the event that ends the waiting.
    """

    what = "a pod"

    def __init__(
        self, *, cluster: str, labels: Iterable[str], gpu_resource_prefixes: Iterable[str]
    ) -> None:
        super().__init__(ApiPod, cluster=cluster, labels=labels, fixed_annotations=QueueAnnotations)
        self._containers = ContainerReader(
            nanoseconds=self.nanoseconds, gpu_resource_prefixes=gpu_resource_prefixes
        )

    @override
    def record(self, found: ApiPod[QueueAnnotations]) -> PendingPodRecord | None:
        meta, spec, status = found.metadata, found.spec or _NO_SPEC, found.status or _NO_STATUS
        containers = [
            PendingContainer(name=each.name, kind=each.kind, requested=each.requested)
            for each in self._containers.read(spec, status)
            if each.requested and (each.requested.resources or each.requested.claims)
        ]
        if not containers:
            return None
        labels = meta.labels or {}
        created_time_ns = self.nanoseconds(meta.creation_timestamp) or 0
        owner_kind, owner_name = known_owner(
            meta.owner_references, labels, created_time_ns=created_time_ns
        )
        refusal = pod_scheduled(status) or _NO_CONDITION
        requested = requested_of(spec)
        return PendingPodRecord(
            cluster=self.cluster,
            uid=meta.uid,
            namespace=intern(meta.namespace),
            name=meta.name,
            owner_kind=owner_kind and intern(owner_kind),
            owner_name=owner_name and intern(owner_name),
            labels=self.labels_of(labels),
            containers=containers,
            requested_cpu_millicores=same(requested and requested.cpu_millicores),
            requested_memory_bytes=same(requested and requested.memory_bytes),
            priority=same(spec.priority),
            priority_class=intern(spec.priority_class_name) if spec.priority_class_name else None,
            queue=queue_of(labels, meta.annotations),
            scheduling_gates=[gate.name for gate in spec.scheduling_gates or ()] or None,
            reason=refusal.reason or None,
            message=(refusal.message or "")[:MAX_SENTENCE_LENGTH] or None,
            created_time_ns=created_time_ns,
            deletion_time_ns=self.nanoseconds(meta.deletion_timestamp),
            resource_version=meta.resource_version,
        )


class NodeReader(ObjectReader[NodeRecord]):
    """Reads nodes: what they have for pods, cordons, and facts in labels, such as the pool."""

    what = "a node"

    def __init__(
        self,
        *,
        cluster: str,
        labels: Iterable[str] = (),
        gpu_resource_prefixes: Iterable[str] = (),
        pool_labels: Iterable[str] = (),
        instance_type_labels: Iterable[str] = (),
        zone_labels: Iterable[str] = (),
        region_labels: Iterable[str] = (),
        capacity_type_labels: Iterable[str] = (),
    ) -> None:
        """Take the labels to publish, and for each fact the labels that contain it.

        Labels that are given for a fact are tried before the known labels of providers.
        """
        super().__init__(ApiNode, cluster=cluster, labels=labels)
        self._gpu_resource_prefixes = tuple(gpu_resource_prefixes)
        self._pool_labels = (*pool_labels, *POOL_LABELS)
        self._instance_type_labels = (*instance_type_labels, *INSTANCE_TYPE_LABELS)
        self._zone_labels = (*zone_labels, *ZONE_LABELS)
        self._region_labels = (*region_labels, *REGION_LABELS)
        self._capacity_type_labels = tuple(capacity_type_labels)

    @override
    def record(self, found: ApiNode[Annotations]) -> NodeRecord:
        meta = found.metadata
        labels = meta.labels or {}
        allocatable = (found.status or _NO_NODE_STATUS).allocatable
        is_known = allocatable is not None and {"cpu", "memory"} <= allocatable.keys()
        has = amounts_of(allocatable) if is_known else None

        def one_of(names: Iterable[str]) -> str | None:
            value = first_of(labels, names)
            return value and intern(value)

        capacity_type = capacity_type_of(labels, self._capacity_type_labels)
        return NodeRecord(
            cluster=self.cluster,
            uid=meta.uid,
            # Checked against the rule for node names, because it decides the record's partition.
            name=intern(msgspec.convert(meta.name, NodeName)),
            pool=one_of(self._pool_labels),
            instance_type=one_of(self._instance_type_labels),
            zone=one_of(self._zone_labels),
            region=one_of(self._region_labels),
            capacity_type=capacity_type and intern(capacity_type),
            allocatable_cpu_millicores=has and has.cpu_millicores,
            allocatable_memory_bytes=has and has.memory_bytes,
            allocatable_resources=None
            if allocatable is None
            else {
                intern(name): parse_amount(str(quantity)) or 0
                for name, quantity in allocatable.items()
                if name.startswith(self._gpu_resource_prefixes)
            },
            unschedulable=None if found.spec is None else found.spec.unschedulable,
            labels=self.labels_of(labels),
            created_time_ns=self.nanoseconds(meta.creation_timestamp) or 0,
            deletion_time_ns=self.nanoseconds(meta.deletion_timestamp),
            resource_version=meta.resource_version,
        )


class NamespaceReader(ObjectReader[NamespaceRecord]):
    """Reads namespaces."""

    what = "a namespace"

    def __init__(
        self, *, cluster: str, labels: Iterable[str] = (), annotations: Iterable[str] = ()
    ) -> None:
        super().__init__(MetadataOnly, cluster=cluster, labels=labels, annotations=annotations)

    @override
    def record(self, found: MetadataOnly[Annotations]) -> NamespaceRecord:
        meta = found.metadata
        return NamespaceRecord(
            cluster=self.cluster,
            uid=meta.uid,
            name=intern(msgspec.convert(meta.name, Label)),
            labels=self.labels_of(meta.labels or {}),
            annotations=self.annotations_of(meta.annotations),
            created_time_ns=self.nanoseconds(meta.creation_timestamp) or 0,
            deletion_time_ns=self.nanoseconds(meta.deletion_timestamp),
            resource_version=meta.resource_version,
        )


# Truncates JSON that is nested deeper than a decoder can follow, below all fields that are read.
#
# A decoder also parses the fields that it skips, and fails at Python's recursion limit. The API
# server stores about 10,000 levels (in `managedFields`, which any tenant may write). The fields
# that are read here have at most ten levels.

MAX_DEPTH: Final = 64
# A string (brackets in it do not count), a bracket, or the start of an unterminated string. The
# quantifiers are possessive, so that input is never scanned twice.
_TOKEN: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[{]|[\]}]|"', re.DOTALL)
_OPENING: Final = b"[{"
_CLOSING: Final = b"]}"


def decode_cut(decode: Callable[[bytes | Raw], T], data: bytes | Raw) -> T:
    """Return the result of `decode`; if the JSON is nested too deeply, truncate it first."""
    try:
        return decode(data)
    except RecursionError:
        return decode(cut(bytes(data)))


def cut(data: bytes, *, max_depth: int = MAX_DEPTH) -> bytes:
    """Return JSON with `null` for each array or object that is deeper than `max_depth`.

    Invalid JSON stays invalid.
    """
    parts = []
    kept_to = depth = 0
    for token in _TOKEN.finditer(data):
        bracket = data[token.start()]
        if bracket in _OPENING:
            depth += 1
            if depth == max_depth + 1:
                parts.append(data[kept_to : token.start()])
        elif bracket in _CLOSING:
            if depth == max_depth + 1:
                parts.append(b"null")
                kept_to = token.end()
            depth -= 1
        elif token.end() - token.start() == 1:
            break
    return b"".join(parts) if depth > max_depth else b"".join([*parts, data[kept_to:]])


_decode_identity: Final = msgspec.json.Decoder(IdentityOnly).decode


def identity_of(data: bytes | Raw) -> IdentityMeta:
    """Return the identity of an object that cannot be read; empty if it is unreadable too."""
    try:
        return decode_cut(_decode_identity, data).metadata
    except UNREADABLE:
        return IdentityMeta()
