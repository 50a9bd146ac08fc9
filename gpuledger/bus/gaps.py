"""Says what a consumer could not read: one log line, its counters, and a check that stays.

And for how long it has been kept from records that are there, behind an open transaction
(`Withheld`). One that nobody ends withholds all that is written to its partition after it, until
the brokers abort it (`transaction.max.timeout.ms`, 15 minutes). Its consumer sees nothing of that:
its poll finds no record, as on a partition without any. Brokers report it beside each answer all
the same, by two offsets.

Finding a gap is the consumers' business, in `kafka_positions` and `memory_consumer`. What is there
and cannot be unpacked is no gap here: consumers read on, and stages reject it.
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
    "Offsets that a consumer group passed over because their records were removed before it read"
    " them, markers of transactions included.",
    ["topic", "consumer"],
)
GAPS_TOTAL: Final = Counter(
    "gpuledger_gaps",
    "Times that a consumer group could not go on where it was, by reason: `retention` (records were"
    " removed before it read them), `topic_recreated` (the topic was deleted and made anew),"
    " `truncated` (the partition lost records that had been read).",
    ["topic", "consumer", "reason"],
)
OPEN_TRANSACTION_SECONDS: Final = Gauge(
    "gpuledger_open_transaction_seconds",
    "Time for which an open Kafka transaction has kept a consumer group from the records after it,"
    " in seconds: the longest of the topic's partitions that this process reads.",
    ["topic", "consumer"],
)

_LAST_MS: Final = (2**63 - 1) // NS_PER_MS
_log = structlog.get_logger(__name__)


def count_from_zero(topics: Iterable[str], *, group: str) -> None:
    """Show the counters before there is anything to count, so that a rule sees them rise."""
    # A series that first appears at 1 shows no increase.
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
        # Offsets of another topic, or of a shorter log, say nothing of what was reported before.
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


class Withheld:
    """Since when each partition has stood before an open transaction."""

    def __init__(
        self, *, subscription: Subscription, clock_seconds: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock_seconds = clock_seconds
        self._withheld: dict[TopicPartition, tuple[int, float]] = {}
        """The offset before which it stands, and when that was seen first."""
        for topic in subscription.topics:
            gauge = OPEN_TRANSACTION_SECONDS.labels(topic=topic, consumer=subscription.group)
            gauge.set_function(partial(self.seconds, topic))

    def observe(self, offsets: Mapping[TopicPartition, tuple[int, int, int]]) -> None:
        """Record how partitions stand: the position, the last stable and the end offset of each.

        Those that are not named are not read any more.
        """
        now = self._clock_seconds()
        withheld: dict[TopicPartition, tuple[int, float]] = {}
        for partition, (position, stable, end) in offsets.items():
            if position >= stable and stable < end:
                known = self._withheld.get(partition)
                # Each transaction withholds what is behind it for a moment: another offset, another
                # transaction.
                withheld[partition] = known if known and known[0] == stable else (stable, now)
        self._withheld = withheld

    def seconds(self, topic: str | None = None) -> float:
        """Return the longest time of all partitions, or of a topic's; 0 where none is withheld."""
        # A copy: the gauge is read by the thread or task that serves the metrics.
        begin_seconds = [
            seen_seconds
            for partition, (_, seen_seconds) in list(self._withheld.items())
            if topic in (None, partition.topic)
        ]
        return self._clock_seconds() - min(begin_seconds) if begin_seconds else 0.0
