"""Says what a consumer could not read: one log line, two counters, and a check that stays.

Finding a gap is the consumers' business, in `kafka_positions` and `memory_consumer`. What is there
and cannot be unpacked is no gap here: consumers read on, and stages reject it.
"""

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

import structlog

from gpuledger.bus.metrics import GAPS_TOTAL, RECORDS_MISSED_TOTAL
from gpuledger.bus.protocol import Gap, GapReason, TopicPartition
from gpuledger.runtime import Check

_LAST_MS: Final = (2**63 - 1) // 1_000_000
_log = structlog.get_logger(__name__)


def count_from_zero(topics: Iterable[str], *, group: str) -> None:
    """Show the counters before there is anything to count, so that a rule sees them rise."""
    for topic in topics:
        RECORDS_MISSED_TOTAL.labels(topic=topic, consumer=group)
        for reason in GapReason:
            if reason is not GapReason.UNREADABLE:
                GAPS_TOTAL.labels(topic=topic, consumer=group, reason=reason)


def report_gap(gap: Gap, *, group: str) -> None:
    """Log the gap and count it under its topic and the consumer's group."""
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
    """What of a consumer's partitions is known to be missing, so that it is said once.

    A stage may go back to the same offset again: to where a transaction or a table of its own is.
    """

    def __init__(self) -> None:
        self._known: dict[TopicPartition, tuple[int, int]] = {}

    def rest_of(self, gap: Gap) -> Gap | None:
        """Return the part of the gap that was not reported before, if there is one."""
        if gap.reason is not GapReason.RETENTION:
            self._known.pop(gap.partition, None)
            return gap
        first, end = self._known.get(gap.partition, (gap.first_offset, gap.first_offset))
        if not first <= gap.first_offset <= end:
            first = end = gap.first_offset
        self._known[gap.partition] = (first, max(end, gap.next_offset))
        return replace(gap, first_offset=end) if gap.next_offset > end else None


class GapCheck:
    """Shows the last gap in `/readyz` for the life of the process.

    What is missing stays missing, so nothing that happens later makes the check hold again; the
    restart that somebody makes after having seen it does.
    """

    def __init__(self, check: Check) -> None:
        self._check = check
        self._gaps = 0
        check.ok("no record was missed")

    def add(self, gap: Gap) -> None:
        """Record one more gap."""
        self._gaps += 1
        self._check.failed(f"{self._gaps} since the start, the last one {describe_gap(gap)}")


def describe_gap(gap: Gap) -> str:
    """Return what is missing and why, in a part of a sentence."""
    topic, number = gap.partition
    times = f"{iso_time(gap.time_before_ms) or 'unknown'} to {iso_time(gap.time_after_ms) or 'now'}"
    missed = "an unknown number of records" if gap.missed is None else f"{gap.missed} offsets"
    return (
        f"in {topic}[{number}] from offset {gap.first_offset}: {missed} ({gap.reason.value}),"
        f" event time {times}"
    )


def known_time_ms(timestamp_ms: int) -> int | None:
    """Return a record's timestamp, `None` where it cannot be one: brokers take any from the past.

    What is left can be written as a date, and as nanoseconds in 64 bits.
    """
    return timestamp_ms if 0 <= timestamp_ms <= _LAST_MS else None


def iso_time(time_ms: int | None) -> str | None:
    """Return milliseconds since the epoch as UTC in ISO 8601."""
    if time_ms is None:
        return None
    return datetime.fromtimestamp(time_ms / 1000, tz=UTC).isoformat(timespec="milliseconds")
