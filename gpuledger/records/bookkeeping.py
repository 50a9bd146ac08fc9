"""What components write of their own work: how far a node is booked, and what could not be used.

Here live the records of `gpuledger.progress.v1`, a compacted topic keyed by node, which a join that
takes a node over must know of the one before, of `gpuledger.watermarks.v1`, by which readers know
how far a topic is complete, of `gpuledger.dead-letters.v1`, and of `gpuledger.replay.v1`.
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
    """How far an earlier boot of a node is booked."""

    boot_id: BootId
    """The kernel's id of the boot."""
    seq: Seq
    """The number of its last tick that was booked."""
    begun_time_ns: Natural | None = None
    """When the boot began at the latest, as in `NodeProgress`."""
    first_booked_time_ns: Natural | None = None
    """When the first of its ticks was booked, as in `NodeProgress`."""
    last_booked_time_ns: Natural | None = None
    """When the last of them was, by the worker's clock, nanoseconds since the epoch."""
    is_single: bool | None = None
    """True where one tick of it alone is booked, while another boot was going on: a boot that does
    not go on is not what its node is in."""


class NodeProgress(BaseRecord, frozen=True, kw_only=True):
    """The last tick of a node that was booked; what of a boot is not above it was booked before."""

    cluster: ClusterName
    """The Kubernetes cluster, as its agents and podwatch are told: names are unique in it alone."""
    node: NodeName
    """The node's name in Kubernetes."""
    boot_id: BootId
    """The kernel's id of the boot: the newest of those that went on."""
    seq: Seq
    """The tick's number within the boot."""
    time_ns: Natural
    """End of the interval that the tick covers, nanoseconds since the epoch."""
    offset: Natural
    """The tick's offset in its partition of `gpuledger.samples.v1`."""
    begun_time_ns: Natural | None = None
    """When the boot began at the latest, nanoseconds since the epoch: by the `seq` of booked ticks
    and the earlier of two clocks, their records' and the worker's. A `seq` that runs ahead is found
    by it; absent, none is."""
    first_booked_time_ns: Natural | None = None
    """When the first tick of the boot was booked, by the worker's clock, nanoseconds since the
    epoch: of many boots, those that have been booked for longest are kept."""
    single_time_ns: Natural | None = None
    """Where the tick that was booked last is of a boot of which no other one is: the end of what it
    covers, nanoseconds since the epoch."""
    boots_before: Annotated[list[BootProgress], at_most(MAX_BOOTS)] | None = None
    """The few boots before that one, the newest first, and those that were booked for longest;
    absent where none is known."""


class UnresponsiveNode(ArrayRecord, frozen=True, kw_only=True):
    """A node that a watermark does not wait for, as nothing has come of it for long."""

    node: NodeName
    """The node's name in Kubernetes."""
    since_time_ns: Natural
    """End of what its last tick covers, nanoseconds since the epoch: behind it anything may come
    yet."""


class Watermark(BaseRecord, frozen=True, kw_only=True):
    """How far one partition of a component's topic is complete, once it is read up to an offset.

    Whoever has read the topic's partition up to `next_offset` has all that is of a time up to
    `complete_until_ns`, but for what comes late, and but for the nodes that are unresponsive.
    """

    component: Word
    """Component that writes the topic: `join`, `podwatch`, `rows` or `store`."""
    cluster: ClusterName
    """The Kubernetes cluster whose nodes it speaks of."""
    partition: Natural
    """The partition that it speaks of, of that topic; it lies in the same partition itself."""
    complete_until_ns: Natural
    """The time up to which nothing is to come any more, nanoseconds since the epoch. Of the join:
    event time, as its ticks have it. Of podwatch: when it had seen, by its own clock, all that is
    in the topic."""
    topic: Word
    """The topic that it speaks of."""
    next_offset: Natural
    """From which offset on that holds: of the first record behind those that it speaks of."""
    publisher: Word
    """Who published it: the client id and the host's name."""
    node_count: Natural | None = None
    """How many nodes were heard of, unresponsive ones included; absent where none is followed."""
    unresponsive_count: Natural | None = None
    """How many of them are unresponsive; absent where none is."""
    unresponsive: Annotated[list[UnresponsiveNode], at_most(MAX_UNRESPONSIVE_NODES)] | None = None
    """The unresponsive ones that have been so for the shortest time; absent where none is."""


class DeadLetter(BaseRecord, frozen=True, kw_only=True):
    """A record that a consumer could not use, kept so that it can be looked at and sent again."""

    topic: Word
    """The topic from which it was read."""
    partition: Natural
    """Its partition there."""
    offset: Natural
    """Its offset there; of several records the first one's."""
    consumer: Sentence
    """The consumer group that could not use it."""
    reason: Word
    """Why, as one word: `undecodable`, `unreadable`, `invalid`, …"""
    detail: Sentence
    """Why, as a sentence that names field and value."""
    time_ns: Natural
    """When it was put aside, nanoseconds since the epoch."""
    # Bytes of anybody, which JSON could not hold as they are.
    key_base64: Base64 | None = None
    """The record's key; absent where it had none."""
    value_base64: Base64 | None = None
    """The record's bytes, unchanged; absent where it had none."""
    last_offset: Natural | None = None
    """The last one's offset, where the letter stands for all records of a batch that cannot be
    unpacked; absent where it stands for one record."""


class ReplayedEvent(BaseRecord, frozen=True, kw_only=True):
    """An event that one consumer rejected and that an operator sends to it once more."""

    consumer: Sentence
    """The consumer group that rejected it. Every other group skips the record."""
    partition: Natural
    """The event's partition of `gpuledger.events.v1`."""
    offset: Natural
    """The event's offset in that partition."""
    event: GpuEvent
    """The event itself."""
