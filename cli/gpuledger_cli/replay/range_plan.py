"""What to read of which topic: the range in offsets, and whether all of it is still kept.

Records are looked up by their time, which for ticks and their events is the end of the tick.
"""

from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, NamedTuple

from gpuledger.bus.protocol import HistoryReader, Span, TopicPartition
from gpuledger.errors import UserError
from gpuledger.time_ranges import write_duration, write_moment
from gpuledger.topics import Topics, agreed_partitions


class TimeRange(NamedTuple):
    """From `begin_ms` up to and without `end_ms`, milliseconds since the epoch."""

    begin_ms: int
    end_ms: int

    def has(self, timestamp_ms: int) -> bool:
        """Return whether a record of that time belongs to it."""
        return self.begin_ms <= timestamp_ms < self.end_ms


@dataclass(frozen=True, kw_only=True)
class ReplayRequest:
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
    nodes: Span
    """All that is kept of its nodes."""
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
    namespaces: Mapping[TopicPartition, Span]
    """All that is kept of namespaces, of which every partition needs all."""
    warnings: list[str]
    """What is no longer kept, where that was accepted."""


_NOTHING: Final = Span(0, 0)


async def make_plan(reader: HistoryReader, request: ReplayRequest, *, topics: Topics) -> Plan:
    """Look the range up; raises `TopicsError` and, where it is not all kept, `UserError`."""
    pods = await reader.spans(topics.pods.name)
    nodes = await reader.spans(topics.nodes.name)
    namespaces = await reader.spans(topics.namespaces.name)
    kept = await reader.spans(topics.samples.name)
    events: Mapping[TopicPartition, Span] = {}
    if request.compare:
        events = await reader.spans(topics.events.name)
    # By partition number a node's ticks, pods and events meet; other numbers would part them.
    counts = {next(iter(spans)).topic: len(spans) for spans in (pods, nodes, kept, events) if spans}
    if counts:
        agreed_partitions(counts)
    warnings = await _refuse_removed(reader, kept, request)
    warnings += await _refuse_removed(reader, events, request)
    tick_spans = await _cut(reader, kept, request, lead_in_ms=request.lead_in_ms)
    event_spans = await _cut(reader, events, request, lead_in_ms=0)
    parts = [
        Part(
            number=number,
            pods=pods[TopicPartition(topics.pods.name, number)],
            nodes=nodes[TopicPartition(topics.nodes.name, number)],
            ticks=tick_spans[TopicPartition(topics.samples.name, number)],
            events=event_spans.get(TopicPartition(topics.events.name, number), _NOTHING),
        )
        for number in range(len(kept))
    ]
    wanted = [
        part for part in parts if any(span.end > span.first for span in (part.ticks, part.events))
    ]
    return Plan(wanted, len(kept), namespaces, warnings)


async def _refuse_removed(
    reader: HistoryReader, kept: Mapping[TopicPartition, Span], request: ReplayRequest
) -> list[str]:
    """Return how much of the range retention has removed; as a warning where that was accepted."""
    begin_ms = request.wanted.begin_ms
    removed = [partition for partition, span in kept.items() if span.first > 0]
    at_begin = await reader.offsets_at(removed, begin_ms) if removed else {}
    # Only where the range begins before what is kept is the oldest record worth a read.
    oldest_ms = {
        partition: await _oldest_ms(reader, partition, kept[partition])
        for partition in removed
        if at_begin[partition] <= kept[partition].first
    }
    late = {partition: oldest for partition, oldest in oldest_ms.items() if oldest > begin_ms}
    if not late:
        return []
    last_ms = min(max(late.values()), request.wanted.end_ms)
    topic = next(iter(late)).topic
    lost = (
        f"{topic}: retention has removed the first {write_duration(last_ms - begin_ms)} of"
        f" {write_duration(request.wanted.end_ms - begin_ms)} in {len(late)} of {len(kept)}"
        " partitions"
    )
    if request.accept_gaps:
        return [lost]
    if last_ms == request.wanted.end_ms:
        raise UserError(
            f"--from {write_moment(begin_ms)}: {lost}, which is all; take a later range"
        )
    # Rounded up: what is proposed must be there.
    whole_second_ms = -(-last_ms // 1000) * 1000
    raise UserError(
        f"--from {write_moment(begin_ms)}: {lost}; take --from {write_moment(whole_second_ms)}"
        " or later, or --accept-gaps to replay what is kept"
    )


async def _oldest_ms(reader: HistoryReader, partition: TopicPartition, span: Span) -> int:
    """Return the time of the oldest record kept; without one, nothing of any time is."""
    async with aclosing(reader.read(partition, span)) as chunks:
        async for records in chunks:
            return records[0].timestamp_ms
    return 0


async def _cut(
    reader: HistoryReader,
    kept: Mapping[TopicPartition, Span],
    request: ReplayRequest,
    *,
    lead_in_ms: int,
) -> dict[TopicPartition, Span]:
    """Return what is to be read of each partition, with the offsets as they are now."""
    if not kept:
        return {}
    first = await reader.offsets_at(kept, request.wanted.begin_ms - lead_in_ms)
    end = await reader.offsets_at(kept, request.wanted.end_ms + request.lateness_ms)
    return {
        partition: Span(max(first[partition], span.first), min(end[partition], span.end))
        for partition, span in kept.items()
    }
