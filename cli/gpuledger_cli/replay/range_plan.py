"""Plans a replay: the offsets to read from each topic, and whether the range is still kept.

Records are looked up by time. The time of ticks and their events is the end of the tick.
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
    """A range from `begin_ms` to `end_ms` (exclusive), in milliseconds since the epoch."""

    begin_ms: int
    end_ms: int

    def has(self, timestamp_ms: int) -> bool:
        """Return whether the range contains a time."""
        return self.begin_ms <= timestamp_ms < self.end_ms


@dataclass(frozen=True, kw_only=True)
class ReplayRequest:
    """The options of a replay."""

    wanted: TimeRange
    """The range of ticks to replay."""
    lead_in_ms: int
    """How long before the range to begin, because a tick may refer to earlier ones."""
    lateness_ms: int
    """How long after its time a tick may have arrived."""
    accept_gaps: bool
    """Whether to continue if a part of the range is no longer kept."""
    compare: bool
    """Whether to read the first run's events as well."""


class Part(NamedTuple):
    """The spans to read from a partition."""

    number: int
    """Number of the partition."""
    pods: Span
    """All records of pods."""
    nodes: Span
    """All records of nodes."""
    ticks: Span
    """The ticks, including those of the lead-in and those that arrived late."""
    events: Span
    """The first run's events; empty if nothing is compared."""


class Plan(NamedTuple):
    """The spans to read, and warnings about missing records."""

    parts: list[Part]
    """The partitions that have ticks, or events to compare."""
    partitions: int
    """Number of all partitions."""
    namespaces: Mapping[TopicPartition, Span]
    """All records of namespaces, which every partition needs."""
    warnings: list[str]
    """Parts of the range that are no longer kept, if the request accepts gaps."""


_NOTHING: Final = Span(0, 0)


async def make_plan(reader: HistoryReader, request: ReplayRequest, *, topics: Topics) -> Plan:
    """Return the spans to read for a replay.

    Raises `TopicsError` if a topic is missing or the numbers of partitions differ, and `UserError`
    if a part of the range is no longer kept.
    """
    pods = await reader.spans(topics.pods.name)
    nodes = await reader.spans(topics.nodes.name)
    namespaces = await reader.spans(topics.namespaces.name)
    kept = await reader.spans(topics.samples.name)
    events: Mapping[TopicPartition, Span] = {}
    if request.compare:
        events = await reader.spans(topics.events.name)
    # A node's ticks, pods and events must be in partitions of the same number.
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
    """Return warnings about removed records; raises `UserError` if gaps are not accepted."""
    begin_ms = request.wanted.begin_ms
    removed = [partition for partition, span in kept.items() if span.first > 0]
    at_begin = await reader.offsets_at(removed, begin_ms) if removed else {}
    # The oldest record matters only if the range begins before it.
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
            f"--from {write_moment(begin_ms)}: {lost}, the whole range; give a later range"
        )
    # Rounded up to whole seconds, because records at the proposed time must still exist.
    whole_second_ms = -(-last_ms // 1000) * 1000
    raise UserError(
        f"--from {write_moment(begin_ms)}: {lost}; give --from {write_moment(whole_second_ms)}"
        " or later, or --accept-gaps to replay the rest"
    )


async def _oldest_ms(reader: HistoryReader, partition: TopicPartition, span: Span) -> int:
    """Return the time of the oldest record; 0 if there is none."""
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
    """Return the span of offsets to read from each partition."""
    if not kept:
        return {}
    first = await reader.offsets_at(kept, request.wanted.begin_ms - lead_in_ms)
    end = await reader.offsets_at(kept, request.wanted.end_ms + request.lateness_ms)
    return {
        partition: Span(max(first[partition], span.first), min(end[partition], span.end))
        for partition, span in kept.items()
    }
