"""Puts back what the join refused: to the topic, the partition and the key that it had.

The join alone reads there, so nobody is told twice. Only what it would book is written: it passes
over a tick that is not beyond what is booked of its node, and what contradicts itself, or lies
where its node's records do not belong, it would refuse again. By its own rules for both.
"""

from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Final

from typing_extensions import override

from cli.dead_letters.letter_filter import KeptLetter
from cli.dead_letters.letter_target import LetterTarget, Usable, usable
from enricher.join.progress.passage import is_duplicate, seq_ahead_seconds
from enricher.join.progress.watermarks import NodeWatermarks
from enricher.join.validation import (
    InvalidTickError,
    book_valid_tick,
    explain_misplaced,
    placement_rule,
    settle_valid_ends,
)
from gpuledger.bus.protocol import Bus, History, Message, Producer
from gpuledger.clock import NS_PER_MS, Clock
from gpuledger.codec import decoder_of
from gpuledger.errors import UndecodableError
from gpuledger.keys import node_key
from gpuledger.ledger.holders import TooManyEntriesError
from gpuledger.records import NodeProgress, NodeSample
from gpuledger.topics import Topics
from sinks.redelivery import Refusals

_MAX_BATCH: Final = 100

Booked = defaultdict[int, NodeWatermarks]
"""How far nodes are booked, by partition."""


@asynccontextmanager
async def open_join_target(
    *, bus: Bus, history: History, group: str, clock: Clock
) -> AsyncIterator["JoinTarget"]:
    """Open what writes letters of the group back, once it has read how far nodes are booked."""
    partitions = await bus.partitions(bus.topics.samples.name)
    booked = await read_progress(history)
    async with bus.producer() as producer:
        yield JoinTarget(
            producer=producer,
            topics=bus.topics,
            partitions=partitions,
            booked=booked,
            consumer=group,
            clock=clock,
        )


async def read_progress(history: History) -> Booked:
    """Return how far nodes are booked, as the join has written down by now."""
    booked: Booked = defaultdict(NodeWatermarks)
    name = history.topics.progress.name
    decoder = decoder_of(name, NodeProgress)
    async with history.reader() as reader:
        for at, span in (await reader.spans(name)).items():
            async with aclosing(reader.read(at, span)) as chunks:
                async for records in chunks:
                    for record in records:
                        if record.value is None and record.key is not None:
                            booked[at.partition].remove(record.key.decode(errors="replace"))
                            continue
                        with suppress(UndecodableError):  # the join has its letter
                            progress = decoder.decode(record.value)
                            heard_ns = record.timestamp_ms * NS_PER_MS
                            booked[at.partition].take(progress, heard_ns=heard_ns)
    return booked


class JoinTarget(LetterTarget):
    """Writes records back to their own partitions."""

    max_batch = _MAX_BATCH

    def __init__(
        self,
        *,
        producer: Producer,
        topics: Topics,
        partitions: int,
        booked: Booked,
        consumer: str,
        clock: Clock,
    ) -> None:
        self.consumer, self.receiver = consumer, "the topic of each record"
        self._producer, self._booked, self._clock = producer, booked, clock
        # What podwatch writes is the state of now: it is written anew, and not put back.
        self._topics = (topics.samples, topics.processes, topics.incidents)
        self._is_placed = placement_rule(partitions=partitions)

    @override
    def take(self, letter: KeptLetter) -> Usable | str:
        found = usable(letter, self._topics)
        if isinstance(found, str):
            return found
        record, node = found.record, node_key(found.value)
        if record.key != node.encode() or not self._is_placed(node, record.partition):
            return explain_misplaced(record, node=node, key=node, is_placed=self._is_placed)
        if isinstance(found.value, NodeSample):
            return self._why_not_booked(found, node=node) or found
        return found

    @override
    async def deliver(self, batch: Sequence[Usable]) -> Refusals:
        """Write records back one after another: a node's ticks keep their order."""
        for record, _ in batch:
            message = Message(key=record.key, value=record.value, timestamp_ms=record.timestamp_ms)
            await self._producer.publish(record.topic, record.partition, [message])
        return [None] * len(batch)

    def _why_not_booked(self, found: Usable, *, node: str) -> str | None:
        record, sample = found.record, found.value
        watermark = self._booked[record.partition].of(node)
        if is_duplicate(sample, watermark):
            return "ticks behind it are booked of its node: the join would pass over it"
        ahead_seconds = seq_ahead_seconds(
            sample, watermark, written_ms=record.timestamp_ms, now_ns=self._clock.time_ns()
        )
        if ahead_seconds is not None:
            return f"its seq is {ahead_seconds:.0f} s ahead of its boot: nothing behind would count"
        try:
            book_valid_tick(sample)
            settle_valid_ends(sample)
        except InvalidTickError as error:
            return f"it contradicts itself still: {error}"
        except TooManyEntriesError as error:
            return f"its event would be too large still: {error}"
        return None
