"""The running sum of a process's busy intervals."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger_simulator.device import BusyTime

Spans = list[tuple[int, int]]

# Gaps and lengths; an interval after a gap of 0 directly follows the previous one.
PAIRS = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), min_size=1, max_size=60)


def laid_out(pairs: Spans) -> Spans:
    spans, at = [], 0
    for gap, length in pairs:
        spans.append((at + gap, at + gap + length))
        at += gap + length
    return spans


def recorded(spans: Spans, *, max_intervals: int = 1000) -> BusyTime:
    busy = BusyTime(max_intervals=max_intervals)
    for start, end in spans:
        busy.add(start, end)
    return busy


@given(PAIRS, st.integers(-10, 6100))
def test_the_busy_time_before_an_instant_is_the_clipped_sum_of_the_intervals(
    pairs: Spans, instant: int
) -> None:
    spans = laid_out(pairs)
    expected = sum(max(0, min(end, instant) - start) for start, end in spans)
    assert recorded(spans).until(instant) == expected


@given(PAIRS)
def test_joining_old_intervals_loses_no_busy_time_and_sums_never_fall(pairs: Spans) -> None:
    spans = laid_out(pairs)
    busy = recorded(spans, max_intervals=8)
    end = spans[-1][1]
    sums = [busy.until(instant) for instant in range(end + 1)]
    assert sums[-1] == sum(stop - start for start, stop in spans)
    assert all(0 <= later - sooner <= 1 for sooner, later in pairwise(sums))


def test_memory_stays_bounded_however_long_it_runs() -> None:
    busy = recorded([(i * 10, i * 10 + 4) for i in range(5000)], max_intervals=64)
    assert len(list(busy.intervals())) <= 64
    assert busy.until(50_000) == 5000 * 4


@pytest.mark.parametrize(("instant", "expected"), [(0, 0), (9, 0), (15, 5), (20, 10), (99, 10)])
def test_an_interval_counts_up_to_the_requested_instant(instant: int, expected: int) -> None:
    assert recorded([(10, 20)]).until(instant) == expected
