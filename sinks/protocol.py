"""The contract between the consume loop and a kind of sink.

The loop (`sinks.loop`) polls, decodes, commits and keeps the membership of the group. A sink
(`Sink`) says what becomes of what was polled, and acknowledges what is done (`SinkContext`).
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from gpuledger.bus.protocol import Consumer, Gap, Record, TopicPartition
from gpuledger.clock import Clock
from gpuledger.codec import Decoder
from gpuledger.dead_letter_queue import DeadLetterQueue
from gpuledger.runtime import Readiness

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
    """What the loop offers a sink while it works.

    It belongs to one call of the sink: what the sink says with it counts for partitions that have
    been held ever since that call.
    """

    @property
    def consumer(self) -> Consumer:
        """The consumer, for seeking."""

    @property
    def dead_letters(self) -> DeadLetterQueue:
        """Where a record is put that cannot be used."""

    def is_current(self, partition: TopicPartition) -> bool:
        """Return whether the partition has been held since the sink was given this context."""

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
        given this context. With `is_committed` the sink has committed the offset itself.
        """


class Sink(Protocol):
    """What a kind of sink does with what was polled.

    The loop calls, one after another and never twice at a time: `assign` when partitions come,
    then, again and again, `prepare` and `handle`. `release` may come while `handle` runs.

        for each poll:   await sink.prepare(context)          # catch up with new partitions
                         await sink.handle(batches, context)  # send; context.acknowledge(…)
                         publish the dead letters, commit what was acknowledged

    Offsets are committed after they were acknowledged and never before, so what is not
    acknowledged comes again: to this sink or to the partition's next owner. A sink waits for a
    receiver that is away inside `handle`; the loop keeps the membership of the group meanwhile.
    What cannot be used goes to `context.dead_letters`, and is acknowledged as well.
    """

    name: str
    """The kind's name."""
    receiver: str
    """Where it goes, for people: an address without its secrets."""

    @abstractmethod
    async def assign(self, partitions: Partitions, context: SinkContext) -> None:
        """Record that partitions are newly held; must neither block nor raise."""

    async def prepare(self, context: SinkContext) -> Partitions:
        """Do what must come before the next `handle`; return the partitions whose poll is voided.

        Those were set to another offset: what was polled of them is let go and polled again.
        """
        del context
        return frozenset()

    @abstractmethod
    async def handle(self, batches: Sequence[Batch], context: SinkContext) -> None:
        """Work on what was polled, perhaps nothing; return when there is room for more."""

    @abstractmethod
    async def release(self, partitions: Partitions, context: SinkContext) -> None:
        """Finish what is held of these partitions, soon, and forget them.

        May raise UnavailableError or BusError: what was not finished is the next owner's.
        """

    async def handle_gap(self, gap: Gap) -> None:
        """Record that records are gone before they were read, or cannot be unpacked."""
        del gap  # the loop shows it; few kinds do more


class OpenSink(Protocol):
    """Opens a sink of one kind: the function `open_sink` of its module."""

    def __call__(
        self,
        *,
        bus: Any,  # noqa: ANN401  # a Bus; a TransactionalBus for those that write to Kafka
        settings: Any,  # noqa: ANN401  # the kind's section
        readiness: Readiness,
        clock: Clock,
        group: str,
    ) -> AbstractAsyncContextManager[Sink]:
        """Return the sink, open while the context is; `group` is its consumer group."""


@dataclass(frozen=True, kw_only=True)
class ConsumerConfig:
    """How a sink's records are read."""

    group: str
    member: str | None = None
    decoders: Mapping[str, Decoder[Any]]
    """The decoder of each topic to read."""
    poll_seconds: float = 0.5
    """How long a poll waits; at least this often `handle` is called."""
    max_poll_records: int = 500
    """The most records of a poll: the bound on memory."""
