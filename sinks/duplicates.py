"""Recognise a tick that was published twice, as a restarted join may do, by (node, boot, seq).

Here lives how far each node was seen, by partition, in memory. It holds within the life of a
consumer's assignment, and for nodes that were heard of within a day; what comes again after that is
for the reader of the store to tell.
"""

from collections.abc import Iterable
from itertools import islice
from typing import Final

from gpuledger.bus.protocol import TopicPartition
from gpuledger.clock import Clock
from gpuledger.recent import Recent
from gpuledger.records import GpuEvent

_MAX_BOOTS: Final = 5
"""As many boots of a node as the join remembers: a spool may bring ticks of earlier ones late."""


class SeenBoots:
    """How far the few boots of a node that were heard of last were seen; never by a clock."""

    __slots__ = ("_seqs",)

    def __init__(self) -> None:
        self._seqs: dict[str, int] = {}

    def is_new(self, event: GpuEvent) -> bool:
        """Return whether the tick is beyond what was seen of its boot, and remember it."""
        boot_id, seq = event.boot_id, event.seq
        if seq <= self._seqs.get(boot_id, -1):
            return False
        # Put last, so that the boot that was heard of longest ago is first.
        self._seqs.pop(boot_id, None)
        self._seqs[boot_id] = seq
        if len(self._seqs) > _MAX_BOOTS:
            self._seqs.pop(next(islice(self._seqs, 1)))
        return True


class SeenTicks:
    """The ticks seen of each node; one node's ticks always come in one partition."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._nodes: dict[TopicPartition, Recent[str, SeenBoots]] = {}

    def is_new(self, partition: TopicPartition, event: GpuEvent) -> bool:
        """Return whether the tick is beyond what was seen of its node's boot, and remember it."""
        if (nodes := self._nodes.get(partition)) is None:
            nodes = self._nodes[partition] = Recent()
        nodes.go_on(self._clock.monotonic_ns())
        if (boots := nodes.get(event.node)) is None:
            boots = nodes[event.node] = SeenBoots()
        return boots.is_new(event)

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """Forget partitions that are read by somebody else, or again."""
        for partition in partitions:
            self._nodes.pop(partition, None)
