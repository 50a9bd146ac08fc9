"""The table of topics: their records, keys, partitioning and retention.

This module holds the topics' names and configurations, and the partitioning by node.
`gpuledger.bus` creates topics on a broker; the contract for people is `docs/asyncapi.yaml`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, Final

from typing_extensions import override

from gpuledger.errors import TopicsError
from gpuledger.ledger.rows import EntryRow
from gpuledger.records import (
    AttributedIncident,
    DeadLetter,
    GpuEvent,
    Incident,
    Inventory,
    NamespaceRecord,
    NodeCounters,
    NodeProgress,
    NodeReadings,
    NodeRecord,
    NodeSample,
    PendingPodRecord,
    PodRecord,
    ProcessRecord,
    ReplayedEvent,
    Watermark,
)

DEFAULT_PARTITIONS: Final = 12
MAX_MESSAGE_BYTES: Final = 1_048_588
"""Kafka's `max.message.bytes` of every topic, which is Kafka's default: the size of a compressed
batch. The same limit applies to the uncompressed content."""
_NODE: Final = "cluster/node"
"""The key of records from a node or about one (`gpuledger.keys`)."""
_HOUR_MS: Final = 3_600_000
_DAY_MS: Final = 24 * _HOUR_MS
# For objects of the Kubernetes API. Every version outlives the samples that it describes, so that a
# replay gives the same result as the first run. Tombstones remain a day, for readers that are late.
_OF_API_OBJECTS: Final = {
    "min.compaction.lag.ms": str(6 * _HOUR_MS),
    "delete.retention.ms": str(_DAY_MS),
    "segment.ms": str(_HOUR_MS),
}
# For topics that are written often, where only the last record of each key is used: small segments
# are compacted early.
_OF_LAST_STATES: Final = {
    "segment.ms": str(_HOUR_MS // 6),
    "segment.bytes": str(16 * 2**20),
    "min.cleanable.dirty.ratio": "0.1",
    "delete.retention.ms": str(_DAY_MS),
}


@dataclass(frozen=True, kw_only=True)
class Topic:
    """One topic: its record, key, partitioner and configuration."""

    name: str
    """The topic's name, which ends in a version. A change of the record that old readers cannot
    decode requires a new version."""
    record: type
    """The type of its records."""
    key: str
    """The record's field that is the Kafka key, with a dot if it is nested; several fields are
    separated by slashes, as in the key."""
    partitioner: str = "node"
    """How a record's partition is chosen.

    - `node`: murmur2 of the node key (`<cluster>/<node>`), which is Kafka's default partitioner for
      that key, whatever the record's own key is.
    - `same`: the number of the partition that the record is about, on a topic placed by node.
    - `source`: the partition number of the record that it is about, modulo the number of
      partitions.
    - `none`: one partition, which every reader reads as a whole.
    """
    partitions: int = DEFAULT_PARTITIONS
    """Default number of partitions. All topics placed by node have the same number, which never
    changes. Readers and writers query the brokers for the actual number."""
    cleanup_policy: str = "delete"
    """Kafka's `cleanup.policy`."""
    retention_ms: int | None = None
    """Kafka's `retention.ms`; absent if only compaction removes records."""
    min_insync_replicas: int = 2
    """Kafka's `min.insync.replicas`, on clusters with at least three replicas."""
    extra: dict[str, str] = field(default_factory=dict)
    """Additional configuration of the topic."""

    @cached_property
    def key_of(self) -> Callable[[Any], str]:
        """The function that returns a record's key; only for keys of several fields."""
        fields_of = attrgetter(*self.key.split("/"))
        return lambda record: "/".join(fields_of(record))

    @property
    def is_placed_by_node(self) -> bool:
        """Whether the partitioner is `node` or `same`, so that partition numbers agree.

        All topics with these partitioners have the same number of partitions.
        """
        return self.partitioner in ("node", "same")

    def config(self, *, replication_factor: int) -> dict[str, str]:
        """Return the Kafka configuration of the topic on a cluster with that many replicas."""
        in_sync = min(self.min_insync_replicas, max(1, replication_factor - 1))
        made = {
            "cleanup.policy": self.cleanup_policy,
            "min.insync.replicas": str(in_sync),
            "message.timestamp.type": "CreateTime",
            # Brokers with another default would recompress records that were compressed with zstd,
            # and consumers reject any other compression.
            "compression.type": "producer",
            "max.message.bytes": str(MAX_MESSAGE_BYTES),
            # By default, Kafka 4 rejects batches with timestamps more than an hour ahead of its
            # clock. It would reject all batches of a node whose clock is that far ahead. A limit of
            # a day delays retention by at most a day.
            "message.timestamp.after.max.ms": str(_DAY_MS),
        }
        if self.retention_ms is not None:
            made["retention.ms"] = str(self.retention_ms)
        return made | self.extra


OWN_PREFIX: Final = "gpuledger"
"""Prefix of the names in an installation without its own prefix."""


class Topics(Collection[Topic]):
    """The table of topics of one installation, all with the same prefix.

    Built when a program starts, from `kafka.topic_prefix`; several installations on one Kafka have
    different prefixes. The bus holds it, and code that names topics gets it as an argument.
    """

    def __init__(self, prefix: str = OWN_PREFIX) -> None:
        """Store the prefix, which `KafkaSettings` has validated."""
        self.prefix = prefix
        self.samples = Topic(
            name=f"{prefix}.samples.v1", record=NodeSample, key=_NODE, retention_ms=6 * _HOUR_MS
        )
        self.readings = Topic(
            name=f"{prefix}.readings.v1", record=NodeReadings, key=_NODE, retention_ms=6 * _HOUR_MS
        )
        self.processes = Topic(
            name=f"{prefix}.processes.v1", record=ProcessRecord, key=_NODE, retention_ms=_DAY_MS
        )
        self.incidents = Topic(
            name=f"{prefix}.incidents.v1", record=Incident, key=_NODE, retention_ms=7 * _DAY_MS
        )
        self.inventory = Topic(
            name=f"{prefix}.inventory.v1",
            record=Inventory,
            key=_NODE,
            cleanup_policy="compact",
            # Every version outlives the samples of its time; tombstones remain for readers that are
            # a day behind.
            extra={
                "min.compaction.lag.ms": str(6 * _HOUR_MS),
                "delete.retention.ms": str(_DAY_MS),
                "segment.ms": str(_DAY_MS),
            },
        )
        self.pods = Topic(
            name=f"{prefix}.pods.v1",
            record=PodRecord,
            key="cluster/uid",
            cleanup_policy="compact",
            extra=_OF_API_OBJECTS,
        )
        self.pending_pods = Topic(
            name=f"{prefix}.pending-pods.v1",
            record=PendingPodRecord,
            key="cluster/uid",
            # These pods have no node that could determine a partition.
            partitioner="none",
            partitions=1,
            cleanup_policy="compact",
            extra=_OF_API_OBJECTS,
        )
        self.nodes = Topic(
            name=f"{prefix}.nodes.v1",
            record=NodeRecord,
            key="cluster/name",
            cleanup_policy="compact",
            extra=_OF_API_OBJECTS,
        )
        self.namespaces = Topic(
            name=f"{prefix}.namespaces.v1",
            record=NamespaceRecord,
            key="cluster/name",
            # A namespace's pods may be on any node, so each worker needs all namespaces.
            partitioner="none",
            partitions=1,
            cleanup_policy="compact",
            extra=_OF_API_OBJECTS,
        )
        self.events = Topic(
            name=f"{prefix}.events.v1", record=GpuEvent, key=_NODE, retention_ms=_DAY_MS
        )
        self.progress = Topic(
            name=f"{prefix}.progress.v1",
            record=NodeProgress,
            key=_NODE,
            cleanup_policy="compact",
            # One record per node and commit; read when a partition is assigned.
            extra=_OF_LAST_STATES,
        )
        self.watermarks = Topic(
            name=f"{prefix}.watermarks.v1",
            record=Watermark,
            key="component/cluster/partition",
            # Readers find a partition's watermarks in the partition with the same number.
            partitioner="same",
            cleanup_policy="compact",
            # One record per partition every few seconds.
            extra=_OF_LAST_STATES,
        )
        self.attributed_incidents = Topic(
            name=f"{prefix}.attributed-incidents.v1",
            record=AttributedIncident,
            key="incident.cluster/incident.node",
            retention_ms=7 * _DAY_MS,
        )
        self.rows = Topic(
            name=f"{prefix}.rows.v1", record=EntryRow, key=_NODE, retention_ms=_DAY_MS
        )
        self.counters = Topic(
            name=f"{prefix}.counters.v1",
            record=NodeCounters,
            key="group/cluster/node",
            cleanup_policy="compact",
            # One record per node, group and interval; read when a partition is taken over.
            extra=_OF_LAST_STATES,
        )
        self.dead_letters = Topic(
            name=f"{prefix}.dead-letters.v1",
            record=DeadLetter,
            key="topic",
            partitioner="source",
            partitions=1,
            # Kept as long as the longest-lived record that can be rejected. A dead-letter record
            # contains the whole rejected record, and writers of ticks can cause rejections, so the
            # size is limited as well. Brokers remove whole segments, so segments are small.
            retention_ms=7 * _DAY_MS,
            extra={"retention.bytes": str(2**30), "segment.bytes": str(128 * 2**20)},
        )
        self.replay = Topic(
            name=f"{prefix}.replay.v1",
            record=ReplayedEvent,
            key="event.cluster/event.node",
            # Kept as long as the dead-letter records, so that a sink may be down for as long.
            retention_ms=7 * _DAY_MS,
        )
        self._all = (
            self.samples,
            self.readings,
            self.processes,
            self.incidents,
            self.inventory,
            self.pods,
            self.pending_pods,
            self.nodes,
            self.namespaces,
            self.events,
            self.progress,
            self.watermarks,
            self.attributed_incidents,
            self.rows,
            self.counters,
            self.dead_letters,
            self.replay,
        )
        self.by_name: Mapping[str, Topic] = {topic.name: topic for topic in self._all}

    @override
    def __iter__(self) -> Iterator[Topic]:
        """Yield every topic, in the order of the documentation."""
        return iter(self._all)

    @override
    def __contains__(self, topic: object) -> bool:
        """Return whether a topic is in this table."""
        return topic in self._all

    @override
    def __len__(self) -> int:
        """Return the number of topics."""
        return len(self._all)

    def group(self, name: str) -> str:
        """Return the consumer group for a name: `gpuledger-…` with this installation's prefix.

        A name that does not begin with `gpuledger-` is the user's choice and is returned unchanged.
        The same applies to transactional ids, which begin with the group's name.
        """
        if not name.startswith(f"{OWN_PREFIX}-"):
            return name
        return self.prefix + name.removeprefix(OWN_PREFIX)


def replay_group(group: str) -> str:
    """Return the consumer group that a sink with this group uses to read the replay topic."""
    return f"{group}-replay"


def agreed_partitions(counts: Mapping[str, int]) -> int:
    """Return the number of partitions that all these topics have; they are placed by node.

    `counts` has the number by topic name. Raises `TopicsError` if the numbers differ, because a
    node's records would then be in partitions with different numbers.
    """
    if len(set(counts.values())) != 1:
        raise TopicsError(
            "topics placed by node must have the same number of partitions, found"
            f" {', '.join(f'{name} {count}' for name, count in counts.items())};"
            " run `gpuledger topics check` for the expected numbers"
        )
    return next(iter(counts.values()))


def refuse_added_partitions(topic: str, *, before: int | None, found: int, group: str) -> None:
    """Raise `TopicsError` if partitions were added to a topic since the group committed offsets.

    `before` is the number of partitions at the commit; `None` if it is unknown. With another
    number, a node's records are in another partition than the states that belong to them.
    """
    if before not in (None, found):
        raise TopicsError(
            f"{topic} has {found} partitions, but had {before} when the group {group!r} read it;"
            " partitions cannot be added: recreate all topics, or set another kafka.topic_prefix in"
            " all components"
        )


def partition_of_node(key: str, *, partitions: int) -> int:
    """Return the partition of a node's records, by the node's key (`gpuledger.keys.node_key`).

    Kafka's default partitioner returns the same partition for that key.
    """
    return (murmur2(key.encode()) & 0x7FFFFFFF) % partitions


def murmur2(data: bytes) -> int:
    """Return the hash of Kafka's `Utils.murmur2`, as an unsigned 32-bit number."""
    mask, prime = 0xFFFFFFFF, 0x5BD1E995
    hashed = 0x9747B28C ^ len(data)
    whole = len(data) & ~3
    for start in range(0, whole, 4):
        word = int.from_bytes(data[start : start + 4], "little") * prime & mask
        hashed = (hashed * prime & mask) ^ ((word ^ word >> 24) * prime & mask)
    if tail := data[whole:]:
        hashed = (hashed ^ int.from_bytes(tail, "little")) * prime & mask
    hashed = (hashed ^ hashed >> 13) * prime & mask
    return hashed ^ hashed >> 15
