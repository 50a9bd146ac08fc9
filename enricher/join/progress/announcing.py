"""Which partitions a worker calls complete, when, and up to where. Pure.

A watermark speaks of what was delivered before, so it goes out with a later delivery than the one
of the ticks that it speaks of: what is drawn from the nodes with one batch holds once that batch
is acknowledged, and is published with the next one. In between stands how far the events reached.
"""

from collections.abc import Iterable, Mapping

import msgspec

from enricher.join.progress.passage import Reached
from gpuledger.bus.protocol import Message
from gpuledger.completeness import JOIN, RENEWED_AFTER_SECONDS, message_of
from gpuledger.keys import split_key
from gpuledger.records import SilentNode, Watermark
from gpuledger.records.bounds import MAX_SILENT_NODES


class _Partition(msgspec.Struct):
    next_offset: int | None
    """The offset behind the events that were acknowledged; `None` while nobody knows it."""
    due_at: float
    """When the next watermark is due, in seconds of the worker's clock."""
    drawn: Mapping[str, Reached] | None = None
    """How far it is with the batch that is under way, by cluster."""
    acknowledged: Mapping[str, Reached] | None = None
    """How far it is with the batches that were acknowledged, where that is still to be said."""


class Announcer:
    """What a worker says of its partitions: of each cluster there a watermark every few seconds."""

    def __init__(self, *, topic: str, publisher: str) -> None:
        """Take the events' topic, and who the watermarks say that they are from."""
        self._topic = topic
        self._publisher = publisher
        self._partitions: dict[int, _Partition] = {}
        self.told: dict[int, int] = {}
        """Up to which time each partition was called complete last."""

    def begin(self, partition: int, *, next_offset: int, now: float) -> None:
        """Begin with a partition that was taken over, whose events end at that offset."""
        self._partitions[partition] = _Partition(next_offset, now)

    def forget(self, partitions: Iterable[int]) -> None:
        """Forget partitions that are given up, or begun with anew."""
        for partition in partitions:
            self._partitions.pop(partition, None)
            self.told.pop(partition, None)

    def due(self, *, now: float) -> list[int]:
        """Return the partitions of which something is to be found out or said by now."""
        return [number for number, known in self._partitions.items() if known.due_at <= now]

    def is_to_be_drawn(self, partition: int, *, now: float) -> bool:
        """Return whether it is to be found out by now how far a partition is."""
        known = self._partitions.get(partition)
        return known is not None and known.due_at <= now and known.acknowledged is None

    def draw(self, partition: int, reached: Mapping[str, Reached], *, now: float) -> None:
        """Record how far each cluster of a partition is with the batch that goes out now."""
        if known := self._partitions.get(partition):
            known.drawn = reached or None
            if not reached:
                known.due_at = now + RENEWED_AFTER_SECONDS

    def publish(self, partition: int, *, next_offset: int | None) -> None:
        """Record where a partition's events end, `None` where the bus did not tell it."""
        if known := self._partitions.get(partition):
            known.next_offset = next_offset

    def commit(self, partition: int) -> None:
        """Record that all of a partition is delivered and committed that was made of it so far."""
        if known := self._partitions.get(partition):
            known.acknowledged, known.drawn = known.drawn or known.acknowledged, None

    def drain(self, partition: int, *, now: float, time_ns: int) -> list[Message]:
        """Return the watermarks of a partition, one for each cluster of which something is new."""
        known = self._partitions.get(partition)
        if known is None or known.acknowledged is None:
            return []
        known.due_at = now + RENEWED_AFTER_SECONDS
        if known.next_offset is None:
            return []
        reached, known.acknowledged = known.acknowledged, None
        self.told[partition] = min(each.until_ns for each in reached.values())
        return [
            message_of(
                Watermark(
                    stage=JOIN,
                    cluster=cluster,
                    partition=partition,
                    complete_until_ns=each.until_ns,
                    topic=self._topic,
                    next_offset=known.next_offset,
                    publisher=self._publisher,
                    node_count=each.node_count,
                    silent_count=len(each.silent) or None,
                    silent=[
                        SilentNode(node=split_key(key)[1], since_time_ns=since_ns)
                        for key, since_ns in each.silent[:MAX_SILENT_NODES]
                    ]
                    or None,
                ),
                time_ns=time_ns,
            )
            for cluster, each in reached.items()
        ]
