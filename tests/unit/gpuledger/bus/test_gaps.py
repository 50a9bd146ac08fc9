"""A gap is reported as one log line, two counters and a check that stays failed."""

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from gpuledger.bus.gaps import (
    GapCheck,
    ReportedGaps,
    count_from_zero,
    iso_time,
    known_time_ms,
    report_gap,
)
from gpuledger.bus.protocol import Gap, GapReason, TopicPartition
from gpuledger.runtime import Check

AT = TopicPartition("gpuledger.events.v1", 3)
GROUP = "gpuledger-test-gaps"


def gap(
    first: int, next_offset: int, *, reason: GapReason = GapReason.RETENTION, **times: int
) -> Gap:
    return Gap(partition=AT, first_offset=first, next_offset=next_offset, reason=reason, **times)


def counted(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"topic": AT.topic, "consumer": GROUP, **labels})


def test_a_gap_is_logged_once_with_all_details_and_counted_from_zero() -> None:
    count_from_zero([AT.topic], group=GROUP)
    assert counted("gpuledger_records_missed_total") == 0
    assert counted("gpuledger_gaps_total", reason="retention") == 0

    with capture_logs() as logged:
        report_gap(gap(51, 801, time_before_ms=0, time_after_ms=750_000), group=GROUP)

    assert logged == [
        {
            "event": "records_missed",
            "log_level": "error",
            "topic": AT.topic,
            "partition": 3,
            "consumer": GROUP,
            "reason": "retention",
            "first_offset": 51,
            "next_offset": 801,
            "count": 750,
            "time_before": "1970-01-01T00:00:00.000+00:00",
            "time_after": "1970-01-01T00:12:30.000+00:00",
        }
    ]
    assert counted("gpuledger_records_missed_total") == 750
    assert counted("gpuledger_gaps_total", reason="retention") == 1


def test_no_number_of_missed_records_is_reported_for_a_recreated_topic() -> None:
    with capture_logs() as logged:
        report_gap(gap(51, 0, reason=GapReason.TOPIC_RECREATED), group="another")

    assert "missed" not in logged[0]
    assert gap(51, 0, reason=GapReason.TOPIC_RECREATED).missed is None


def test_the_check_passes_until_the_first_gap_and_fails_from_then_on() -> None:
    check = Check()
    gaps = GapCheck(check)
    assert check.detail == "no record was missed"

    gaps.add(gap(1, 2))
    gaps.add(gap(51, 801, time_after_ms=750_000))

    assert not check.is_ok
    assert check.detail == (
        "gaps since the start: 2; the last one in gpuledger.events.v1[3] from offset 51: 750"
        " offsets (retention), event time unknown to 1970-01-01T00:12:30.000+00:00"
    )


def test_a_gap_is_reported_once_and_later_only_its_growth() -> None:
    reported = ReportedGaps()
    assert reported.rest_of(gap(51, 801)) == gap(51, 801)
    assert reported.rest_of(gap(51, 801)) is None
    assert reported.rest_of(gap(60, 700)) is None
    assert reported.rest_of(gap(51, 900)) == gap(801, 900)
    assert reported.rest_of(gap(20, 900)) == gap(20, 900)
    assert reported.rest_of(gap(2000, 2001)) == gap(2000, 2001)


def test_gaps_of_a_recreated_topic_are_independent_of_those_of_the_old_topic() -> None:
    reported, restarted = ReportedGaps(), gap(900, 0, reason=GapReason.TOPIC_RECREATED)
    reported.rest_of(gap(51, 801))
    assert reported.rest_of(restarted) == restarted
    assert reported.rest_of(gap(51, 801)) == gap(51, 801)


def test_a_moved_offset_is_reported_again_only_if_another_range_was_skipped() -> None:
    reported = ReportedGaps()
    for moved in (
        gap(2, 10, reason=GapReason.MOVED),
        gap(5, 10, reason=GapReason.MOVED),
        gap(5, 12, reason=GapReason.MOVED),
    ):
        assert reported.rest_of(moved) == moved
        assert reported.rest_of(moved) is None


@pytest.mark.parametrize("timestamp_ms", [-1, -(2**62), 2**62, 2**63 - 1])
def test_a_timestamp_that_no_clock_can_show_is_not_reported_as_the_time_of_a_gap(
    timestamp_ms: int,
) -> None:
    """A broker accepts any timestamp that is not in the future; some do not fit in a date."""
    assert known_time_ms(timestamp_ms) is None


@pytest.mark.parametrize("timestamp_ms", [0, 1_795_000_000_000, (2**63 - 1) // 10**6])
def test_any_other_timestamp_can_be_written_as_a_date_and_in_nanoseconds(timestamp_ms: int) -> None:
    assert known_time_ms(timestamp_ms) == timestamp_ms
    assert iso_time(timestamp_ms)
    assert timestamp_ms * 10**6 < 2**63
