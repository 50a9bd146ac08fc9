"""What the table is known to have of each partition, and of which topic.

Here lives what is remembered between a look into the table and the next. Pure: asks neither the
table nor the brokers.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from gpuledger.bus.protocol import TopicPartition
from sinks.store.identity import is_same_topic, number_of
from sinks.store.streams import Streams


@dataclass(kw_only=True)
class Stored:
    """How far the table has each partition that was sought."""

    streams: Streams
    topic_id: str | None = None
    """The identity of the topic of which rows are collected."""
    last_offsets: dict[TopicPartition, int] = field(default_factory=dict)
    """The last offset that the table has of each partition; none where it has nothing."""
    _identified: set[TopicPartition] = field(default_factory=set)
    """Partitions of which the table knows the topic's identity."""

    def names_of(self, partitions: Collection[TopicPartition]) -> list[str]:
        """Return the streams in which the table has what is to be known of partitions."""
        names = self.streams
        return [name for at in partitions for name in (names.of(at), names.identity_of(at))]

    def learn(self, partition: TopicPartition, numbers: Mapping[str, int]) -> bool:
        """Take what the table's streams say of a partition; return whether it is of our topic."""
        self.last_offsets.pop(partition, None)
        self._identified.discard(partition)
        last_offset = numbers.get(self.streams.of(partition))
        identity = numbers.get(self.streams.identity_of(partition))
        if last_offset is not None:
            self.last_offsets[partition] = last_offset
        if identity is not None:
            self._identified.add(partition)
        return is_same_topic(stored=identity, topic_id=self.topic_id)

    def new_identities(self, partitions: Collection[TopicPartition]) -> dict[str, int]:
        """Return the topic's identity for each partition of which the table does not know it."""
        if self.topic_id is None:
            return {}
        number = number_of(self.topic_id)
        new = set(partitions) - self._identified
        return {self.streams.identity_of(partition): number for partition in new}

    def advance(self, last_offsets: Mapping[TopicPartition, int]) -> None:
        """Record that rows were written up to these offsets, with the topic's identity."""
        self.last_offsets |= last_offsets
        self._identified |= last_offsets.keys()
