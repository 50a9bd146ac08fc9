"""The kinds of objects that podwatch watches, and their differences.

These are pods with a node, pods that wait for a node, nodes, and namespaces.

Pure, apart from their metrics. All other code of podwatch works for any kind and takes an
`ObjectKind` of this module.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, cast

from msgspec.structs import replace

from gpuledger.codec import Decoder, decoder_of
from gpuledger.completeness import PODWATCH
from gpuledger.records import NamespaceRecord, NodeRecord, PendingPodRecord, PodRecord
from gpuledger.topics import Topic, Topics
from gpuledger_enricher.podwatch.api import JSON
from gpuledger_enricher.podwatch.decode import (
    NamespaceReader,
    NodeReader,
    ObjectReader,
    PendingPodReader,
    PodReader,
)
from gpuledger_enricher.podwatch.pod_metrics import measure_pending_pods
from gpuledger_enricher.podwatch.pod_settings import PodwatchSettings
from gpuledger_enricher.watched_records import PodSharing, RecordT, with_known_version


class Identified(Protocol):
    """The UID and name of an object: its record, or the readable part of an invalid object."""

    @property
    def uid(self) -> str:
        """The object's UID."""

    @property
    def name(self) -> str:
        """The object's name."""


@dataclass(frozen=True, kw_only=True)
class ObjectKind(Generic[RecordT]):
    """A kind of object in the API server, and how it is read and published."""

    name: str
    """Singular name: `pod`."""
    plural: str
    """Plural name: `pods`."""
    resource: str = ""
    """Name in the server's paths and roles, if it is not the plural name."""
    record: type[RecordT]
    """The type of the published record."""
    topic: Callable[[Topics], Topic]
    """Returns the topic of the records."""
    node_of: Callable[[RecordT], str]
    """Returns the node whose key determines a record's partition; empty if all share a partition.
    """
    is_named: bool = True
    """Whether an object is identified by its name in the cluster, so that a recreated object counts
    as the same one. Otherwise its UID identifies it."""
    reader: Callable[[PodwatchSettings], ObjectReader[RecordT]]
    """Returns a reader of the kind's objects."""
    bare: Callable[[RecordT], RecordT]
    """Returns a copy without labels, annotations and containers, for a record that is too large for
    a message."""
    as_known: Callable[[RecordT, RecordT], RecordT] = with_known_version
    """Takes a record and the known record of its object, and returns the record with the known
    values of fields that change without being published."""
    sharing: Callable[[], Callable[[RecordT], RecordT]] = lambda: lambda record: record
    """Returns a function that makes records read from the topic share their equal parts."""
    selector: Mapping[str, str] = field(default_factory=dict)
    """Parameters of lists and watches that select objects."""
    is_metadata_only: bool = True
    """Whether spec and status are not needed, so that only metadata is requested."""
    measure: Callable[[Iterable[RecordT]], None] = lambda _: None
    """Sets the metrics of this kind only, given all objects that exist."""
    watermark_component: str | None = None
    """Component in the watermarks of the topic, unique to this kind; `None` without watermarks."""

    def identity_of(self, found: Identified) -> str:
        """Return the name or UID that identifies an object within its kind and cluster."""
        return found.name if self.is_named else found.uid

    @property
    def path(self) -> str:
        """Path of the API for lists and watches."""
        return f"/api/v1/{self.resource or self.plural}"

    def decoder(self, topics: Topics) -> Decoder[RecordT]:
        """Return the decoder of the records in the kind's topic."""
        decoder: Decoder[RecordT] = decoder_of(
            self.topic(topics).name, cast("Hashable", self.record)
        )
        return decoder

    def accept(self, *, as_list: bool) -> str:
        """Return the `Accept` header for a list or a watch.

        Servers that cannot return only metadata return whole objects, which can be decoded, too.
        """
        if not self.is_metadata_only:
            return JSON
        form = "PartialObjectMetadataList" if as_list else "PartialObjectMetadata"
        return f"application/json;as={form};g=meta.k8s.io;v=v1,{JSON}"


POD: Final = ObjectKind(
    name="pod",
    plural="pods",
    record=PodRecord,
    topic=lambda topics: topics.pods,
    node_of=lambda pod: pod.node,
    is_named=False,
    reader=lambda settings: PodReader(
        cluster=settings.cluster,
        labels=settings.labels,
        annotations=settings.annotations,
        gpu_resource_prefixes=settings.gpu_resource_prefixes,
    ),
    bare=lambda pod: replace(pod, labels={}, annotations=None, containers=[]),
    sharing=lambda: PodSharing().share,
    # A pod without a node does not use a GPU. The server leaves such pods out, and sends a pod as
    # ADDED when it is bound to a node.
    selector={"fieldSelector": "spec.nodeName!="},
    is_metadata_only=False,
    watermark_component=PODWATCH,
)
PENDING_POD: Final = ObjectKind(
    name="pending_pod",
    plural="pending_pods",
    resource="pods",
    record=PendingPodRecord,
    topic=lambda topics: topics.pending_pods,
    node_of=lambda _: "",
    is_named=False,
    reader=lambda settings: PendingPodReader(
        cluster=settings.cluster,
        labels=settings.labels,
        gpu_resource_prefixes=settings.gpu_resource_prefixes,
    ),
    bare=lambda pod: replace(pod, labels={}, containers=[], scheduling_gates=None, message=None),
    # The message has numbers of nodes, which change with every attempt of the scheduler.
    as_known=lambda pod, known: replace(
        pod, resource_version=known.resource_version, message=known.message
    ),
    # The server sends a pod as DELETED when it is bound to a node, ends, or is deleted.
    selector={"fieldSelector": "spec.nodeName=,status.phase=Pending"},
    is_metadata_only=False,
    measure=measure_pending_pods,
)
NODE: Final = ObjectKind(
    name="node",
    plural="nodes",
    record=NodeRecord,
    topic=lambda topics: topics.nodes,
    node_of=lambda node: node.name,
    reader=lambda settings: NodeReader(
        cluster=settings.cluster,
        labels=settings.node_labels,
        gpu_resource_prefixes=settings.gpu_resource_prefixes,
        pool_labels=settings.node_pool_labels,
        instance_type_labels=settings.node_instance_type_labels,
        zone_labels=settings.node_zone_labels,
        region_labels=settings.node_region_labels,
        capacity_type_labels=settings.node_capacity_type_labels,
    ),
    bare=lambda node: replace(node, labels={}, allocatable_resources=None),
    is_metadata_only=False,
)
NAMESPACE: Final = ObjectKind(
    name="namespace",
    plural="namespaces",
    record=NamespaceRecord,
    topic=lambda topics: topics.namespaces,
    node_of=lambda _: "",
    reader=lambda settings: NamespaceReader(
        cluster=settings.cluster,
        labels=settings.namespace_labels,
        annotations=settings.namespace_annotations,
    ),
    bare=lambda namespace: replace(namespace, labels={}, annotations=None),
)
KINDS: Final[tuple[ObjectKind[Any], ...]] = (POD, PENDING_POD, NODE, NAMESPACE)
"""All kinds that are watched."""
