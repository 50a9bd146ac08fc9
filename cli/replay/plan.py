"""What to read of which topic: the range in offsets, and whether all of it is still kept.

Records are looked up by their time, which for ticks and their events is the end of the tick.
"""

from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, NamedTuple

from cli.replay.time_args import write_duration, write_moment
from enricher.join.replay.replay import TimeRange
from gpuledger.bus.log_reader import HistoryReader, Span
from gpuledger.bus.protocol import TopicPartition
from gpuledger.errors import TopicsError, UserError
from gpuledger.topics import EVENTS, PODS, SAMPLES


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the user asked for."""

    wanted: TimeRange
    """Which ticks."""
    lead_in_ms: int
    """How much before them to begin, for what a tick says of the one before."""
    lateness_ms: int
    """How much later than its time a tick may have come."""
    accept_gaps: bool
    """Whether to go on where a part of the range is no longer kept."""
    compare: bool
    """Whether to read the first run's events as well."""


class Part(NamedTuple):
    """What is read of one partition."""

    number: int
    """The partition's number."""
    pods: Span
    """All that is kept of its pods."""
    ticks: Span
    """The ticks, lead-in and late ones included."""
    events: Span
    """The first run's events; empty where nothing is compared."""


class Plan(NamedTuple):
    """What is read, and what is missing."""

    parts: list[Part]
    """The partitions that have ticks, or events to compare."""
    partitions: int
    """How many there are in all."""
    warnings: list[str]
    """What is no longer kept, where that was accepted."""


_NOTHING: Final = Span(0, 0)


async def make_plan(reader: HistoryReader, asked: Asked) -> Plan:
    """Look the range up; raises `TopicsError` and, where it is not all kept, `UserError`."""
    pods = await reader.spans(PODS.name)
    kept = await reader.spans(SAMPLES.name)
    events: Mapping[TopicPartition, Span] = {}
    if asked.compare:
        events = await reader.spans(EVENTS.name)
    _refuse_other_counts(pods, kept, events)
    warnings = await _refuse_removed(reader, kept, asked)
    warnings += await _refuse_removed(reader, events, asked)
    tick_spans = await _cut(reader, kept, asked, lead_in_ms=asked.lead_in_ms)
    event_spans = await _cut(reader, events, asked, lead_in_ms=0)
    parts = [
        Part(
            number=number,
            pods=pods[TopicPartition(PODS.name, number)],
            ticks=tick_spans[TopicPartition(SAMPLES.name, number)],
            events=event_spans.get(TopicPartition(EVENTS.name, number), _NOTHING),
        )
        for number in range(len(kept))
    ]
    wanted = [part for part in parts if _size(part.ticks) or _size(part.events)]
    return Plan(wanted, len(kept), warnings)


def _refuse_other_counts(*spans: Mapping[TopicPartition, Span]) -> None:
    counts = {next(iter(each)).topic: len(each) for each in spans if each}
    if len(set(counts.values())) > 1:
        raise TopicsError(
            f"topics placed by node must have the same number of partitions, found {counts};"
            " `gpuledger topics check` says what each should have"
        )


async def _refuse_removed(
    reader: HistoryReader, kept: Mapping[TopicPartition, Span], asked: Asked
) -> list[str]:
    """Return how much of the range retention has removed; as a warning where that was accepted."""
    begin_ms = asked.wanted.begin_ms
    removed = [place for place, span in kept.items() if span.first > 0]
    at_begin = await reader.offsets_at(removed, begin_ms) if removed else {}
    oldest_ms = {
        place: await _oldest_ms(reader, place, kept[place])
        for place in removed
        if at_begin[place] <= kept[place].first
    }
    late = {place: oldest for place, oldest in oldest_ms.items() if oldest > begin_ms}
    if not late:
        return []
    last_ms = min(max(late.values()), asked.wanted.end_ms)
    topic = next(iter(late)).topic
    lost = (
        f"{topic}: retention has removed the first {write_duration(last_ms - begin_ms)} of"
        f" {write_duration(asked.wanted.end_ms - begin_ms)} in {len(late)} of {len(kept)}"
        " partitions"
    )
    if asked.accept_gaps:
        return [lost]
    if last_ms == asked.wanted.end_ms:
        raise UserError(
            f"--from {write_moment(begin_ms)}: {lost}, which is all; take a later range"
        )
    whole_second_ms = -(-last_ms // 1000) * 1000
    raise UserError(
        f"--from {write_moment(begin_ms)}: {lost}; take --from {write_moment(whole_second_ms)}"
        " or later, or --accept-gaps to replay what is kept"
    )


async def _oldest_ms(reader: HistoryReader, place: TopicPartition, span: Span) -> int:
    """Return the time of the oldest record kept; without one, nothing of any time is."""
    async with aclosing(reader.read(place, span)) as chunks:
        async for records in chunks:
            return records[0].timestamp_ms
    return 0


async def _cut(
    reader: HistoryReader,
    kept: Mapping[TopicPartition, Span],
    asked: Asked,
    *,
    lead_in_ms: int,
) -> dict[TopicPartition, Span]:
    """Return what is to be read of each partition, with the offsets as they are now."""
    if not kept:
        return {}
    first = await reader.offsets_at(kept, asked.wanted.begin_ms - lead_in_ms)
    end = await reader.offsets_at(kept, asked.wanted.end_ms + asked.lateness_ms)
    return {
        place: Span(max(first[place], span.first), min(end[place], span.end))
        for place, span in kept.items()
    }


def _size(span: Span) -> int:
    return max(0, span.end - span.first)
