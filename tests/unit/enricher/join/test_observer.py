"""Metrics show whether entries sum to the devices."""

import pytest
from structlog.testing import capture_logs

from gpuledger.records import NodeSample
from gpuledger_enricher.join.booking.books import book_tick
from gpuledger_enricher.join.observer import TICKS_PER_CHECK, JoinObserver
from gpuledger_enricher.join.pods.describe import DescriptionCache
from gpuledger_enricher.join.pods.pods import ClusterPods
from gpuledger_enricher.join.stage import make_event
from tests.unit.enricher.join.builders import T_NS, Given, value_of
from tests.unit.enricher.join.ticks import SECOND_NS, process, reading, sample

UNBALANCED = "gpuledger_join_samples_unbalanced_total"
HALF = sample(processes=[process(container=0, sm_utilization_ratio=0.5)])
TWICE = sample(gpus=[reading()], interval_ns=2 * SECOND_NS, processes=HALF.processes)


def test_balanced_entries_do_not_increase_the_counter() -> None:
    """The counter exists before the first tick."""
    before = value_of(UNBALANCED)
    Given().take(processes=HALF.processes)
    assert value_of(UNBALANCED) == before


def audit(checks: JoinObserver, booked: NodeSample, read: NodeSample) -> float:
    """Return the increase of the counter if entries are checked against another tick's readings."""
    before = value_of(UNBALANCED)
    message = DescriptionCache(ClusterPods()).describe(booked)
    event = make_event(booked, book_tick(booked), message)
    checks.observe_event(event, read, message, partition=0, now_ns=T_NS)
    return value_of(UNBALANCED) - before


def test_entries_that_do_not_sum_to_the_device_are_counted_and_logged() -> None:
    """Half of the time is missing if a tick of two seconds was booked as one."""
    checks = JoinObserver(pending_pod_timeout_seconds=1)
    with capture_logs() as lines:
        assert audit(checks, HALF, TWICE) == 1
    (line,) = lines
    assert (line["event"], line["log_level"], line["quantity"]) == (
        "sample_unbalanced",
        "error",
        "busy_ns",
    )
    assert (line["total"], line["booked"]) == (2 * SECOND_NS, SECOND_NS)


def test_not_every_tick_is_checked() -> None:
    """A check costs as much as booking."""
    checks = JoinObserver(pending_pod_timeout_seconds=1)
    assert audit(checks, HALF, HALF) == 0
    counted = [audit(checks, HALF, TWICE) for _ in range(TICKS_PER_CHECK)]
    assert counted == [0] * (TICKS_PER_CHECK - 1) + [1]


@pytest.mark.parametrize(
    ("case", "interval_seconds", "overlaps"),
    [("they meet", 1, 0), ("a gap is between them", 0.5, 0), ("two agents claim one node", 5, 1)],
)
def test_a_tick_that_overlaps_another_one_is_counted_and_not_booked(
    case: str, interval_seconds: float, overlaps: int
) -> None:
    given = Given()
    before = value_of("gpuledger_join_samples_overlapping_total")
    given.take(seq=1_000_000)
    with capture_logs() as logged:
        booked = given.offer(
            seq=1_001_000,
            time_ns=T_NS + SECOND_NS,
            interval_ns=round(interval_seconds * SECOND_NS),
        )
    assert len(booked) == 1 - overlaps
    assert value_of("gpuledger_join_samples_overlapping_total") - before == overlaps, case
    message = [line for line in logged if line["event"] == "samples_overlapped"]
    assert [line["overlap_seconds"] for line in message] == [interval_seconds - 1] * overlaps
    assert [line["boot_ids"] for line in message] == [["boot", "boot"]] * overlaps
