"""Where letters are put back: the receiver of the sink, or the topic of the join, that had them.

A letter goes to the consumer that refused it and to nobody else (`LetterTarget`).

`SinkTarget` hands events to the receiver of a sink, by the settings of that sink. Written back to
its topic, an event would come to every sink once more. A receiver of alerts gets nothing: it is
told of the present, and what was true when the letter was written may be over.

`JoinTarget` writes records back to the topic, the partition and the key that they had: the join
alone reads there. Only what it would book is written: it passes over a tick that is not beyond what
is booked of its node, and would refuse again what contradicts itself, or lies where its node's
records do not belong. The join's own rules say so.
"""

from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, NamedTuple, Protocol

from typing_extensions import override

from gpuledger.bus.protocol import Bus, History, Message, Producer, Record
from gpuledger.clock import NS_PER_MS, Clock
from gpuledger.codec import decoder_of
from gpuledger.errors import UndecodableError, UserError
from gpuledger.keys import node_key
from gpuledger.ledger.holders import TooManyEntriesError
from gpuledger.records import NodeProgress, NodeSample
from gpuledger.runtime import Readiness
from gpuledger.topics import Topic, Topics
from gpuledger_cli.dead_letters.letter_log import KeptLetter
from gpuledger_enricher.join.progress.passage import is_duplicate, seq_ahead_seconds
from gpuledger_enricher.join.progress.watermarks import NodeWatermarks
from gpuledger_enricher.join.validation import (
    InvalidTickError,
    book_valid_tick,
    explain_misplaced,
    placement_rule,
    settle_valid_ends,
)
from gpuledger_sinks.redelivery import Redelivery, Refusals, RefusedEvent
from gpuledger_sinks.registry import KINDS, SinkKind


class Usable(NamedTuple):
    """A letter's record as it was read then, and what it says."""

    record: Record
    value: Any
    """A record of its topic: one with `time_ns`."""


class LetterTarget(Protocol):
    """The consumer to whom letters are put back, or what it hands on to."""

    consumer: str
    """The consumer group whose letters it takes."""
    receiver: str
    """Where letters go, for people."""
    max_batch: int
    """The most letters of one delivery."""

    def take(self, letter: KeptLetter) -> Usable | str:
        """Return what can be delivered of a letter, or why nothing can; nothing is sent."""

    async def deliver(self, batch: Sequence[Usable]) -> Refusals:
        """Return once each record is taken or refused; raises as `Redelivery.deliver`."""


def usable(letter: KeptLetter, topics: Sequence[Topic]) -> Usable | str:
    """Return the record of a letter that is of one of these topics, or why there is none."""
    content = letter.content
    topic = next((topic for topic in topics if topic.name == content.topic), None)
    if topic is None:
        return f"it is of a record of {content.topic}, which is not read there"
    if content.last_offset is not None:
        return "it stands for a batch that cannot be unpacked"
    if letter.value is None:
        return "it has no bytes: there were none, or more than a letter has room for"
    try:
        value = decoder_of(topic.name, topic.record).decode(letter.value)
    except UndecodableError as error:
        return f"it cannot be decoded by this version either: {error}"
    record = Record(
        topic=content.topic,
        partition=content.partition,
        offset=content.offset,
        # As whoever wrote it stamps it: the letter does not say what the record had.
        timestamp_ms=value.time_ns // NS_PER_MS,
        key=letter.key,
        value=letter.value,
    )
    return Usable(record, value)


def replayed_kind(name: str) -> SinkKind:
    """Return the kind of sink to whose receiver letters go; raises UserError for one that is none.

    Also for one that tells of the present alone.
    """
    able = {kind.name: kind for kind in KINDS.values() if kind.redelivery}
    if name not in able:
        why = (
            "an alert or an incident of then is not sent now"
            if name in KINDS
            else f"there is no sink {name!r}"
        )
        raise UserError(f"--sink: {why}; give one of {', '.join(able)}")
    return able[name]


@asynccontextmanager
async def open_sink_target(
    kind: SinkKind,
    *,
    bus: Bus,
    settings: Any,  # noqa: ANN401  # the kind's section
    group: str,
    readiness: Readiness,
    clock: Clock,
) -> AsyncIterator["SinkTarget"]:
    """Open what hands letters of the group to the receiver that its settings name."""
    async with kind.load_redelivery()(
        bus=bus, settings=settings, readiness=readiness, clock=clock
    ) as redelivery:
        yield SinkTarget(redelivery, consumer=group, topics=[bus.topics.events])


class SinkTarget(LetterTarget):
    """Hands events to the receiver of a sink."""

    def __init__(self, redelivery: Redelivery, *, consumer: str, topics: Sequence[Topic]) -> None:
        self.consumer, self.receiver = consumer, redelivery.receiver
        self.max_batch = redelivery.max_batch
        self._redelivery, self._topics = redelivery, topics

    @override
    def take(self, letter: KeptLetter) -> Usable | str:
        return usable(letter, self._topics)

    @override
    async def deliver(self, batch: Sequence[Usable]) -> Refusals:
        return await self._redelivery.deliver(
            [RefusedEvent(*usable_letter) for usable_letter in batch]
        )


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

    max_batch = 100

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
