"""The busy time of processes in ticks, and a GPU's busy time that belongs to no process."""

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
    """Return the tick that covers a second and begins with it."""
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
    ("ratio", "processes", "message"),
    [
        # Alone: the device's time, whatever its own samples are.
        (0.5, [process(1, 0.3)], 0.5),
        (0.5, [process(1)], 0.5),
        # With another process of its container: split by samples, or equally.
        (0.6, [process(1, 0.1), process(2, 0.2)], 0.2),
        (0.6, [process(1), process(2)], 0.3),
        # With another container, the host or an unreadable process: its own samples.
        (0.6, [process(1, 0.1), process(2, 0.2, container=1)], 0.1),
        (0.6, [process(1, 0.1), process(2, 0.2, container=None)], 0.1),
        (0.6, [process(1, 0.1), process(2, is_read=False)], 0.1),
        # On a device without its own value: the sum of the samples.
        (None, [process(1, 0.1)], 0.1),
    ],
)
def test_a_tick_says_of_a_process_its_part_of_what_is_booked_on_its_container(
    ratio: float | None, processes: list[GpuProcess], message: float
) -> None:
    reported_ns, first = history_of((ratio, processes)).pop_sampled((1, NS_PER_SECOND))
    assert reported_ns == message * NS_PER_SECOND
    assert first == covered(0)


def test_what_ticks_said_of_a_process_is_summed_until_it_is_reported() -> None:
    history = history_of((0.5, [process(1)]), (0.0, []), (0.25, [process(1)]))
    assert history.pop_sampled((1, NS_PER_SECOND)) == (0.75 * NS_PER_SECOND, covered(0))
    assert history.pop_sampled((1, NS_PER_SECOND)) == (0, None)


@pytest.mark.parametrize(
    ("processes", "is_nobodys"),
    [
        ([], True),
        ([process(1, is_read=False)], True),
        ([process(1)], False),
        ([process(1, container=None)], False),
        ([process(1), process(2, is_read=False)], False),
    ],
)
def test_busy_time_is_nobodys_where_nobody_was_seen(
    processes: list[GpuProcess], *, is_nobodys: bool
) -> None:
    history = history_of((0.5, processes))
    assert history.reserve([interval(0, 1, 9.0)]) == [NS_PER_SECOND // 2 if is_nobodys else 0]


def test_a_tick_that_lacks_the_gpu_leaves_nothing_to_anybody() -> None:
    history = GpuHistory()
    history.record(covered(0), None, [])
    assert history.reserve([interval(0, 1, 1.0)]) == [0]
    assert history.ticks_of(interval(0, 1, 1.0)) == []


@pytest.mark.parametrize(
    ("intervals", "given_seconds"),
    [
        ([interval(0.5, 1.5, 0.4)], [0.4]),
        # At most the overlap with a tick, and nothing of a tick without overlap.
        ([interval(0.9, 1.0, 0.4)], [0.1]),
        ([interval(5.0, 6.0, 0.4)], [0.0]),
        # The available time, in proportion to the missing time.
        ([interval(0.0, 1.0, 0.6), interval(0.0, 1.0, 0.3)], [0.4, 0.2]),
        # Both get as much as possible of the first tick, and the rest from the second.
        ([interval(0.0, 2.0, 1.0), interval(0.0, 1.0, 0.2)], [1.0, 0.1]),
    ],
)
def test_what_is_nobodys_is_set_aside_for_those_who_were_there(
    intervals: list[ProcessInterval], given_seconds: list[float]
) -> None:
    reserved = history_of((0.6, []), (0.6, [])).reserve(intervals)
    assert reserved == [round(seconds * NS_PER_SECOND) for seconds in given_seconds]


spans = st.tuples(
    st.floats(0, 10, allow_nan=False), st.floats(0, 3, allow_nan=False), st.floats(0, 3)
).map(lambda drawn: interval(drawn[0], drawn[0] + drawn[1], drawn[2]))


@given(st.lists(st.floats(0, 1), max_size=10), st.lists(st.lists(spans, max_size=4), max_size=4))
def test_never_more_is_set_aside_than_there_was_however_often_it_is_asked_for(
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


def test_memory_of_it_is_bounded() -> None:
    history = GpuHistory()
    assert is_bounded(
        history,
        lambda second: history.record(covered(second), reading(0.5), [process(second + 1)]),
        times=500,
    )
