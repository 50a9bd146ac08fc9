"""Fast polls between ticks: their times, and how their results are used."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from gpuledger.records import ProcessKind
from gpuledger_agent.core.fast_polls import FastPollPlan
from gpuledger_agent.core.gpu_sampler import GpuSampler, GpuTick, LastTick
from gpuledger_agent.core.normalize.driver_clock import DriverClock
from gpuledger_agent.core.normalize.windows import WindowLength
from gpuledger_agent.core.raw import (
    ClockReading,
    FastPoll,
    ListedProcess,
    ProcessUtilizationSample,
    RawGpuSample,
    SampleCursor,
    UtilizationSample,
)
from gpuledger_agent.core.stamps import drop_impossible
from tests.ticks import tick_gpu

SECOND_NS = 1_000_000_000
WINDOW_US = 200_000
START_US = 1_000_000_000


def times(
    *, seconds: float = 1.0, lag: float = 0.0, pause: float = 0.1, is_close: bool = False
) -> list[tuple[float, str]]:
    """Return a tick's fast polls as (time in seconds, scope)."""
    plan = FastPollPlan(
        begin_ns=0,
        end_ns=round(seconds * SECOND_NS),
        lag_ns=round(lag * SECOND_NS),
        pause_ns=round(pause * SECOND_NS),
    )
    found, now_ns = [], 0
    while time := plan.next(now_ns, is_close=is_close):
        found.append((time.at_ns / SECOND_NS, time.others.value))
        now_ns = time.at_ns
    return found


@pytest.mark.parametrize(
    ("law", "plan", "expected"),
    [
        ("a tick makes its own query", {}, []),
        ("energy is read when the covered time ends", {"lag": 0.25}, [(0.75, "energy")]),
        ("also for a later tick", {"lag": 1.5}, [(0.5, "energy")]),
        (
            "in a long tick all GPUs are polled every second",
            {"seconds": 3.0},
            [(1.0, "all"), (2.0, "all")],
        ),
        (
            "a closely watched GPU is polled more often",
            {"pause": 0.4, "is_close": True, "lag": 0.25},
            [(0.4, "nothing"), (0.75, "energy"), (0.8, "nothing")],
        ),
        ("a pause as long as the tick disables fast polls", {"pause": 1.0, "is_close": True}, []),
        ("no fast poll next to a tick", {"lag": 0.99}, []),
    ],
)
def test_fast_polls_run_when_covered_time_ends_and_at_the_configured_pause(
    law: str, plan: dict[str, Any], expected: list[tuple[float, str]]
) -> None:
    assert times(**plan) == expected, law


def poll(
    *percents: int,
    since: int = 0,
    uses: tuple[tuple[int, int, int], ...] = (),
    pids: tuple[int, ...] = (7,),
    latest: int | None = None,
    at: float = 1.0,
) -> FastPoll:
    """Return a fast poll after `since` windows; `uses` are pid, window and percent."""
    at_ns = round(at * SECOND_NS)
    return FastPoll(
        uuid="GPU-0",
        at=ClockReading(time_ns=at_ns, monotonic_ns=at_ns, boottime_ns=at_ns),
        since_us=START_US + since * WINDOW_US,
        samples=tuple(
            UtilizationSample(timestamp_us=START_US + (since + place) * WINDOW_US, percent=percent)
            for place, percent in enumerate(percents, 1)
        ),
        process_samples=tuple(
            ProcessUtilizationSample(
                pid=pid,
                timestamp_us=START_US + window * WINDOW_US,
                sm_percent=percent,
                memory_percent=0,
            )
            for pid, window, percent in uses
        ),
        processes=tuple(
            ListedProcess(pid=pid, kind=ProcessKind.COMPUTE, memory_bytes=1) for pid in pids
        ),
        percent=latest,
    )


CLOCK = DriverClock(
    earliest_us=START_US + 1.5 * WINDOW_US,
    latest_us=START_US + 1.5 * WINDOW_US,
    covered_us=START_US,
)


def known(*, one_sample_each: bool | None = None, clock: DriverClock | None = None) -> GpuSampler:
    """Return a GPU whose tick at 0 s has covered the time up to the first window."""
    gpu = GpuSampler()
    gpu.window = WindowLength(length_us=WINDOW_US, is_confirmed=True)
    gpu.traits.one_sample_each = one_sample_each
    seen = SampleCursor(gpu_us=START_US, memory_us=1, process_us=START_US)
    gpu.last = LastTick(last_seen=seen, clock=clock)
    return gpu


def take(gpu: GpuSampler, *polls: FastPoll) -> None:
    for one in polls:
        assert gpu.take(one, is_querying=False)


def tick(gpu: GpuSampler, own: FastPoll) -> GpuTick:
    """Make a tick whose readings are those of a fast poll."""
    names = ("samples", "process_samples", "processes", "percent")
    given = {name: getattr(own, name) for name in names}
    gpu.request_tick(is_set_back=False)
    raw = RawGpuSample(uuid="GPU-0", index=0, **given)
    return tick_gpu(gpu, raw, now_ns=own.at.monotonic_ns)


def shares(ticked: GpuTick) -> dict[int, float | None]:
    return {one.process.pid: one.sm_ratio for one in ticked.usages}


def test_two_samples_of_a_process_in_one_query_are_windows() -> None:
    gpu = known()
    take(gpu, poll(50, 50, 50, uses=((7, 1, 50), (7, 3, 50))))
    assert gpu.traits.one_sample_each is False


def test_one_sample_in_each_query_of_several_windows_reveals_the_form_of_samples() -> None:
    gpu, shown = known(), []
    for since in range(0, 24, 3):
        take(gpu, poll(50, 50, 50, since=since, uses=((7, since + 3, 50),)))
        shown.append(gpu.traits.one_sample_each)
    assert shown == [None, None, *[True] * 6]


def test_a_resting_process_does_not_reveal_the_form_of_the_drivers_samples() -> None:
    """It also has one sample per query: for the only window in which anything ran."""
    gpu = known()
    for since in range(0, 120, 6):
        take(gpu, poll(0, 0, 40, 0, 0, 0, since=since, uses=((7, since + 3, 40),)))
    assert gpu.traits.one_sample_each is None


@pytest.mark.parametrize(("one_sample_each", "share"), [(True, 0.5), (False, 0.1)])
def test_one_sample_of_several_windows_is_their_mean_or_one_window(
    *, one_sample_each: bool, share: float
) -> None:
    gpu = known(one_sample_each=one_sample_each, clock=CLOCK)
    # Two samples; the second belongs to a window that is not covered yet.
    take(gpu, poll(50, 50, 50, 50, uses=((7, 4, 50),), at=0.5))
    reported = tick(gpu, poll(50, 50, since=4, uses=((7, 6, 50),), at=0.9))
    assert shares(reported) == {7: pytest.approx(share)}


def test_a_tick_has_each_window_of_the_fast_polls_once() -> None:
    gpu = known(clock=CLOCK)
    early, late = ((7, 1, 10), (7, 2, 20), (7, 3, 30), (7, 4, 40)), ((7, 4, 40), (7, 5, 50))
    take(gpu, poll(10, 20, 30, 40, uses=early, at=0.5))
    reported = tick(gpu, poll(40, 50, 0, since=3, uses=late, at=0.9))
    assert reported.reading.utilization_ratio == pytest.approx(0.3)
    assert shares(reported) == {7: pytest.approx(0.3)}


def test_the_next_query_begins_where_the_last_one_ended() -> None:
    gpu = known()
    assert gpu.cursor(is_set_back=False) == gpu.last.last_seen
    clock = DriverClock(
        earliest_us=START_US + WINDOW_US, latest_us=START_US + 2 * WINDOW_US, covered_us=START_US
    )
    gpu.last = replace(gpu.last, clock=clock, read_ns=SECOND_NS)
    closed_us = START_US + 2.5 * WINDOW_US
    at = 1.0 + 1.5 * WINDOW_US / (1 - 0.0005) / 10**6
    take(gpu, poll(10, 20, uses=((7, 1, 10),), at=at))
    cursor = gpu.cursor(is_set_back=False)
    assert cursor.gpu_us == START_US + 2 * WINDOW_US
    # Even if nothing ran: a mean from an earlier time would include that time.
    assert cursor.process_us == pytest.approx(closed_us, abs=2)
    assert gpu.cursor(is_set_back=True) == gpu.last.last_seen


def test_a_process_that_came_and_went_between_two_ticks_is_in_the_tick() -> None:
    gpu = known()
    take(gpu, poll(pids=(7,)))
    assert not gpu.is_watched_closely(2 * SECOND_NS)
    take(gpu, poll(pids=(7, 8), at=2.0))
    assert gpu.is_watched_closely(2 * SECOND_NS)
    take(gpu, poll(pids=(7,), at=2.5))
    reported = tick(gpu, poll(50, 50, 50, pids=(7,), at=3.0))
    assert [(one.process.pid, one.ended) for one in reported.usages] == [(7, False), (8, True)]
    assert not gpu.is_watched_closely(14 * SECOND_NS)


def test_a_process_that_came_back_has_not_ended() -> None:
    gpu = known()
    take(gpu, *(poll(pids=pids, at=at) for at, pids in ((1.0, (7, 8)), (1.2, (7,)), (1.4, (7, 8)))))
    reported = tick(gpu, poll(50, 50, 50, pids=(7, 8), at=2.0))
    assert [(one.process.pid, one.ended) for one in reported.usages] == [(7, False), (8, False)]


def test_a_process_on_both_lists_is_a_compute_process() -> None:
    both = tuple(
        ListedProcess(pid=7, kind=kind, memory_bytes=1)
        for kind in (ProcessKind.COMPUTE, ProcessKind.GRAPHICS)
    )
    gpu = known()
    take(gpu, replace(poll(), processes=both))
    reported = tick(gpu, poll(pids=(), at=2.0))
    assert [one.process.kind for one in reported.usages] == [ProcessKind.COMPUTE]


def test_the_latest_rates_reveal_a_driver_that_leaves_out_idle_windows() -> None:
    gpu, newest_us = known(), START_US + 2 * WINDOW_US
    reported, later = poll(10, 20, latest=0), poll(latest=30)
    shown = []
    for answer, windows in ((reported, 0.9), (reported, 1.5), (later, 1.6)):
        closed_us = newest_us + windows * WINDOW_US
        clock = DriverClock(earliest_us=closed_us, latest_us=closed_us, covered_us=START_US)
        gpu.last = replace(gpu.last, clock=clock, read_ns=SECOND_NS)
        gpu.take(replace(answer, since_us=2 * START_US), is_querying=False)
        shown.append(gpu.traits.skips_idle)
    assert shown == [False, True, False]


@pytest.mark.parametrize(
    ("law", "since", "at", "is_querying"),
    [
        ("a tick is querying the same", 6, 1.4, True),
        ("a tick with a later query has returned", 6, 0.9, False),
        ("a query that began later has returned", 5, 1.4, False),
    ],
)
def test_a_fast_poll_that_returns_too_late_counts_only_for_its_energy(
    law: str,
    since: int,
    at: float,
    is_querying: bool,  # noqa: FBT001  # a column of the table
) -> None:
    gpu = known(clock=CLOCK)
    tick(gpu, poll(20, 20, 20, 20, 20, 20, uses=((7, 6, 20),)))
    cursor = gpu.cursor(is_set_back=False)
    late = poll(90, since=since, uses=((7, since + 1, 90),), pids=(), at=at)
    assert not gpu.take(late, is_querying=is_querying), law
    assert gpu.cursor(is_set_back=False) == cursor


def test_a_failed_fast_poll_loses_only_the_samples_of_its_gpu() -> None:
    gpu = known(clock=CLOCK)
    take(gpu, poll(90, 90, 90, 90, uses=((7, 4, 90),), pids=(7, 8), at=0.5))
    gpu.drop_polled()
    assert gpu.cursor(is_set_back=False) == gpu.last.last_seen
    uses = tuple((7, window, 10) for window in range(1, 7))
    reported = tick(gpu, poll(10, 10, 10, 10, 10, 10, uses=uses, at=1.0))
    assert shares(reported)[7] == pytest.approx(0.1)
    assert reported.reading.utilization_ratio == pytest.approx(0.1)


def clocks(seconds: float, *, wall_us: int = 0) -> ClockReading:
    ns = round(seconds * SECOND_NS)
    return ClockReading(time_ns=wall_us * 1000, monotonic_ns=ns, boottime_ns=ns)


def kept(
    stamps: Sequence[int], at: ClockReading, ahead_us: int | None = None
) -> tuple[list[int], int | None, Counter[str]]:
    """Return which stamps of a query are kept, equal for all three kinds, and the counts."""
    dropped: Counter[str] = Counter()
    utilization = tuple(UtilizationSample(timestamp_us=stamp, percent=1) for stamp in stamps)
    answer = FastPoll(
        uuid="GPU-0",
        at=at,
        samples=utilization,
        memory_samples=utilization,
        process_samples=tuple(
            ProcessUtilizationSample(pid=7, timestamp_us=stamp, sm_percent=1, memory_percent=1)
            for stamp in stamps
        ),
    )
    left, ahead_us = drop_impossible(answer, at, ahead_us=ahead_us, dropped=dropped)
    found = [
        [one.timestamp_us for one in reported or ()]
        for reported in (left.samples, left.memory_samples, left.process_samples)
    ]
    assert found[0] == found[1] == found[2]
    return found[0], ahead_us, dropped


NOW_US = 10**15
MINUTE_US = 60_000_000


@pytest.mark.parametrize(
    ("law", "stamps", "expected"),
    [
        ("current stamps are kept", [NOW_US - 5, NOW_US], [NOW_US - 5, NOW_US]),
        ("a minute ahead is kept", [NOW_US + MINUTE_US], [NOW_US + MINUTE_US]),
        ("a bit more is not", [NOW_US, NOW_US + MINUTE_US + 1], [NOW_US]),
        ("not even if it is the only one", [NOW_US + MINUTE_US + 1], []),
        ("an impossible stamp is not", [NOW_US, 2**63, 2**64 - 1], [NOW_US]),
        ("not even if there are several", [2**63, 2**63 + 1], []),
        ("stamps since boot are kept", [5, 500], [5, 500]),
        ("several that agree belong to another clock", [3 * NOW_US, 3 * NOW_US + 1], None),
    ],
)
def test_samples_stamped_too_far_ahead_are_dropped(
    law: str, stamps: list[int], expected: list[int] | None
) -> None:
    expected = stamps if expected is None else expected
    left, _, dropped = kept(stamps, clocks(1.0, wall_us=NOW_US))
    assert left == expected, law
    assert set(dropped.values()) <= {len(stamps) - len(expected)}


def test_samples_with_the_old_stamps_are_still_kept_after_the_wall_clock_is_set_back() -> None:
    first, ahead_us, _ = kept([NOW_US], clocks(1.0, wall_us=NOW_US))
    assert first
    set_back = clocks(2.0, wall_us=NOW_US - 3600 * 10**6)
    later = NOW_US + 10**6
    assert kept([later, later + 2 * MINUTE_US], set_back, ahead_us)[0] == [later]
    assert kept([later], set_back)[0] == []
