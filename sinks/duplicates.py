"""Recognise a tick that was published twice, as a restarted join may do.

Here lives the mark of each node, by partition, in memory. It holds within the life of a consumer's
assignment; what comes again after that is for the reader of the store to tell by (node, boot, seq).
"""

from collections.abc import Iterable

from gpuledger.bus.protocol import TopicPartition
from gpuledger.records import GpuEvent


class SeenTicks:
    """The last tick seen of each node; one node's ticks always come in one partition, in order."""

    def __init__(self) -> None:
        self._last: dict[TopicPartition, dict[str, tuple[str, int]]] = {}

    def is_new(self, partition: TopicPartition, event: GpuEvent) -> bool:
        """Say whether the tick is beyond what was seen of its node's boot, and remember it."""
        seen = self._last.setdefault(partition, {})
        boot_id, seq = seen.get(event.node, ("", -1))
        if boot_id == event.boot_id and event.seq <= seq:
            return False
        seen[event.node] = (event.boot_id, event.seq)
        return True

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """Drop the marks of partitions that are read by somebody else, or again."""
        for partition in partitions:
            self._last.pop(partition, None)
