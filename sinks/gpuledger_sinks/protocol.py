"""The contract between the consume loop and a kind of sink.

The loop (`gpuledger_sinks.loop`) polls, decodes, commits and keeps its membership in the group. A
`Sink` processes the polled records and acknowledges them (`SinkContext`).

An epoch is one assignment of a partition to this member. If a partition is revoked and assigned
again, a new epoch begins: another member may have owned the partition in between, or its topic may
have been recreated. Acknowledgements of records of an earlier epoch are invalid in a later one.

With each call, the loop therefore passes a context that is valid only for the current epochs.
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
"""Size above which an event counts as large. One with 16 GPUs and a hundred pods has 50 kB."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The decoded records of one partition from one poll."""

    partition: TopicPartition
    items: Sequence[tuple[Record, Any]]
    """Records with their values, in order, without records that could not be decoded."""
    next_offset: int
    """The offset after the last record, even if that record could not be decoded."""


class LargeTurns:
    """Lets one partition at a time work on large events; other batches run concurrently.

    The labels made from an event of the maximum message size may take a hundred times its memory,
    and several seconds. With one such event in each partition, a sink would need all this memory at
    once, and would answer no probe until all labels are made.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    def enter(self, batch: Batch) -> AbstractAsyncContextManager[None]:
        """Return a context that waits for its turn if the batch has a large event."""
        is_large = any(len(record.value or b"") > LARGE_BYTES for record, _ in batch.items)
        return self._turn if is_large else nullcontext()


class AcknowledgedOffsets:
    """The offset of the next unfinished record of each assigned partition."""

    def __init__(self) -> None:
        self._next_epoch = count(1)
        self._epochs: dict[TopicPartition, int] = {}
        self._done: dict[TopicPartition, int] = {}
        self._committed: dict[TopicPartition, int] = {}

    def begin(self, partitions: Collection[TopicPartition]) -> None:
        """Begin a new epoch of each partition, without acknowledged records."""
        self.end(partitions)
        # Epochs have unique numbers, so that a partition that is assigned again gets a new one.
        epoch = next(self._next_epoch)
        self._epochs |= dict.fromkeys(partitions, epoch)

    def end(self, partitions: Collection[TopicPartition]) -> None:
        """End the epochs of these partitions, which were revoked."""
        for known in (self._epochs, self._done, self._committed):
            for partition in partitions:
                known.pop(partition, None)

    @property
    def epochs(self) -> Epochs:
        """The current epoch of each assigned partition."""
        return dict(self._epochs)

    def is_current(self, partition: TopicPartition, epochs: Epochs) -> bool:
        """Return whether the partition has stayed assigned since `epochs` was read."""
        return partition in epochs and epochs[partition] == self._epochs.get(partition)

    def done(self, partition: TopicPartition, next_offset: int) -> None:
        """Record that all records before `next_offset` are done; a lower offset is ignored."""
        self._done[partition] = max(next_offset, self._done.get(partition, 0))

    def uncommitted(self) -> dict[TopicPartition, int]:
        """Return the offsets that are done and not committed yet."""
        # Only changed offsets, so that a poll without new records causes no commit.
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
    """The loop's services for a sink; valid for the epochs in which the context was made.

    A sink may work on a batch for as long as its receiver is unavailable. If the partition is
    revoked meanwhile, the sink drops its state of the partition. Acknowledgements of the batch are
    then ignored, even if the partition has been assigned to the same member again.
    """

    consumer: Consumer
    """The consumer, for queries of offsets and for seeking."""
    dead_letters: DeadLetterQueue
    """Takes records that cannot be used."""
    progress: AcknowledgedOffsets
    lag: Lag
    epochs: Epochs

    def is_current(self, partition: TopicPartition) -> bool:
        """Return whether the partition has stayed assigned since this context was made."""
        return self.progress.is_current(partition, self.epochs)

    def acknowledge(
        self,
        partition: TopicPartition,
        next_offset: int,
        *,
        time_ns: int | None = None,
        commits_itself: bool = False,
    ) -> None:
        """Record that all records before `next_offset` are done.

        `time_ns` is the time of the newest of these records. The call has no effect unless the
        partition has stayed assigned since this context was made. With `commits_itself`, the sink
        commits the offset, and the loop does not.
        """
        if not self.is_current(partition):
            return
        time_ms = None if time_ns is None else time_ns // NS_PER_MS
        self.lag.done(partition, next_offset, time_ms=time_ms)
        # An offset in the sink's own transaction must not be committed a second time.
        if not commits_itself:
            self.progress.done(partition, next_offset)


class Refusal(NamedTuple):
    """Why an event cannot be delivered."""

    reason: str
    """The reason in one word, as in the event's dead letter."""
    detail: str
    """The reason in one sentence."""


class RejectedEvent(NamedTuple):
    """An event that a sink rejected, and the record from which the sink first read it."""

    record: Record
    event: GpuEvent


class Sink(Protocol):
    """Processes polled records; each kind of sink is a subclass.

    The loop makes one call at a time: `assign` for new partitions, then `prepare` and `handle`
    repeatedly. Only `release` may be called while `handle` runs.

        for each poll:   await sink.prepare(context)          # catch up with new partitions
                         await sink.handle(batches, context)  # send; context.acknowledge(…)
                         publish the dead letters, commit acknowledged offsets

    Offsets are committed only after they were acknowledged. Unacknowledged records are read again
    by this sink or by the partition's next owner. While its receiver is unavailable, a sink has two
    options. It may wait in `handle`; the loop then keeps the membership in the group. Or it returns
    from `handle`, reports partitions as `full`, and acknowledges the records later. Records that
    cannot be used go to `context.dead_letters` and are acknowledged as well.
    """

    name: str
    """The name of the kind."""
    receiver: str
    """The destination shown to people: an address without secrets."""

    @abstractmethod
    async def assign(self, partitions: Partitions) -> None:
        """Record that partitions are newly assigned; must neither block nor raise."""

    async def prepare(self, context: SinkContext) -> Partitions:
        """Prepare for the next `handle`; return the partitions whose polled records are dropped.

        The sink has set these partitions to another offset, from which they are polled again.
        """
        del context
        return frozenset()

    def full(self) -> Partitions:
        """Return the partitions that must not be polled for now.

        A sink whose `handle` returns before its records are done must implement this, to limit the
        number of records that wait.
        """
        return frozenset()

    @abstractmethod
    async def handle(self, batches: Sequence[Batch], context: SinkContext) -> None:
        """Process the polled records, if any; return when the sink accepts more."""

    @abstractmethod
    async def release(self, partitions: Partitions, context: SinkContext) -> None:
        """Finish the work on revoked partitions quickly, and forget them.

        May raise UnavailableError or BusError; the next owner then does the unfinished work.
        """

    async def handle_gap(self, gap: Gap) -> None:
        """Handle a gap: records that were deleted before they were read, or cannot be unpacked."""
        del gap  # most kinds do nothing more than the loop, which reports the gap

    max_redelivered: int = 1
    """Maximum number of events per call of `redeliver`."""

    async def redeliver(self, rejected: Sequence[RejectedEvent], /) -> Sequence[Refusal | None]:
        """Deliver rejected events again; return one result per event, in the same order.

        The result is the reason if an event is rejected again, and `None` if it is delivered. Only
        sinks that take replays (`gpuledger_sinks.replays`) implement this. It may be called at any
        time and does not change the sink's state. Raises ReceiverUnavailableError or BusError if
        the receiver did not answer; the caller must then call it again with the same events.
        """
        return [Refusal("rejected", "this sink does not support replays")] * len(rejected)


class OpenSink(Protocol):
    """Opens a sink of one kind: the function `open_sink` of the kind's module."""

    def __call__(
        self,
        *,
        bus: Bus,
        settings: Any,  # noqa: ANN401  # the kind's section
        readiness: Readiness,
        clock: Clock,
        group: str,
    ) -> AbstractAsyncContextManager[Sink]:
        """Return a context manager that opens the sink; `group` is its consumer group."""


@dataclass(frozen=True, kw_only=True)
class ConsumerConfig:
    """How a sink reads its records."""

    group: str
    dead_letters_of: str | None = None
    """The group that dead letters name as their consumer; `None` means `group`."""
    group_instance_id: str | None = None
    decoders: Mapping[str, Decoder[Any]]
    """The topics to read, with their decoders."""
    poll_seconds: float = 0.5
    """How long a poll waits, in seconds. While the sink is idle, `handle` is called at least this
    often."""
    max_poll_records: int = 500
    """Maximum number of records per poll, which bounds memory."""
