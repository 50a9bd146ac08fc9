"""Decides which partitions a worker reports as complete, when, and up to which time. No I/O.

A watermark describes ticks that have been delivered, so it is published in a later delivery than
the events of these ticks. The state computed with one batch becomes valid when that batch is
acknowledged, and is published with the next batch, together with the offset after the acknowledged
events.
"""

from collections.abc import Iterable, Mapping

import msgspec

from gpuledger.bus.protocol import Message
from gpuledger.completeness import JOIN, RENEWED_AFTER_SECONDS, message_of
from gpuledger.keys import split_key
from gpuledger.records import UnresponsiveNode, Watermark
from gpuledger.records.bounds import MAX_UNRESPONSIVE_NODES
from gpuledger_enricher.join.progress.passage import Reached


class _Partition(msgspec.Struct):
    next_offset: int | None
    """Offset after the acknowledged events; `None` while it is unknown."""
    due_seconds: float
    """When the next watermark is due, in seconds of the worker's clock."""
    drawn: Mapping[str, Reached] | None = None
    """For each cluster, the time through which it is complete once the current batch is delivered.
    """
    acknowledged: Mapping[str, Reached] | None = None
    """For each cluster, the time through which the acknowledged batches make it complete; `None` if
    these times are already published."""


class Announcer:
    """Returns the watermarks of a worker's partitions: one per cluster every few seconds."""

    def __init__(self, *, topic: str, publisher: str) -> None:
        """Start without partitions.

        `topic` is the events topic that the watermarks describe, and `publisher` is the name of
        this worker in the watermarks.
        """
        self._topic = topic
        self._publisher = publisher
        self._partitions: dict[int, _Partition] = {}
        self.published_until_ns: dict[int, int] = {}
        """Last published watermark of each partition: the minimum over its clusters, in ns."""

    def begin(self, partition: int, *, next_offset: int, now_seconds: float) -> None:
        """Start with a new partition, whose events end at the offset `next_offset`."""
        self._partitions[partition] = _Partition(next_offset, now_seconds)

    def forget(self, partitions: Iterable[int]) -> None:
        """Forget partitions that are given up or restored again."""
        for partition in partitions:
            self._partitions.pop(partition, None)
            self.published_until_ns.pop(partition, None)

    def due(self, *, now_seconds: float) -> list[int]:
        """Return the partitions whose watermark must be computed or published now."""
        return [
            number for number, state in self._partitions.items() if state.due_seconds <= now_seconds
        ]

    def is_to_be_drawn(self, partition: int, *, now_seconds: float) -> bool:
        """Return whether a partition's watermark must be computed now."""
        state = self._partitions.get(partition)
        return state is not None and state.due_seconds <= now_seconds and state.acknowledged is None

    def draw(self, partition: int, reached: Mapping[str, Reached], *, now_seconds: float) -> None:
        """Record the time through which each cluster is complete, including the current batch."""
        if state := self._partitions.get(partition):
            state.drawn = reached or None
            if not reached:
                state.due_seconds = now_seconds + RENEWED_AFTER_SECONDS

    def published(self, partition: int, *, next_offset: int | None) -> None:
        """Record the offset after the published events; `None` if the bus did not report it."""
        if state := self._partitions.get(partition):
            state.next_offset = next_offset

    def committed(self, partition: int) -> None:
        """Record that all messages for a partition so far are delivered and committed."""
        if state := self._partitions.get(partition):
            state.acknowledged, state.drawn = state.drawn or state.acknowledged, None

    def drain(self, partition: int, *, now_seconds: float, time_ns: int) -> list[Message]:
        """Return the watermarks to publish for a partition, one per cluster.

        The list is empty if no state was acknowledged since the last call, or if the offset after
        the partition's events is unknown.
        """
        state = self._partitions.get(partition)
        if state is None or state.acknowledged is None:
            return []
        state.due_seconds = now_seconds + RENEWED_AFTER_SECONDS
        if state.next_offset is None:
            return []
        reached, state.acknowledged = state.acknowledged, None
        self.published_until_ns[partition] = min(
            reached_cluster.until_ns for reached_cluster in reached.values()
        )
        return [
            message_of(
                Watermark(
                    component=JOIN,
                    cluster=cluster,
                    partition=partition,
                    complete_until_ns=reached_cluster.until_ns,
                    topic=self._topic,
                    next_offset=state.next_offset,
                    publisher=self._publisher,
                    node_count=reached_cluster.node_count,
                    unresponsive_count=len(reached_cluster.unresponsive) or None,
                    unresponsive=[
                        UnresponsiveNode(node=split_key(key)[1], since_time_ns=since_ns)
                        for key, since_ns in reached_cluster.unresponsive[:MAX_UNRESPONSIVE_NODES]
                    ]
                    or None,
                ),
                time_ns=time_ns,
            )
            for cluster, reached_cluster in reached.items()
        ]
