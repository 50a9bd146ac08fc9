"""Runs the join again over ticks that are still kept, and writes its events.

`Replay` runs the join's stage for one partition after the other, so that memory is bounded by the
pods and nodes of one partition. The events are written to a file of JSON lines or a topic, or are
only compared. Each output is a context that yields a function `write`. After an error, no partial
file remains.
"""

import gzip
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, cast

import msgspec
from typing_extensions import override

from gpuledger.bus.protocol import Bus, HistoryReader, Message, Record, TopicPartition
from gpuledger.dead_letter_queue import DeadLetterQueue, describe_unreadable
from gpuledger.errors import TopicsError, UserError
from gpuledger.placement import IsPlaced, placement_rule
from gpuledger.topics import Topic, Topics
from gpuledger_cli.replay.range_plan import Part, Plan, ReplayRequest, TimeRange
from gpuledger_enricher.join.replay_diff import Comparison
from gpuledger_enricher.join.stage import JoinStage

CONSUMER: Final = "gpuledger-replay"


class Replay:
    """Books a partition's ticks again, like a newly started worker of the join."""

    def __init__(self, wanted: TimeRange, *, is_placed: IsPlaced, topics: Topics) -> None:
        self.unusable = _Unusable(topics.dead_letters)
        self._wanted = wanted
        self._stage = JoinStage(dead_letters=self.unusable, is_placed=is_placed, topics=topics)

    def take_pods(self, records: Sequence[Record]) -> None:
        """Add records of pods, except tombstones.

        Without tombstones, a deleted pod stays known; it still existed at the time of its ticks.
        """
        self._stage.take_pods(_without_tombstones(records))

    def take_nodes(self, records: Sequence[Record]) -> None:
        """Add records of nodes, except tombstones."""
        self._stage.take_nodes(_without_tombstones(records))

    def take_namespaces(self, records: Sequence[Record]) -> None:
        """Add records of namespaces, except tombstones; call it once for all partitions."""
        self._stage.take_namespaces(_without_tombstones(records))

    def take_samples(self, records: Sequence[Record]) -> list[Message]:
        """Book ticks, and return the events of the ticks in the range.

        Ticks before the range are also booked, because a later tick may repeat one of them, or
        follow it after a gap.
        """
        events = self._stage.take_samples(records)
        return [event for event in events if self._wanted.has(event.timestamp_ms)]

    def end_partition(self, partition: int) -> None:
        """Drop the state of a partition after its last tick."""
        self._stage.forget(partition)


def _without_tombstones(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.value is not None or record.unreadable]


class _Unusable(DeadLetterQueue):
    """Counts records that cannot be used; the first run has already rejected them."""

    def __init__(self, topic: Topic) -> None:
        super().__init__(consumer=CONSUMER, producer=_Nowhere(), topic=topic, partitions=1)
        self.first_detail: str | None = None

    @override
    def reject(self, record: Record, *, reason: str, detail: str) -> None:
        # Records are not kept, because a replay of days could have very many of them.
        self.rejected += 1
        if self.first_detail is None:
            self.first_detail = detail


class _Nowhere:
    """A producer for dead letters that are never published."""

    async def publish(self, topic: str, partition: int, messages: Sequence[Message]) -> None:
        """Publish nothing."""


Write = Callable[[int, Sequence[Message]], Awaitable[None]]
"""Writes the next events of a partition, which is given by its number."""
_PACKING_LEVEL: Final = 1


@asynccontextmanager
async def to_nowhere() -> AsyncIterator[Write]:
    """Yield an output that drops everything, for comparisons."""

    async def write(_partition: int, _events: Sequence[Message]) -> None:
        return

    yield write


@asynccontextmanager
async def to_file(path: Path) -> AsyncIterator[Write]:
    """Write one event per line, compressed if the name ends in `.gz`.

    The file gets its name when it is complete. Raises `UserError` if it cannot be written.
    """
    part = path.with_name(f"{path.name}.part")
    with _naming(path):
        raw = part.open("wb")
    try:
        with raw, _packed(raw) if path.suffix == ".gz" else raw as file:

            async def write(_partition: int, events: Sequence[Message]) -> None:
                with _naming(path):
                    file.writelines((event.value or b"") + b"\n" for event in events)

            yield write
        with _naming(path):
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@asynccontextmanager
async def to_topic(bus: Bus, topic: str) -> AsyncIterator[Write]:
    """Publish each event to the partition number that its tick was read from.

    Raises `TopicsError` if the topic is one of gpuledger's own, or if it does not have as many
    partitions as the events topic.
    """
    if topic in bus.topics.by_name:
        raise TopicsError(
            f"--topic {topic}: the topic is read by components; give a topic with another name"
        )
    events = bus.topics.events.name
    count, wanted = await bus.partitions(topic), await bus.partitions(events)
    if count != wanted:
        raise TopicsError(
            f"--topic {topic}: it has {count} partitions and needs {wanted}, like {events}"
        )
    async with bus.producer() as producer:

        async def write(partition: int, events: Sequence[Message]) -> None:
            if events:
                await producer.publish(topic, partition, events)

        yield write


@contextmanager
def _packed(raw: BinaryIO) -> Iterator[BinaryIO]:
    # Without name and time, so that the same events make the same bytes.
    with gzip.GzipFile(
        filename="", mode="wb", compresslevel=_PACKING_LEVEL, fileobj=raw, mtime=0
    ) as packed:
        yield cast("BinaryIO", packed)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"--output: cannot write {path}: {error.strerror or error}") from error


_Chunks = AsyncGenerator[Sequence[Record], None]


async def _take_all(chunks: _Chunks, take: Callable[[Sequence[Record]], None]) -> None:
    async with aclosing(chunks):
        async for records in chunks:
            take(records)


class ReplayOutcome(NamedTuple):
    """The result of a replay."""

    events: int
    """Number of events."""
    unusable: int
    """Number of records that could not be used."""
    first_detail: str | None
    """Why the first of them could not be used."""


class Replaying:
    """Runs a plan partition by partition: first pods, then ticks and the first run's events.

    Memory is bounded by a partition's pods and nodes, a few batches, and the events that wait for
    their counterpart.
    """

    def __init__(
        self,
        *,
        wanted: TimeRange,
        partitions: int,
        topics: Topics,
        write: Write,
        comparison: Comparison | None,
        advance: Callable[[int], None],
    ) -> None:
        self._wanted = wanted
        self._topics = topics
        self._replay = Replay(
            wanted, is_placed=placement_rule(partitions=partitions), topics=topics
        )
        self._write = write
        self._comparison = comparison
        self._advance = advance
        self._events = 0

    async def run(self, history: Bus, plan: Plan) -> ReplayOutcome:
        """Replay all parts; a second reader reads the events of the first run."""
        async with history.reader() as reader, history.reader() as other:
            for partition, span in plan.namespaces.items():
                await _take_all(reader.read(partition, span), self._replay.take_namespaces)
            for part in plan.parts:
                await self._run_part(part, reader=reader, other=other)
        unusable = self._replay.unusable
        return ReplayOutcome(self._events, unusable.rejected, unusable.first_detail)

    async def _run_part(self, part: Part, *, reader: HistoryReader, other: HistoryReader) -> None:
        # All pods before the first tick, including those that the first run did not know yet.
        pods = TopicPartition(self._topics.pods.name, part.number)
        await _take_all(reader.read(pods, part.pods), self._replay.take_pods)
        nodes = TopicPartition(self._topics.nodes.name, part.number)
        await _take_all(reader.read(nodes, part.nodes), self._replay.take_nodes)
        async with AsyncExitStack() as opened:
            ticks = reader.read(TopicPartition(self._topics.samples.name, part.number), part.ticks)
            await opened.enter_async_context(aclosing(ticks))
            if self._comparison is None:
                while await self._replay_some(ticks, part.number):
                    pass
            else:
                first = other.read(
                    TopicPartition(self._topics.events.name, part.number), part.events
                )
                await opened.enter_async_context(aclosing(first))
                await self._run_beside(ticks, first, part.number, self._comparison)
        self._replay.end_partition(part.number)

    async def _run_beside(
        self, ticks: _Chunks, first: _Chunks, number: int, comparison: Comparison
    ) -> None:
        """Read both runs alternately, so that few events wait for comparison."""
        has_first = has_ticks = True
        while has_first or has_ticks:
            # Batches differ in size, so the next one is read from the run that is behind.
            if has_first and (comparison.needs_first or not has_ticks):
                has_first = await self._compare_some(first, comparison)
            else:
                has_ticks = await self._replay_some(ticks, number)
        comparison.end_partition()

    async def _replay_some(self, ticks: _Chunks, number: int) -> bool:
        records = await anext(ticks, None)
        if records is None:
            return False
        events = self._replay.take_samples(records)
        self._events += len(events)
        await self._write(number, events)
        if self._comparison is not None:
            self._comparison.take_replayed(event.value or b"" for event in events)
        self._advance(len(records))
        return True

    async def _compare_some(self, first: _Chunks, comparison: Comparison) -> bool:
        records = await anext(first, None)
        if records is None:
            return False
        for record in records:
            if record.unreadable is not None:
                detail = describe_unreadable(record, record.unreadable)
                self._replay.unusable.reject(record, reason="unreadable", detail=detail)
            elif self._wanted.has(record.timestamp_ms):
                # Records that are not events are counted as unusable; sinks reject them, too.
                try:
                    comparison.take_first([record.value or b""])
                except msgspec.DecodeError as error:
                    detail = f"{record.topic}: not an event: {error}"
                    self._replay.unusable.reject(record, reason="undecodable", detail=detail)
        return True


def count_ticks(plan: Plan) -> int:
    """Return the number of ticks to read, estimated from offsets."""
    return sum(part.ticks.end - part.ticks.first for part in plan.parts)


def refuse_nothing(plan: Plan, request: ReplayRequest, *, shown: str) -> None:
    """Raise `UserError` if there are no ticks, and no events to compare."""
    if not plan.parts:
        what = "samples or events" if request.compare else "samples"
        raise UserError(f"no {what} {shown} in the topics")
