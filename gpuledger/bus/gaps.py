"""Reports records that a consumer missed: a log line, counters, and a check that stays failed.

A consumer misses records if Kafka removes them first, or if another program moves the group's
committed offset past them, for example `kafka-consumer-groups.sh --reset-offsets`.

`Withheld` also measures for how long an open transaction has withheld existing records. A
transaction that is never ended withholds all later records of its partition until the brokers abort
it (`transaction.max.timeout.ms`, 15 minutes). Until then, polls return no records, as for an empty
partition. The difference shows only in the last stable offset and the end offset, which each fetch
response contains.

The consumers find the gaps, in `kafka_positions` and `memory_consumer`. A batch that exists but
cannot be unpacked is not a gap here: consumers continue, and components reject the batch.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Final

import structlog
from prometheus_client import Counter, Gauge

from gpuledger.bus.protocol import Gap, GapReason, Subscription, TopicPartition
from gpuledger.clock import NS_PER_MS
from gpuledger.runtime import Check

RECORDS_MISSED_TOTAL: Final = Counter(
    "gpuledger_records_missed",
    "Total number of offsets, including transaction markers, that a consumer group missed: records"
    " that were removed or skipped before it read them.",
    ["topic", "consumer"],
)
GAPS_TOTAL: Final = Counter(
    "gpuledger_gaps",
    "Total number of gaps in a consumer group's reading, by reason: `retention` (records removed"
    " unread), `moved` (offset set by another program), `topic_recreated`, `truncated`.",
    ["topic", "consumer", "reason"],
)
OPEN_TRANSACTION_SECONDS: Final = Gauge(
    "gpuledger_open_transaction_seconds",
    "Longest time for which an open Kafka transaction has blocked a consumer group in a partition"
    " of this process, in seconds.",
    ["topic", "consumer"],
)

_LAST_MS: Final = (2**63 - 1) // NS_PER_MS
_log = structlog.get_logger(__name__)


def count_from_zero(topics: Iterable[str], *, group: str) -> None:
    """Create the counters at zero, so that alert rules see their first increase."""
    # Prometheus sees no increase in a series that first appears at 1.
    for topic in topics:
        RECORDS_MISSED_TOTAL.labels(topic=topic, consumer=group)
        for reason in GapReason:
            if reason is not GapReason.UNREADABLE:
                GAPS_TOTAL.labels(topic=topic, consumer=group, reason=reason)


def report_gap(gap: Gap, *, group: str) -> None:
    """Log the gap and count it by topic and consumer group."""
    topic, number = gap.partition
    GAPS_TOTAL.labels(topic=topic, consumer=group, reason=gap.reason).inc()
    if gap.missed:
        RECORDS_MISSED_TOTAL.labels(topic=topic, consumer=group).inc(gap.missed)
    facts: dict[str, object] = {
        "topic": topic,
        "partition": number,
        "consumer": group,
        "reason": gap.reason.value,
        "first_offset": gap.first_offset,
        "next_offset": gap.next_offset,
        "count": gap.missed,
        "time_before": iso_time(gap.time_before_ms),
        "time_after": iso_time(gap.time_after_ms),
    }
    _log.error("records_missed", **{key: fact for key, fact in facts.items() if fact is not None})


class ReportedGaps:
    """The gaps that a consumer has reported, so that it reports each only once.

    A component may seek back to an offset from its last transaction or from its own table, and then
    finds the same gap again.
    """

    def __init__(self) -> None:
        self._known: dict[TopicPartition, tuple[int, int]] = {}
        self._moved: dict[TopicPartition, Gap] = {}

    def rest_of(self, gap: Gap) -> Gap | None:
        """Return the part of the gap that was not reported before, or `None`."""
        if gap.reason is GapReason.MOVED:
            known, self._moved[gap.partition] = self._moved.get(gap.partition), gap
            return None if gap == known else gap
        # Offsets of a recreated topic or a truncated log cannot be compared with earlier ones.
        if gap.reason is not GapReason.RETENTION:
            self._known.pop(gap.partition, None)
            return gap
        first, end = self._known.get(gap.partition, (gap.first_offset, gap.first_offset))
        if not first <= gap.first_offset <= end:
            first = end = gap.first_offset
        self._known[gap.partition] = (first, max(end, gap.next_offset))
        return replace(gap, first_offset=end) if gap.next_offset > end else None


class GapCheck:
    """Shows the last gap in `/readyz` until the process ends.

    Missing records stay missing, so the check never recovers; an operator who has noticed the gap
    restarts the component to clear the check.
    """

    def __init__(self, check: Check) -> None:
        self._check = check
        self._gaps = 0
        check.ok("no record was missed")

    def add(self, gap: Gap) -> None:
        """Count another gap and show it."""
        self._gaps += 1
        self._check.failed(f"gaps since the start: {self._gaps}; the last one {describe_gap(gap)}")


def describe_gap(gap: Gap) -> str:
    """Return the gap's partition, offset, size, reason and times as part of a sentence."""
    topic, number = gap.partition
    missed = "an unknown number of records" if gap.missed is None else f"{gap.missed} offsets"
    if gap.reason is GapReason.MOVED:
        start = "before" if gap.missed is None else f"from offset {gap.first_offset} to"
        return (
            f"in {topic}[{number}] {start} offset {gap.next_offset}: {missed} ({gap.reason.value}:"
            " another program set the offset of the consumer group)"
        )
    times = f"{iso_time(gap.time_before_ms) or 'unknown'} to {iso_time(gap.time_after_ms) or 'now'}"
    return (
        f"in {topic}[{number}] from offset {gap.first_offset}: {missed} ({gap.reason.value}),"
        f" event time {times}"
    )


def moved_gap(partition: TopicPartition, *, offset: int, read_before: int | None) -> Gap | None:
    """Return the gap before an offset that another program has committed; `None` without a gap.

    `read_before` is the offset before which all records were read; `None` if it is unknown. The
    size of the gap is then unknown too. An offset that was moved back causes no gap.
    """
    if offset <= (read_before or 0):
        return None
    first = offset if read_before is None else read_before
    return Gap(partition=partition, first_offset=first, next_offset=offset, reason=GapReason.MOVED)


def known_time_ms(timestamp_ms: int) -> int | None:
    """Return a record's timestamp, or `None` if it is invalid; brokers accept any past timestamp.

    A valid timestamp can be written as a date and fits in 64 bits as nanoseconds.
    """
    return timestamp_ms if 0 <= timestamp_ms <= _LAST_MS else None


def iso_time(time_ms: int | None) -> str | None:
    """Return milliseconds since the epoch as a UTC time in ISO 8601."""
    if time_ms is None:
        return None
    return datetime.fromtimestamp(time_ms / 1000, tz=UTC).isoformat(timespec="milliseconds")


class Withheld:
    """How long each partition's position has been blocked by an open transaction."""

    def __init__(
        self, *, subscription: Subscription, clock_seconds: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock_seconds = clock_seconds
        self._withheld: dict[TopicPartition, tuple[int, float]] = {}
        """The offset that blocks each partition, and when it was first observed."""
        for topic in subscription.topics:
            gauge = OPEN_TRANSACTION_SECONDS.labels(topic=topic, consumer=subscription.group)
            gauge.set_function(partial(self.seconds, topic))

    def observe(self, offsets: Mapping[TopicPartition, tuple[int, int, int]]) -> None:
        """Record each partition's position, last stable offset and end offset.

        Partitions that are missing from `offsets` are no longer read and are forgotten.
        """
        now = self._clock_seconds()
        withheld: dict[TopicPartition, tuple[int, float]] = {}
        for partition, (position, stable, end) in offsets.items():
            if position >= stable and stable < end:
                known = self._withheld.get(partition)
                # Every transaction briefly withholds the records after it. A different offset means
                # a different transaction, so the time starts again.
                withheld[partition] = known if known and known[0] == stable else (stable, now)
        self._withheld = withheld

    def seconds(self, topic: str | None = None) -> float:
        """Return the longest time for which records have been withheld; 0 if none are.

        `topic` limits the result to the partitions of one topic.
        """
        # Copied, because the metrics may be served by another thread.
        begin_seconds = [
            seen_seconds
            for partition, (_, seen_seconds) in list(self._withheld.items())
            if topic in (None, partition.topic)
        ]
        return self._clock_seconds() - min(begin_seconds) if begin_seconds else 0.0
