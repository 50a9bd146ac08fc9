"""What podwatch watches: pods, nodes and namespaces, and how they differ. Pure.

Everything else of podwatch is the same for each kind, and is given one of these.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, cast

from msgspec.structs import replace

from gpuledger.codec import Decoder, decoder_of
from gpuledger.completeness import PODWATCH
from gpuledger.records import NamespaceRecord, NodeRecord, PodRecord
from gpuledger.topics import Topic, Topics
from gpuledger_enricher.podwatch.api import JSON
from gpuledger_enricher.podwatch.decode import NamespaceReader, NodeReader, ObjectReader, PodReader
from gpuledger_enricher.podwatch.pod_settings import PodwatchSettings
from gpuledger_enricher.watched_records import PodSharing, RecordT


class Identified(Protocol):
    """What names an object: its record, or what can be read of one that cannot."""

    @property
    def uid(self) -> str:
        """The object's UID."""

    @property
    def name(self) -> str:
        """The object's name."""


@dataclass(frozen=True, kw_only=True)
class ObjectKind(Generic[RecordT]):
    """A kind of object of the API server, and what becomes of it."""

    name: str
    """One of them: `pod`."""
    plural: str
    """Several of them, as in the server's paths and roles: `pods`."""
    record: type[RecordT]
    """What is published of one."""
    topic: Callable[[Topics], Topic]
    """Where that is published."""
    node_of: Callable[[RecordT], str]
    """The node by whose key a record is placed; empty where the topic has one partition."""
    is_named: bool = True
    """Whether an object is, in its cluster, what its name says, and made anew the same one again;
    else it is identified by its UID."""
    reader: Callable[[PodwatchSettings], ObjectReader[RecordT]]
    """Makes the reader of its objects."""
    bare: Callable[[RecordT], RecordT]
    """What stays of a record that is too large for a message: what names it, and no list."""
    sharing: Callable[[], Callable[[RecordT], RecordT]] = lambda: lambda record: record
    """Makes what lets records that were read from the topic hold what is equal once."""
    selector: Mapping[str, str] = field(default_factory=dict)
    """Which of them are asked for, as parameters of a list or a watch."""
    is_metadata_only: bool = True
    """Whether nothing of spec and status is read: then the server is asked for no more."""
    watermark_stage: str | None = None
    """The stage under which watermarks of its topic are published, which no other kind has; `None`
    where nobody waits for them."""

    def identity_of(self, found: Identified) -> str:
        """Return what identifies an object among those of its kind in its cluster."""
        return found.name if self.is_named else found.uid

    @property
    def path(self) -> str:
        """Where they are listed and watched."""
        return f"/api/v1/{self.plural}"

    def decoder(self, topics: Topics) -> Decoder[RecordT]:
        """Return the decoder of what is on its topic."""
        decoder: Decoder[RecordT] = decoder_of(
            self.topic(topics).name, cast("Hashable", self.record)
        )
        return decoder

    def accept(self, *, as_list: bool) -> str:
        """Return the `Accept` of a list, or of a watch.

        A server that does not know metadata alone answers with whole objects, which are read too.
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
    # A pod that waits for the scheduler uses nothing. The server leaves those pods out, and sends a
    # pod as ADDED when it is bound to its node.
    selector={"fieldSelector": "spec.nodeName!="},
    is_metadata_only=False,
    watermark_stage=PODWATCH,
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
        pool_labels=settings.node_pool_labels,
        instance_type_labels=settings.node_instance_type_labels,
        zone_labels=settings.node_zone_labels,
        region_labels=settings.node_region_labels,
        capacity_type_labels=settings.node_capacity_type_labels,
    ),
    bare=lambda node: replace(node, labels={}),
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
KINDS: Final[tuple[ObjectKind[Any], ...]] = (POD, NODE, NAMESPACE)
"""All that is watched."""
