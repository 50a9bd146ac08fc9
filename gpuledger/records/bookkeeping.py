"""Records that components write about their own work: progress, watermarks and dead letters.

`gpuledger.progress.v1` is compacted and keyed by node; a join that takes over a node reads it to
continue after its predecessor. `gpuledger.watermarks.v1` tells readers how far a topic is complete.
This module also holds the records of `gpuledger.dead-letters.v1` and `gpuledger.replay.v1`.
"""

from typing import Annotated

from gpuledger.records.base import (
    ArrayRecord,
    BaseRecord,
    BootId,
    ClusterName,
    Natural,
    NodeName,
    Seq,
)
from gpuledger.records.bounds import (
    MAX_BOOTS,
    MAX_UNRESPONSIVE_NODES,
    Base64,
    Sentence,
    Word,
    at_most,
)
from gpuledger.records.events import GpuEvent


class BootProgress(BaseRecord, frozen=True, kw_only=True):
    """The last attributed sample of an earlier boot of a node."""

    boot_id: BootId
    """The kernel's id of the boot."""
    seq: Seq
    """Number of the boot's last attributed sample."""
    begun_time_ns: Natural | None = None
    """Upper bound of the time at which the boot began, as in `NodeProgress`."""
    first_booked_time_ns: Natural | None = None
    """When the boot's first sample was attributed, as in `NodeProgress`."""
    last_booked_time_ns: Natural | None = None
    """When the boot's last sample was attributed, by the worker's clock, nanoseconds since the
    epoch."""
    is_single: bool | None = None
    """True if only one sample of this boot was attributed, while samples of another boot continued.
    A boot with a single sample does not become the node's current boot."""
    time_ns: Natural | None = None
    """End of the interval that the boot's last attributed sample covers, nanoseconds since the
    epoch."""
    covered_from_time_ns: Natural | None = None
    """Start of the time that this boot covers, as in `NodeProgress`; absent if no sample of the
    boot was attributed since the current boot began."""


class NodeProgress(BaseRecord, frozen=True, kw_only=True):
    """The last attributed sample of a node; earlier samples of its boot count as attributed."""

    cluster: ClusterName
    """Cluster name, as set for its agents and podwatch; other names are unique only within it."""
    node: NodeName
    """The node's name in Kubernetes."""
    boot_id: BootId
    """The kernel's id of the node's current boot. Another boot becomes current with its second
    sample, or with its first sample if the current boot had none for two minutes."""
    seq: Seq
    """The sample's number within the boot."""
    time_ns: Natural
    """End of the interval that the sample covers, nanoseconds since the epoch."""
    offset: Natural
    """The highest offset of the node's samples that were read, in its partition of
    `gpuledger.samples.v1`; also of samples that were not attributed, such as duplicates."""
    topic_id: Word | None = None
    """The id of the topic that `offset` belongs to, which changes if the topic is deleted and
    recreated; absent if Kafka has no topic ids."""
    begun_time_ns: Natural | None = None
    """Latest time at which the boot can have begun, nanoseconds since the epoch. It is computed
    from the `seq` of attributed samples and the earlier of two times: the record's timestamp and
    the worker's clock. A sample with a `seq` that is too high for this time is rejected; if the
    time is absent, no sample is."""
    first_booked_time_ns: Natural | None = None
    """When the boot's first sample was attributed, by the worker's clock, nanoseconds since the
    epoch. If there are too many boots, the boots that were attributed longest are kept."""
    single_time_ns: Natural | None = None
    """If the last attributed sample is the only one of its boot: the end of the interval that it
    covers, nanoseconds since the epoch."""
    covered_from_time_ns: Natural | None = None
    """Start of the time that the current boot covers up to `time_ns`, nanoseconds since the epoch.
    Samples of other boots within this time are not attributed, because two agents write them."""
    boots_before: Annotated[list[BootProgress], at_most(MAX_BOOTS)] | None = None
    """Earlier boots: first the newest ones, then the boots that were attributed longest; absent if
    none is known."""


class UnresponsiveNode(ArrayRecord, frozen=True, kw_only=True):
    """A node that has sent nothing for a long time, so that watermarks no longer wait for it."""

    node: NodeName
    """The node's name in Kubernetes."""
    since_time_ns: Natural
    """End of the interval of the node's last sample, nanoseconds since the epoch. Later samples of
    the node may still arrive."""


class Watermark(BaseRecord, frozen=True, kw_only=True):
    """The time up to which a partition of a component's topic has all records.

    A reader that has read the partition up to `next_offset` has all records with times up to
    `complete_until_ns`, except records that are late and those of unresponsive nodes.
    """

    component: Word
    """The component that writes the topic: `join`, `podwatch`, `rows` or `store`."""
    cluster: ClusterName
    """The Kubernetes cluster whose nodes the watermark covers."""
    partition: Natural
    """The partition that the watermark covers; its own partition has the same number."""
    complete_until_ns: Natural
    """The time up to which no more records will come, nanoseconds since the epoch. For the join:
    event time, from its samples. For podwatch: the time by its own clock up to which it had seen
    everything that is in the topic."""
    topic: Word
    """The topic that the watermark covers."""
    next_offset: Natural
    """The first offset after the records that the watermark covers."""
    publisher: Word
    """The component instance that published the watermark: client id and host name."""
    node_count: Natural | None = None
    """Number of nodes seen, including unresponsive ones; absent if nodes are not tracked."""
    unresponsive_count: Natural | None = None
    """Number of unresponsive nodes; absent if there are none."""
    unresponsive: Annotated[list[UnresponsiveNode], at_most(MAX_UNRESPONSIVE_NODES)] | None = None
    """The nodes that became unresponsive most recently; absent if there are none."""


class DeadLetter(BaseRecord, frozen=True, kw_only=True):
    """A record that a consumer could not use, kept for inspection and replay."""

    topic: Word
    """The topic from which the record was read."""
    partition: Natural
    """The record's partition in that topic."""
    offset: Natural
    """The record's offset in that partition; the first offset if there are several records."""
    consumer: Sentence
    """The consumer group that could not use the record."""
    reason: Word
    """The reason as one word: `undecodable`, `unreadable`, `invalid`, …"""
    detail: Sentence
    """The reason as a sentence that names the field and the value."""
    time_ns: Natural
    """When the dead-letter record was written, nanoseconds since the epoch."""
    # Arbitrary bytes, which JSON cannot hold as they are.
    key_base64: Base64 | None = None
    """The record's key; absent if it had none."""
    value_base64: Base64 | None = None
    """The record's value, unchanged; absent if it had none."""
    last_offset: Natural | None = None
    """Offset of the last record, if the dead-letter record is about all records of a batch that
    cannot be unpacked; absent if it is about one record."""


class ReplayedEvent(BaseRecord, frozen=True, kw_only=True):
    """An event that one consumer rejected and that an operator resends to it."""

    consumer: Sentence
    """The consumer group that rejected it. Every other group skips the record."""
    partition: Natural
    """The event's partition of `gpuledger.events.v1`."""
    offset: Natural
    """The event's offset in that partition."""
    event: GpuEvent
    """The event itself."""
