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
    """How far an earlier boot of a node is attributed."""

    boot_id: BootId
    """The kernel's id of the boot."""
    seq: Seq
    """Number of the boot's last attributed sample."""
    begun_time_ns: Natural | None = None
    """Upper bound of the time at which the boot began, as in `NodeProgress`."""
    first_booked_time_ns: Natural | None = None
    """When the boot's first sample was attributed, as in `NodeProgress`."""
    last_booked_time_ns: Natural | None = None
    """When its last sample was attributed, by the worker's clock, nanoseconds since the epoch."""
    is_single: bool | None = None
    """True if only one sample of this boot was attributed, while another boot continued. A boot
    that does not continue is not taken for the node's current one."""


class NodeProgress(BaseRecord, frozen=True, kw_only=True):
    """The last attributed sample of a node; earlier ones of its boot count as attributed."""

    cluster: ClusterName
    """Cluster name, as set for its agents and podwatch; other names are unique only within it."""
    node: NodeName
    """The node's name in Kubernetes."""
    boot_id: BootId
    """The kernel's id of the boot: the newest one that has continued."""
    seq: Seq
    """The sample's number within the boot."""
    time_ns: Natural
    """End of the interval that the sample covers, nanoseconds since the epoch."""
    offset: Natural
    """The sample's offset in its partition of `gpuledger.samples.v1`."""
    begun_time_ns: Natural | None = None
    """Upper bound of the time at which the boot began, nanoseconds since the epoch: from the `seq`
    of attributed samples and the earlier of two clocks, the records' and the worker's. It serves to
    detect a `seq` that runs ahead; if absent, none is detected."""
    first_booked_time_ns: Natural | None = None
    """When the boot's first sample was attributed, by the worker's clock, nanoseconds since the
    epoch. If there are too many boots, those attributed longest are kept."""
    single_time_ns: Natural | None = None
    """If the last attributed sample is the only one of its boot: the end of the interval that it
    covers, nanoseconds since the epoch."""
    boots_before: Annotated[list[BootProgress], at_most(MAX_BOOTS)] | None = None
    """A few earlier boots, newest first, then those that were attributed longest; absent if none is
    known."""


class UnresponsiveNode(ArrayRecord, frozen=True, kw_only=True):
    """A node that a watermark no longer waits for, because it has sent nothing for long."""

    node: NodeName
    """The node's name in Kubernetes."""
    since_time_ns: Natural
    """End of the interval of its last sample, nanoseconds since the epoch; later records may still
    come."""


class Watermark(BaseRecord, frozen=True, kw_only=True):
    """How far a partition of a component's topic is complete, once it is read up to an offset.

    A reader that has read the partition up to `next_offset` has all records with times up to
    `complete_until_ns`, except records that are late and those of unresponsive nodes.
    """

    component: Word
    """The component that writes the topic: `join`, `podwatch`, `rows` or `store`."""
    cluster: ClusterName
    """The Kubernetes cluster of the nodes that it covers."""
    partition: Natural
    """The partition that it covers; the watermark itself is in the partition of the same number."""
    complete_until_ns: Natural
    """The time up to which no more records will come, nanoseconds since the epoch. For the join:
    event time, from its samples. For podwatch: the time by its own clock up to which it had seen
    everything that is in the topic."""
    topic: Word
    """The topic that it covers."""
    next_offset: Natural
    """The offset to which this applies: the first one after the records that it covers."""
    publisher: Word
    """The component instance that published it: client id and host name."""
    node_count: Natural | None = None
    """Number of nodes seen, including unresponsive ones; absent if nodes are not tracked."""
    unresponsive_count: Natural | None = None
    """Number of unresponsive nodes; absent if there are none."""
    unresponsive: Annotated[list[UnresponsiveNode], at_most(MAX_UNRESPONSIVE_NODES)] | None = None
    """The nodes that became unresponsive most recently; absent if there are none."""


class DeadLetter(BaseRecord, frozen=True, kw_only=True):
    """A record that a consumer could not use, kept for inspection and replay."""

    topic: Word
    """The topic from which it was read."""
    partition: Natural
    """Its partition in that topic."""
    offset: Natural
    """Its offset in that partition; if it stands for several records, the first one's."""
    consumer: Sentence
    """The consumer group that could not use it."""
    reason: Word
    """The reason as one word: `undecodable`, `unreadable`, `invalid`, …"""
    detail: Sentence
    """The reason as a sentence that names the field and the value."""
    time_ns: Natural
    """When it was written to the dead letters, nanoseconds since the epoch."""
    # Arbitrary bytes, which JSON cannot hold as they are.
    key_base64: Base64 | None = None
    """The record's key; absent if it had none."""
    value_base64: Base64 | None = None
    """The record's unchanged bytes; absent if it had none."""
    last_offset: Natural | None = None
    """Offset of the last record, if this stands for all records of a batch that cannot be unpacked;
    absent if it stands for one record."""


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
