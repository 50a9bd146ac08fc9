"""The loop of a replay: partition by partition, pods first, then ticks; beside it the first run.

Memory is bounded by one partition's pods and nodes, some batches, and the events that wait for
their counterpart.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import NamedTuple

import msgspec

from cli.replay.outputs import Write
from cli.replay.plan import Asked, Part, Plan
from enricher.join.replay import Replay, TimeRange
from enricher.join.replay_diff import Comparison
from enricher.join.validation import placement_rule
from gpuledger.bus.protocol import History, HistoryReader, Record, TopicPartition
from gpuledger.dead_letter_queue import describe_unreadable
from gpuledger.errors import UserError
from gpuledger.topics import EVENTS, PODS, SAMPLES

_Chunks = AsyncGenerator[Sequence[Record], None]


class ReplayOutcome(NamedTuple):
    """What a replay came to."""

    events: int
    """Events made."""
    unusable: int
    """Records that could not be used."""
    first_detail: str | None
    """Why the first of them could not."""


class Replaying:
    """Runs the parts of a plan one after the other."""

    def __init__(
        self,
        *,
        wanted: TimeRange,
        partitions: int,
        write: Write,
        comparison: Comparison | None,
        advance: Callable[[int], None],
    ) -> None:
        self._wanted = wanted
        self._replay = Replay(wanted, is_placed=placement_rule(partitions=partitions))
        self._write = write
        self._comparison = comparison
        self._advance = advance
        self._events = 0

    async def run(self, history: History, plan: Plan) -> ReplayOutcome:
        """Replay everything; a reader of its own brings the events of the first run."""
        async with history.reader() as reader, history.reader() as other:
            for part in plan.parts:
                await self._run_part(part, reader=reader, other=other)
        unusable = self._replay.unusable
        return ReplayOutcome(self._events, unusable.buried, unusable.first_detail)

    async def _run_part(self, part: Part, *, reader: HistoryReader, other: HistoryReader) -> None:
        await self._take_pods(part, reader)
        async with AsyncExitStack() as opened:
            ticks = reader.read(TopicPartition(SAMPLES.name, part.number), part.ticks)
            await opened.enter_async_context(aclosing(ticks))
            if self._comparison is None:
                while await self._replay_some(ticks, part.number):
                    pass
            else:
                first = other.read(TopicPartition(EVENTS.name, part.number), part.events)
                await opened.enter_async_context(aclosing(first))
                await self._run_beside(ticks, first, part.number, self._comparison)
        self._replay.end_partition(part.number)

    async def _take_pods(self, part: Part, reader: HistoryReader) -> None:
        async with aclosing(
            reader.read(TopicPartition(PODS.name, part.number), part.pods)
        ) as chunks:
            async for records in chunks:
                self._replay.take_pods(records)

    async def _run_beside(
        self, ticks: _Chunks, first: _Chunks, number: int, comparison: Comparison
    ) -> None:
        """Bring both runs on so that few events of either wait for the other's."""
        has_first = has_ticks = True
        while has_first or has_ticks:
            if has_first and (comparison.wants_first or not has_ticks):
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
                self._compare_first(record, comparison)
        return True

    def _compare_first(self, record: Record, comparison: Comparison) -> None:
        """Take an event of the first run; what is none is counted, as sinks put it aside."""
        try:
            comparison.take_first([record.value or b""])
        except msgspec.DecodeError as error:
            detail = f"{record.topic}: not an event: {error}"
            self._replay.unusable.reject(record, reason="undecodable", detail=detail)


def count_ticks(plan: Plan) -> int:
    """Return how many ticks there are to read, as far as offsets tell."""
    return sum(part.ticks.end - part.ticks.first for part in plan.parts)


def refuse_nothing(plan: Plan, asked: Asked, *, shown: str) -> None:
    """Raise `UserError` where there is no tick and no event to look at."""
    if not plan.parts:
        what = "ticks nor events" if asked.compare else "ticks"
        raise UserError(f"there are no {what} {shown} in the topics")
