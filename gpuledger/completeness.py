"""Calculates the time up to which a reader has all records of a component's topic.

A watermark is valid for a reader that has read the topic up to the watermark's offset. Watermarks
have their own topic, so a reader may get a watermark before the records that it covers. Such a
watermark waits until the reader has read up to its offset; otherwise a reader that is behind would
close an hour that it has not read completely.

    events = Completeness(component="join", topic=topics.events.name)
    events.take(watermark)                      # from the watermarks' topic, at any time
    events.read_to(partition, next_offset)      # from the events' topic, once processed
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
"""Minimum time between two watermarks of a component for the same partition."""

MAX_AHEAD_NS: Final = NS_PER_MINUTE
"""Maximum time by which a watermark may be ahead of our own clock; beyond it, a clock is wrong."""

MAX_CLUSTERS: Final = 1_000
"""Maximum number of tracked clusters per partition; necessary because anybody may write records
with any cluster name."""
MAX_WAITING: Final = 64
"""Maximum number of watermarks per partition and cluster that wait until the reader has read up to
their offsets. If there are more, the second newest is dropped, so that a reader that is far behind
still advances step by step."""


class Completeness:
    """Tracks a component's watermarks, and how far a reader has read the component's topic.

    The number of watermarks per partition is limited.
    """

    def __init__(self, *, component: str, topic: str) -> None:
        self._component = component
        self._topic = topic
        self._next_offsets: dict[int, int] = {}
        self._waiting: dict[int, dict[str, deque[Watermark]]] = {}
        self._reached: dict[int, dict[str, Watermark]] = {}
        self._expected: set[tuple[int, str]] = set()
        """Pairs of a partition and a cluster for which a watermark is expected."""

    def expect(self, watermark: Watermark) -> None:
        """Expect a watermark for the partition and cluster of this watermark.

        Until the reader has reached such a watermark, the partition has no known time.
        """
        if (watermark.component, watermark.topic) == (self._component, self._topic):
            self._expected.add((watermark.partition, watermark.cluster))

    def take(self, watermark: Watermark) -> None:
        """Store a watermark; ignore watermarks of other components or topics."""
        if (watermark.component, watermark.topic) != (self._component, self._topic):
            return
        clusters = self._waiting.setdefault(watermark.partition, {})
        if watermark.cluster not in clusters and len(clusters) >= MAX_CLUSTERS:
            return
        waiting = clusters.setdefault(watermark.cluster, deque())
        if len(waiting) >= MAX_WAITING:
            waiting.pop()
        # A waiting watermark with a higher offset is about the topic before it was recreated, so
        # its offset is never reached.
        while waiting and waiting[-1].next_offset > watermark.next_offset:
            waiting.pop()
        waiting.append(watermark)
        self._apply(watermark.partition, {watermark.cluster: waiting})

    def read_to(self, partition: int, next_offset: int) -> None:
        """Record that all records of a partition before this offset have been processed."""
        self._next_offsets[partition] = next_offset
        self._apply(partition, self._waiting.get(partition, {}))

    def forget(self, partition: int) -> None:
        """Forget a partition that another reader has taken over."""
        self._next_offsets.pop(partition, None)
        self._expected = {expected for expected in self._expected if expected[0] != partition}
        self._waiting.pop(partition, None)
        self._reached.pop(partition, None)

    def take_back(self, key: bytes, partition: int) -> None:
        """Withdraw the watermark with this key, because its tombstone was read from the partition.

        The cluster is then no longer expected in that partition until `expect` is called again.
        """
        component, cluster, number = split_watermark_key(key)
        if (component, number) == (self._component, partition):
            self._expected.discard((partition, cluster))
            self._waiting.get(partition, {}).pop(cluster, None)
            self._reached.get(partition, {}).pop(cluster, None)

    def of(self, partition: int) -> list[Watermark]:
        """Return each cluster's newest watermark whose offset the reader has reached."""
        return list(self._reached.get(partition, {}).values())

    def complete_until_ns(self, partitions: Iterable[int]) -> int | None:
        """Return the time up to which these partitions are complete, in all their clusters.

        Returns `None` if the time is unknown for one of the partitions.
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
        """Return the time up to which a partition is complete if it is read up to `next_offset`.

        Returns `None` if the time is unknown for one of the partition's clusters.
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
        """Apply the waiting watermarks whose offsets were reached; never set a time back."""
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
    """Return a watermark's key on Kafka, under which it replaces the previous watermark."""
    return watermark_key(watermark.component, watermark.cluster, watermark.partition).encode()


def split_watermark_key(key: bytes) -> tuple[str, str, int | None]:
    """Return component, cluster and partition of a watermark's key.

    The partition is `None` if `key` is not the key of a watermark.
    """
    component, _, rest = key.decode(errors="replace").partition("/")
    cluster, _, number = rest.partition("/")
    return component, cluster, int(number) if number.isdecimal() and number.isascii() else None


def message_of(watermark: Watermark, *, time_ns: int) -> Message:
    """Return the message for a watermark, with `time_ns` of the publisher's clock as its time."""
    return Message(key_of(watermark), encode(watermark), time_ns // NS_PER_MS)


def name_publisher(client_id: str) -> str:
    """Return this process's name as a publisher: its client id and its host."""
    return f"{client_id}@{socket.gethostname()}"[:MAX_WORD_LENGTH]
