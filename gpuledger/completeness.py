"""How far a component's topic is complete, as a reader of it may say. Pure.

A watermark speaks of a topic up to an offset; it comes on a topic of its own, so a reader may have
it before the records that it speaks of. It counts once the reader has read past that offset, and
not before: a reader that is behind would otherwise close an hour of which it has not read all.

    events = Completeness(component="join", topic=topics.events.name)
    events.take(watermark)                      # of the watermarks' topic, whenever it comes
    events.read_to(partition, next_offset)      # of the events' topic, as far as it is worked off
    events.complete_until_ns(range(partitions))
"""

import socket
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

from gpuledger.bus.protocol import Message
from gpuledger.clock import NS_PER_MINUTE, NS_PER_MS
from gpuledger.codec import encode
from gpuledger.keys import watermark_key
from gpuledger.records import Watermark
from gpuledger.records.bounds import MAX_WORD_LENGTH

PODWATCH: Final = "podwatch"
JOIN: Final = "join"
RENEWED_AFTER_SECONDS: Final = 5.0
"""How often a component renews its watermark of each partition, at most."""

MAX_AHEAD_NS: Final = NS_PER_MINUTE
"""Beyond this ahead of our own clock nothing can be complete: whoever says so has another clock."""

MAX_CLUSTERS: Final = 1_000
"""Clusters of one partition that are called complete: names are anybody's."""
MAX_WAITING: Final = 64
"""Watermarks of a partition and cluster that wait until the reader is there: of more of them the
second newest gives way, so that a reader that is far behind still goes from one to the next."""


class Completeness:
    """The watermarks of one component, as far as a reader has read; bounded by the partitions."""

    def __init__(self, *, component: str, topic: str) -> None:
        self._component = component
        self._topic = topic
        self._next_offsets: dict[int, int] = {}
        self._waiting: dict[int, dict[str, deque[Watermark]]] = {}
        self._reached: dict[int, dict[str, Watermark]] = {}
        self._expected: set[tuple[int, str]] = set()
        """Partitions, each with a cluster of which something is to be said there."""

    def expect(self, watermark: Watermark) -> None:
        """Have its partition wait for a watermark of its cluster: whoever says them is at work."""
        if (watermark.component, watermark.topic) == (self._component, self._topic):
            self._expected.add((watermark.partition, watermark.cluster))

    def take(self, watermark: Watermark) -> None:
        """Take a watermark; one of another component or topic is passed over."""
        if (watermark.component, watermark.topic) != (self._component, self._topic):
            return
        clusters = self._waiting.setdefault(watermark.partition, {})
        if watermark.cluster not in clusters and len(clusters) >= MAX_CLUSTERS:
            return
        waiting = clusters.setdefault(watermark.cluster, deque())
        if len(waiting) >= MAX_WAITING:
            waiting.pop()
        # The offsets of a topic that was made anew: what is said of the one before never holds.
        while waiting and waiting[-1].next_offset > watermark.next_offset:
            waiting.pop()
        waiting.append(watermark)
        self._apply(watermark.partition, {watermark.cluster: waiting})

    def read_to(self, partition: int, next_offset: int) -> None:
        """Record that all of a partition before this offset is read, and worked off."""
        self._next_offsets[partition] = next_offset
        self._apply(partition, self._waiting.get(partition, {}))

    def forget(self, partition: int) -> None:
        """Forget a partition that somebody else reads."""
        self._next_offsets.pop(partition, None)
        self._expected = {expected for expected in self._expected if expected[0] != partition}
        self._waiting.pop(partition, None)
        self._reached.pop(partition, None)

    def take_back(self, key: bytes, partition: int) -> None:
        """Take back what was said under a watermark's key, in its partition: of a tombstone.

        Nothing is waited for any more of that cluster there, until something is said anew.
        """
        component, cluster, number = split_watermark_key(key)
        if (component, number) == (self._component, partition):
            self._expected.discard((partition, cluster))
            self._waiting.get(partition, {}).pop(cluster, None)
            self._reached.get(partition, {}).pop(cluster, None)

    def of(self, partition: int) -> list[Watermark]:
        """Return what holds of a partition by now, a watermark of each cluster."""
        return list(self._reached.get(partition, {}).values())

    def complete_until_ns(self, partitions: Iterable[int]) -> int | None:
        """Return up to which time all of these partitions are complete, in all their clusters.

        `None` where that is not known of one of them.
        """
        partitions = list(partitions)
        if any(
            partition in partitions and cluster not in self._reached.get(partition, {})
            for partition, cluster in self._expected
        ):
            return None
        found = [self.of(partition) for partition in partitions]
        if not all(found):
            return None
        return min((watermark.complete_until_ns for of in found for watermark in of), default=None)

    def complete_with_ns(self, partition: int, next_offset: int) -> int | None:
        """Return up to which time a partition is complete for who has read up to this offset.

        `None` where that is not known of one of its clusters.
        """
        found = {
            cluster: each.complete_until_ns
            for cluster, each in self._reached.get(partition, {}).items()
        }
        for cluster, waiting in self._waiting.get(partition, {}).items():
            for watermark in waiting:
                if watermark.next_offset <= next_offset:
                    until_ns = watermark.complete_until_ns
                    found[cluster] = max(until_ns, found.get(cluster, until_ns))
        if any(at == partition and cluster not in found for at, cluster in self._expected):
            return None
        return min(found.values(), default=None)

    def _apply(self, partition: int, waiting_of: Mapping[str, deque[Watermark]]) -> None:
        """Apply the watermarks that the reader has read past; none of them goes back in time."""
        next_offset = self._next_offsets.get(partition)
        if next_offset is None:
            return
        reached = self._reached.setdefault(partition, {})
        for cluster, waiting in waiting_of.items():
            while waiting and waiting[0].next_offset <= next_offset:
                watermark = waiting.popleft()
                former = reached.get(cluster)
                if former is None or watermark.complete_until_ns >= former.complete_until_ns:
                    reached[cluster] = watermark


def key_of(watermark: Watermark) -> bytes:
    """Return the key under which a watermark replaces the one before it."""
    return watermark_key(watermark.component, watermark.cluster, watermark.partition).encode()


def split_watermark_key(key: bytes) -> tuple[str, str, int | None]:
    """Return component, cluster and partition of a watermark's key; `None` if it has none."""
    component, _, rest = key.decode(errors="replace").partition("/")
    cluster, _, number = rest.partition("/")
    return component, cluster, int(number) if number.isdecimal() and number.isascii() else None


def message_of(watermark: Watermark, *, time_ns: int) -> Message:
    """Return what is published of a watermark, at a time of the publisher's clock."""
    return Message(key_of(watermark), encode(watermark), time_ns // NS_PER_MS)


def name_publisher(client_id: str) -> str:
    """Return the name under which this process publishes: two of one client id are told apart."""
    return f"{client_id}@{socket.gethostname()}"[:MAX_WORD_LENGTH]
