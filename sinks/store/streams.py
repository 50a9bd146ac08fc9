"""Under which names the table keeps its numbers of a partition.

Here live the names alone; what the numbers mean is said in `sinks.store.stored`.
"""

from dataclasses import dataclass

from gpuledger.bus.protocol import TopicPartition


@dataclass(frozen=True, kw_only=True)
class Streams:
    """The names of a sink's streams in the table."""

    group: str
    """What all of them begin with."""
    generation: str
    """What the user has set after a topic was made anew; empty for the first."""

    def of(self, partition: TopicPartition) -> str:
        """Return the stream of the last offset that is stored."""
        parts = [self.group, self.generation, partition.topic, str(partition.partition)]
        return "|".join(part for part in parts if part)

    def identity_of(self, partition: TopicPartition) -> str:
        """Return the stream of the topic's identity."""
        return f"{self.of(partition)}|topic_id"
