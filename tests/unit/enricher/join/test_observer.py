"""What shows of the books in the metrics: that they are the devices'."""

import pytest

from enricher.join.booking.books import book_tick
from enricher.join.observer import TICKS_PER_CHECK, JoinObserver
from enricher.join.pods.describe import DescriptionCache
from enricher.join.pods.pods import PodCache
from enricher.join.stage import make_event
from gpuledger.records import NodeSample
from tests.unit.enricher.join.builders import T_NS, Given, value_of
from tests.unit.enricher.join.ticks import SECOND_NS, process, reading, sample

ERROR = "gpuledger_conservation_error_ratio"
HALF = sample(processes=[process(container=0, sm_utilization_ratio=0.5)])


def test_the_error_of_whole_books_is_next_to_nothing() -> None:
    """The gauge is there from the first tick on."""
    Given().take(processes=HALF.processes)
    assert value_of(ERROR) < 1e-9


def audit(
    checks: JoinObserver, booked: NodeSample, read: NodeSample, *, now_ns: int = T_NS
) -> float:
    """Return what the gauge says after one tick's books were held against another's reading."""
    said = DescriptionCache(PodCache()).describe(booked)
    event = make_event(booked, book_tick(booked), said)
    checks.see_event(event, read, said, partition=0, now_ns=now_ns)
    return value_of(ERROR)


def test_books_that_do_not_sum_to_the_device_show_for_ten_minutes() -> None:
    """Half of the time is missing where a tick of two seconds was booked as one."""
    twice = sample(gpus=[reading()], interval_ns=2 * SECOND_NS, processes=HALF.processes)
    checks = JoinObserver(pending_pod_timeout_seconds=1)
    assert audit(checks, HALF, twice) == pytest.approx(0.5)
    for _ in range(TICKS_PER_CHECK):
        assert audit(checks, HALF, HALF, now_ns=T_NS + SECOND_NS) == pytest.approx(0.5)
    for minutes in (6, 12):
        now_ns = T_NS + minutes * 60 * SECOND_NS
        for _ in range(TICKS_PER_CHECK):
            audit(checks, HALF, HALF, now_ns=now_ns)
    assert value_of(ERROR) < 1e-9


def test_not_every_tick_is_checked() -> None:
    """To check costs as much as to book."""
    twice = sample(interval_ns=2 * SECOND_NS, processes=HALF.processes)
    checks = JoinObserver(pending_pod_timeout_seconds=1)
    errors = [audit(checks, HALF, HALF)]
    errors += [audit(checks, HALF, twice) for _ in range(TICKS_PER_CHECK)]
    assert max(errors[:-1]) < 1e-9
    assert errors[-1] == pytest.approx(0.5)
