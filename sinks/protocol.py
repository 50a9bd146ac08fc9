"""What the consume loop and a kind of sink agree on.

Here live the protocol that a sink fills, the desk that the loop offers it, and what passes between
them. No loop and no sink.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gpuledger.bus.protocol import Consumer, GapCallback, Record, TopicPartition, ignore_gap
from gpuledger.codec import Decoder
from gpuledger.dead_letter_queue import DeadLetterQueue

Partitions = frozenset[TopicPartition]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What one poll brought of one partition, decoded."""

    partition: TopicPartition
    items: Sequence[tuple[Record, Any]]
    """Records with their values, in order; what did not decode is left out."""
    next_offset: int
    """The offset after the last record, also where that one did not decode."""


class SinkContext(Protocol):
    """What the loop offers a sink while it works."""

    @property
    def consumer(self) -> Consumer:
        """The consumer, for seeking."""

    @property
    def office(self) -> DeadLetterQueue:
        """Where a record is put aside."""

    def is_current(self, partition: TopicPartition) -> bool:
        """Return whether the partition has been held since the sink was given this desk."""

    def acknowledge(
        self,
        partition: TopicPartition,
        next_offset: int,
        *,
        time_ns: int | None = None,
        is_committed: bool = False,
    ) -> None:
        """Record that all before `next_offset` is done; `time_ns` is the newest event's time.

        Counts only where the partition has been held ever since the call for which the sink was
        given this desk. With `is_committed` the sink has committed the offset itself.
        """


class Sink(Protocol):
    """What a kind of sink does with events."""

    name: str

    async def assign(self, partitions: Partitions, desk: SinkContext) -> None:
        """Take note of partitions newly held; must neither block nor raise."""

    async def prepare(self, desk: SinkContext) -> Partitions:
        """Do what must come before the next `take`; return the partitions whose poll is voided.

        Those were set to another offset: what was polled of them is let go and polled again.
        """

    async def take(self, batches: Sequence[Batch], desk: SinkContext) -> None:
        """Work on what was polled, perhaps nothing; return when there is room for more."""

    async def release(self, partitions: Partitions, desk: SinkContext) -> None:
        """Finish what is held of these partitions, soon, and forget them; may run beside `take`.

        May raise UnavailableError or BusError: what was not finished is the next owner's.
        """


@dataclass(frozen=True, kw_only=True)
class ConsumerConfig:
    """How a sink wants its records."""

    group: str
    member: str | None = None
    decoders: Mapping[str, Decoder[Any]]
    """The decoder of each topic to read."""
    poll_seconds: float = 0.5
    """How long a poll waits; at least this often `take` is called."""
    max_poll_records: int = 500
    """The most records of a poll: the bound on memory."""
    receiver: str = ""
    """Where it goes, for people: an address without its secrets."""
    on_gap: GapCallback = ignore_gap
    """Told of records that are gone before they were read, beside the check, and of those that
    cannot be unpacked, beside their dead letter."""
