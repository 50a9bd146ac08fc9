"""The sampled time of processes in ticks, and a GPU's unattributed busy time."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.clock import NS_PER_SECOND
from gpuledger.records import GpuProcess, GpuReading, ProcessKind
from gpuledger_agent.core.processes.accounting.exit_reporter import (
    GpuHistory,
    ProcessInterval,
    split,
)
from gpuledger_agent.core.tick_clock import TickInterval
from tests.held_objects import is_bounded


def covered(second: int) -> TickInterval:
    """Return the tick that covers this second."""
    begin_ns = second * NS_PER_SECOND
    return TickInterval(
        seq=second,
        begin_ns=begin_ns,
        end_ns=begin_ns + NS_PER_SECOND,
        time_ns=begin_ns + NS_PER_SECOND,
    )


def reading(ratio: float | None) -> GpuReading:
    return GpuReading(uuid="GPU-0", index=0, utilization_ratio=ratio)


def process(
    pid: int, ratio: float | None = None, *, container: int | None = 0, is_read: bool = True
) -> GpuProcess:
    return GpuProcess(
        gpu=0,
        pid=pid,
        kind=ProcessKind.COMPUTE,
        started_boottime_ns=pid * NS_PER_SECOND if is_read else None,
        container=container if is_read else None,
        sm_utilization_ratio=ratio,
    )


def interval(begin: float, end: float, unreported: float) -> ProcessInterval:
    return ProcessInterval(
        round(begin * NS_PER_SECOND), round(end * NS_PER_SECOND), round(unreported * NS_PER_SECOND)
    )


def history_of(*ticks: tuple[float | None, Sequence[GpuProcess]]) -> GpuHistory:
    made = GpuHistory()
    for second, (ratio, processes) in enumerate(ticks):
        made.record(covered(second), reading(ratio), processes)
    return made


@pytest.mark.parametrize(
    ("ratio", "processes", "sampled_seconds"),
    [
        # Only process: the device's time, whatever its own samples show.
        (0.5, [process(1, 0.3)], 0.5),
        (0.5, [process(1)], 0.5),
        # With another process of its container: split by samples, or equally.
        (0.6, [process(1, 0.1), process(2, 0.2)], 0.2),
        (0.6, [process(1), process(2)], 0.3),
        # With another container, the host or an unreadable process: its own samples.
        (0.6, [process(1, 0.1), process(2, 0.2, container=1)], 0.1),
        (0.6, [process(1, 0.1), process(2, 0.2, container=None)], 0.1),
        (0.6, [process(1, 0.1), process(2, is_read=False)], 0.1),
        # A device without utilization: the sum of the samples.
        (None, [process(1, 0.1)], 0.1),
    ],
)
def test_a_process_has_its_part_of_the_time_booked_on_its_container(
    ratio: float | None, processes: list[GpuProcess], sampled_seconds: float
) -> None:
    reported_ns, first = history_of((ratio, processes)).pop_sampled((1, NS_PER_SECOND))
    assert reported_ns == sampled_seconds * NS_PER_SECOND
    assert first == covered(0)


def test_the_sampled_time_of_a_process_adds_up_until_it_is_reported() -> None:
    history = history_of((0.5, [process(1)]), (0.0, []), (0.25, [process(1)]))
    assert history.pop_sampled((1, NS_PER_SECOND)) == (0.75 * NS_PER_SECOND, covered(0))
    assert history.pop_sampled((1, NS_PER_SECOND)) == (0, None)


@pytest.mark.parametrize(
    ("processes", "is_unattributed"),
    [
        ([], True),
        ([process(1, is_read=False)], True),
        ([process(1)], False),
        ([process(1, container=None)], False),
        ([process(1), process(2, is_read=False)], False),
    ],
)
def test_busy_time_is_unattributed_if_no_known_process_was_listed(
    processes: list[GpuProcess], *, is_unattributed: bool
) -> None:
    history = history_of((0.5, processes))
    assert history.reserve([interval(0, 1, 9.0)]) == [NS_PER_SECOND // 2 if is_unattributed else 0]


def test_a_tick_without_the_gpu_has_no_time_to_reserve() -> None:
    history = GpuHistory()
    history.record(covered(0), None, [])
    assert history.reserve([interval(0, 1, 1.0)]) == [0]
    assert history.ticks_of(interval(0, 1, 1.0)) == []


@pytest.mark.parametrize(
    ("intervals", "given_seconds"),
    [
        ([interval(0.5, 1.5, 0.4)], [0.4]),
        # At most the time for which it was there, and nothing from ticks in which it was not.
        ([interval(0.9, 1.0, 0.4)], [0.1]),
        ([interval(5.0, 6.0, 0.4)], [0.0]),
        # The available time, in proportion to the missing time.
        ([interval(0.0, 1.0, 0.6), interval(0.0, 1.0, 0.3)], [0.4, 0.2]),
        # Each takes what it can from the first tick; one takes the rest from the second.
        ([interval(0.0, 2.0, 1.0), interval(0.0, 1.0, 0.2)], [1.0, 0.1]),
    ],
)
def test_unattributed_time_is_reserved_for_the_processes_that_were_there(
    intervals: list[ProcessInterval], given_seconds: list[float]
) -> None:
    reserved = history_of((0.6, []), (0.6, [])).reserve(intervals)
    assert reserved == [round(seconds * NS_PER_SECOND) for seconds in given_seconds]


spans = st.tuples(
    st.floats(0, 10, allow_nan=False), st.floats(0, 3, allow_nan=False), st.floats(0, 3)
).map(lambda drawn: interval(drawn[0], drawn[0] + drawn[1], drawn[2]))


@given(st.lists(st.floats(0, 1), max_size=10), st.lists(st.lists(spans, max_size=4), max_size=4))
def test_reservations_never_exceed_the_available_time_however_many_there_are(
    ratios: list[float], requested: list[list[ProcessInterval]]
) -> None:
    history = history_of(*((ratio, []) for ratio in ratios))
    reserved = [history.reserve(intervals) for intervals in requested]
    assert sum(map(sum, reserved)) <= sum(round(ratio * 1_000_000) for ratio in ratios) * 1_000
    for intervals, parts in zip(requested, reserved, strict=True):
        for one, part in zip(intervals, parts, strict=True):
            assert 0 <= part <= min(one.missing_ns, one.end_ns - one.begin_ns)


@given(st.integers(0, 2**62), st.lists(st.integers(0, 10**6), min_size=1, max_size=9))
def test_parts_by_weight_sum_to_the_whole(whole: int, weights: list[int]) -> None:
    parts = split(whole, weights)
    assert sum(parts) == (whole if any(weights) else 0)
    assert all(part >= 0 for part in parts)
    if whole <= sum(weights):
        assert all(part <= weight for part, weight in zip(parts, weights, strict=True))


def test_memory_is_bounded() -> None:
    history = GpuHistory()
    assert is_bounded(
        history,
        lambda second: history.record(covered(second), reading(0.5), [process(second + 1)]),
        times=500,
    )
