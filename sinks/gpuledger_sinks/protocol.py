"""The contract between the consume loop and a kind of sink.

The loop (`gpuledger_sinks.loop`) polls, decodes, commits and keeps the membership of the group. A
`Sink` handles what was polled and acknowledges it (`SinkContext`).

An epoch is one assignment of a partition to this member. A partition that is revoked and assigned
again has another one, as in between somebody else may have had it, or its topic may have been made
anew: what was done of records of an earlier epoch says nothing of the later one. So the loop hands
the sink a context with each call, which counts for the epochs of that call and for no other.
"""

import asyncio
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, NamedTuple, Protocol

from gpuledger.bus.protocol import Bus, Consumer, Gap, Record, TopicPartition
from gpuledger.clock import NS_PER_MS, Clock
from gpuledger.codec import Decoder
from gpuledger.dead_letter_queue import DeadLetterQueue
from gpuledger.lag import Lag
from gpuledger.records import GpuEvent
from gpuledger.runtime import Readiness

Partitions = frozenset[TopicPartition]
Epochs = Mapping[TopicPartition, int]
LARGE_BYTES: Final = 131_072
"""An event of 16 GPUs and a hundred pods has 50 kB."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What one poll brought of one partition, decoded."""

    partition: TopicPartition
    items: Sequence[tuple[Record, Any]]
    """Records with their values, in order; what did not decode is left out."""
    next_offset: int
    """The offset after the last record, also where that one did not decode."""


class LargeTurns:
    """The turn of the partition that works on what is large, while the others go side by side.

    An event of a message's size may come to a hundred times as much in labels, and take seconds to
    be made so. With one of them in each partition, a sink would hold all of that at once, and
    answer no probe until the last of them is made.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    def enter(self, batch: Batch) -> AbstractAsyncContextManager[None]:
        """Return what waits, where there is something large in a batch, for its turn."""
        is_large = any(len(record.value or b"") > LARGE_BYTES for record, _ in batch.items)
        return self._turn if is_large else nullcontext()


class AcknowledgedOffsets:
    """For each partition that is held the offset of the next record that is not done yet."""

    def __init__(self) -> None:
        self._next_epoch = count(1)
        self._epochs: dict[TopicPartition, int] = {}
        self._done: dict[TopicPartition, int] = {}
        self._committed: dict[TopicPartition, int] = {}

    def begin(self, partitions: Collection[TopicPartition]) -> None:
        """Begin an epoch of each of these: nothing of it is done."""
        self.end(partitions)
        # A number that never comes again: that a partition is held says nothing of since when.
        epoch = next(self._next_epoch)
        self._epochs |= dict.fromkeys(partitions, epoch)

    def end(self, partitions: Collection[TopicPartition]) -> None:
        """End the epochs of these: they are somebody else's now."""
        for known in (self._epochs, self._done, self._committed):
            for partition in partitions:
                known.pop(partition, None)

    @property
    def epochs(self) -> Epochs:
        """The epoch of each partition that is held, as of now."""
        return dict(self._epochs)

    def is_current(self, partition: TopicPartition, epochs: Epochs) -> bool:
        """Return whether the partition is held, and has been since these epochs were taken."""
        return partition in epochs and epochs[partition] == self._epochs.get(partition)

    def done(self, partition: TopicPartition, next_offset: int) -> None:
        """Record that everything before `next_offset` is done; never goes back in an epoch."""
        self._done[partition] = max(next_offset, self._done.get(partition, 0))

    def uncommitted(self) -> dict[TopicPartition, int]:
        """Return what is done beyond what was committed."""
        # Compared for difference: a poll without anything new shall cost the brokers nothing.
        return {
            partition: offset
            for partition, offset in self._done.items()
            if self._committed.get(partition) != offset
        }

    def committed(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Record that these offsets have been committed."""
        self._committed.update(offsets)


@dataclass(frozen=True, kw_only=True)
class SinkContext:
    """What the loop offers a sink while it works on what was polled in certain epochs.

    A sink may work on a batch for as long as its receiver is away. Where the partition was revoked
    meanwhile, the sink has let go of what it held of it, and whatever it says of it afterwards is
    not heard, also where the same member has been assigned the partition again.
    """

    consumer: Consumer
    """The consumer, for seeking."""
    dead_letters: DeadLetterQueue
    """Where a record is put that cannot be used."""
    progress: AcknowledgedOffsets
    lag: Lag
    epochs: Epochs

    def is_current(self, partition: TopicPartition) -> bool:
        """Return whether the partition has been held since the sink was given this context."""
        return self.progress.is_current(partition, self.epochs)

    def acknowledge(
        self,
        partition: TopicPartition,
        next_offset: int,
        *,
        time_ns: int | None = None,
        commits_itself: bool = False,
    ) -> None:
        """Record that all before `next_offset` is done; `time_ns` is the newest event's time.

        Counts only where the partition has been held ever since the call for which the sink was
        given this context. Where the sink `commits_itself` the loop does not.
        """
        if not self.is_current(partition):
            return
        time_ms = None if time_ns is None else time_ns // NS_PER_MS
        self.lag.done(partition, next_offset, time_ms=time_ms)
        # An offset that is in the sink's own transaction must not be committed beside it.
        if not commits_itself:
            self.progress.done(partition, next_offset)


class Refusal(NamedTuple):
    """Why an event cannot be handed on."""

    reason: str
    """In a word, as its dead letter has it."""
    detail: str
    """In a sentence."""


class RejectedEvent(NamedTuple):
    """An event that is a dead letter, and the record in which its sink read it."""

    record: Record
    event: GpuEvent


class Sink(Protocol):
    """What a kind of sink does with what was polled.

    The loop calls, one after another and never twice at a time: `assign` when partitions come,
    then, again and again, `prepare` and `handle`. `release` may come while `handle` runs.

        for each poll:   await sink.prepare(context)          # catch up with new partitions
                         await sink.handle(batches, context)  # send; context.acknowledge(…)
                         publish the dead letters, commit what was acknowledged

    Offsets are committed after they were acknowledged and never before, so what is not
    acknowledged comes again: to this sink or to the partition's next owner. A sink either waits for
    a receiver that is away inside `handle`, while the loop keeps the membership of the group, or it
    returns, says which partitions are `full`, and acknowledges what is done later.
    What cannot be used goes to `context.dead_letters`, and is acknowledged as well.
    """

    name: str
    """The kind's name."""
    receiver: str
    """Where it goes, for people: an address without its secrets."""

    @abstractmethod
    async def assign(self, partitions: Partitions) -> None:
        """Record that partitions are newly held; must neither block nor raise."""

    async def prepare(self, context: SinkContext) -> Partitions:
        """Do what must come before the next `handle`; return the partitions whose poll is voided.

        Those were set to another offset: what was polled of them is let go and polled again.
        """
        del context
        return frozenset()

    def full(self) -> Partitions:
        """Return the partitions of which nothing more is to be polled for now.

        For a sink whose `handle` does not wait for what it was given: of each partition it takes
        what comes until enough waits there.
        """
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

    max_redelivered: int = 1
    """The most events of one `redeliver`."""

    async def redeliver(self, rejected: Sequence[RejectedEvent], /) -> Sequence[Refusal | None]:
        """Hand over events once more; return for each why it is rejected again, or `None`.

        Only for kinds that take replays (`gpuledger_sinks.replays`). May be called at any time and
        leaves the state of the sink as it is. Raises ReceiverUnavailableError or BusError if no
        answer is known for any event: it is called again with the same events.
        """
        return [Refusal("rejected", "this sink takes no replays")] * len(rejected)


class OpenSink(Protocol):
    """Opens a sink of one kind: the function `open_sink` of its module."""

    def __call__(
        self,
        *,
        bus: Bus,
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
    dead_letters_of: str | None = None
    """The group whose dead letters those are that are made; by default `group`."""
    group_instance_id: str | None = None
    decoders: Mapping[str, Decoder[Any]]
    """The decoder of each topic to read."""
    poll_seconds: float = 0.5
    """How long a poll waits; at least this often `handle` is called."""
    max_poll_records: int = 500
    """The most records of a poll: the bound on memory."""
