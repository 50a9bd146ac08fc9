"""The interval of the driver's time that a tick covers, whatever the two clocks do."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger_agent.core.normalize.driver_clock import (
    DriverClock,
    Freshness,
    advance,
    freshness,
    sync,
)
from gpuledger_agent.core.normalize.windows import (
    Interval,
    WindowLength,
    cut_windows,
    mean_percent,
    window_at,
)
from gpuledger_agent.core.raw import AnswerTime, UtilizationSample

WINDOW_US = 200_000


def sampled(*stamps: int, percent: int = 50) -> list[UtilizationSample]:
    return [UtilizationSample(timestamp_us=stamp, percent=percent) for stamp in stamps]


def watch(moments_us: list[float]) -> tuple[list[Interval], list[int]]:
    """Cover the time of a driver whose windows close at multiples of their length."""
    time: DriverClock | None = None
    intervals, stamps, before_us = [], [], moments_us[0]
    for now_us in moments_us:
        stamps.append(int(now_us // WINDOW_US) * WINDOW_US)
        time, interval = advance(
            time, newest_us=stamps[-1], window_us=WINDOW_US, interval_us=now_us - before_us
        )
        intervals.append(interval)
        before_us = now_us
    return intervals, stamps


@given(st.lists(st.floats(min_value=2e5, max_value=3e6), min_size=1, max_size=30))
def test_intervals_meet_and_never_go_beyond_the_newest_window(lengths: list[float]) -> None:
    moments = [5e6]
    for length in lengths:
        moments.append(moments[-1] + length)
    intervals, stamps = watch(moments)
    for before, after in pairwise(intervals):
        assert after.start_us == before.end_us
    for interval, stamp in zip(intervals, stamps, strict=True):
        assert stamp - 2 * WINDOW_US <= interval.end_us <= stamp
        assert interval.end_us >= interval.start_us


def test_the_covered_time_ends_up_one_and_a_half_windows_behind_at_any_phase_of_the_ticks() -> None:
    for phase in range(0, WINDOW_US, 10_000):
        moments = [5e6 + phase + place * 1_030_000 for place in range(20)]
        intervals, _ = watch(moments)
        assert moments[-1] - intervals[-1].end_us == pytest.approx(1.5 * WINDOW_US, abs=25_000)
        later = [interval.end_us - interval.start_us for interval in intervals[8:]]
        assert later == pytest.approx([1_030_000] * len(later), abs=15_000)


@given(st.lists(st.sampled_from([0.0, 3e5, 2e6, 5e6]), min_size=2, max_size=20))
def test_a_wait_for_late_samples_neither_repeats_nor_omits_time(waits_us: list[float]) -> None:
    time, covered_us = None, 0.0
    for second, wait_us in enumerate(waits_us, 20):
        time, interval = advance(
            time,
            newest_us=second * 10**6,
            window_us=WINDOW_US,
            interval_us=1e6,
            wait_us=wait_us,
        )
        assert interval.start_us == covered_us or second == 20
        assert interval.end_us == max(interval.start_us, time.covered_us)
        assert interval.end_us <= max(interval.start_us, second * 1e6 - wait_us)
        covered_us = interval.end_us


@pytest.mark.parametrize("leap_us", [-700_000, 700_000, 3_600_000_000])
def test_the_covered_time_follows_a_leap_of_the_drivers_clock(leap_us: int) -> None:
    intervals, stamps = watch([5e6, 6e6, 7e6, 8e6 + leap_us, 9e6 + leap_us])
    assert stamps[-1] - 2 * WINDOW_US <= intervals[-1].end_us <= stamps[-1]
    for before, after in pairwise(intervals):
        assert after.start_us == before.end_us <= after.end_us


def test_a_stopped_driver_clock_covers_no_time_twice() -> None:
    time, first = advance(None, newest_us=10**6, window_us=WINDOW_US, interval_us=1e6)
    covered = first.end_us
    for _ in range(5):
        time, interval = advance(time, newest_us=10**6, window_us=WINDOW_US, interval_us=1e6)
        assert interval.start_us == covered
        covered = interval.end_us
    assert covered <= 10**6


@given(
    pauses_ms=st.lists(st.integers(1, 3000), min_size=1, max_size=30),
    ahead_us=st.integers(0, 10**9),
    call_ms=st.integers(0, 300),
)
def test_answers_at_any_time_never_exclude_the_time_of_the_drivers_clock(
    pauses_ms: list[int], ahead_us: int, call_ms: int
) -> None:
    bounds, now_ms = None, 0
    for pause_ms in pauses_ms:
        now_ms += pause_ms
        newest_us = (now_ms * 1000 + ahead_us) // WINDOW_US * WINDOW_US
        given = AnswerTime((now_ms - call_ms) * 10**6, now_ms * 10**6)
        bounds = sync(bounds, newest_us, given=given, window_us=WINDOW_US)
        earliest_us, latest_us = bounds.at(now_ms * 10**6).bounds(WINDOW_US)
        assert earliest_us <= now_ms * 1000 + ahead_us <= latest_us


def test_ten_answers_in_a_window_show_the_drivers_clock_to_a_tenth_of_it() -> None:
    bounds = None
    for number in range(11):
        now_us = 5_000_000 + number * WINDOW_US // 10
        given = AnswerTime(now_us * 1000, now_us * 1000)
        bounds = sync(bounds, now_us // WINDOW_US * WINDOW_US, given=given, window_us=WINDOW_US)
    assert bounds
    earliest_us, latest_us = bounds.bounds(WINDOW_US)
    assert latest_us - earliest_us == pytest.approx(WINDOW_US / 10, abs=WINDOW_US / 1000)


@pytest.mark.parametrize("leap_us", [-3_600_000_000, -400_000, 400_000, 3_600_000_000])
def test_after_a_leap_of_the_drivers_clock_only_later_answers_count(leap_us: int) -> None:
    before, after = 5_000_000, 6_000_000 + leap_us
    bounds = sync(None, before, given=AnswerTime(10**9, 10**9), window_us=WINDOW_US)
    bounds = sync(bounds, after, given=AnswerTime(2 * 10**9, 2 * 10**9), window_us=WINDOW_US)
    assert bounds.bounds(WINDOW_US) == pytest.approx((after, after + WINDOW_US), abs=1000)


def learn(window: WindowLength, gaps: Sequence[int], stamp: int = 10**9) -> WindowLength:
    """Return the estimate after an answer with these gaps in ms.

    A negative gap has its length without the sign; the driver omitted an idle window in it.
    """
    stamps = list(accumulate((abs(gap) * 1000 for gap in gaps), initial=stamp))
    idle_after = [at for at, gap in zip(stamps, gaps, strict=False) if gap < 0]
    return window.learn(sampled(*stamps), before_us=0, idle_after=idle_after)


def learned(*answers: Sequence[int]) -> float | None:
    """Return the window length in ms learned from gaps in ms, given per query; normally 166.667."""
    window = WindowLength()
    for gaps in answers:
        window = learn(window, gaps, window.newest_us or 10**9)
    return None if window.length_us is None else window.length_us / 1000


@pytest.mark.parametrize(
    ("law", "answers", "expected"),
    [
        ("nothing to learn from", [[]], None),
        ("a long gap may be several windows", [[333]], None),
        ("so may different gaps", [[500, 333, 1000, 667, 500, 833]], None),
        ("a gap longer than any window does not count", [[3500] * 9, [3500] * 9, [3500] * 9], None),
        ("two stamps of one window are not a gap", [[166, 3, 165]], 165.5),
        ("a shorter gap is learned at once", [[100]], 100),
        ("also in a later query", [[333, 500], [1000], [167]], 167),
        ("a late sample does not shorten a certain length", [[166] * 4, [20, 166]], 166),
        ("three gaps that are not multiples are accepted", [[250, 500, 250, 750, 250]], 250),
        ("including jitter of a hundredth", [[248, 500, 252, 750, 251]], 251),
        ("a second, after six equal gaps in three queries", [[1000] * 2] * 3, 1000),
        ("but not after one query", [[1000] * 40], None),
        ("nor after five gaps", [[1000, 1000], [1000], [1000, 1000]], None),
        ("gaps with idle windows count too", [[250, -1000], [-750, 250]], 250),
        ("a third of a second, after six multiples", [[333, -667], [-1000, 333], [-667] * 2], 333),
        ("but not if one gap is not a multiple", [[333, -667], [-500, 333], [-667] * 2], None),
        ("nor if a gap as short had an idle window", [[333, -667], [-333, 333], [-667] * 2], None),
    ],
)
def test_the_window_length_is_learned_from_the_gaps(
    law: str, answers: list[list[int]], expected: float | None
) -> None:
    assert learned(*answers) == expected, law


def test_gaps_of_a_second_do_not_prove_windows_of_a_second() -> None:
    assert learned(*[[-1000] * 3] * 5) is None


@pytest.mark.parametrize(
    ("gaps", "expected"),
    [
        ([], False),
        ([1000], True),
        ([500, 1000], False),
        ([1000, 166], False),
        ([500, -1000], True),
        ([500, -667], False),
        ([500, -500], False),
    ],
)
def test_equal_gaps_leave_the_window_length_in_doubt_unless_gaps_with_idle_windows_refute_it(
    gaps: list[int],
    expected: bool,  # noqa: FBT001  # a column of the table
) -> None:
    assert learn(WindowLength(), gaps).is_doubtful is expected


def test_a_sample_of_zero_proves_at_once_that_a_gap_is_one_window() -> None:
    stamps = [10**9 + number * 1_000_000 for number in range(7)]
    window = WindowLength().learn(sampled(*stamps, percent=0), before_us=0)
    assert (window.length_us, window.is_confirmed) == (1_000_000, True)


@pytest.mark.parametrize(
    ("law", "stamps", "before_us", "expected"),
    [
        ("no samples", [], 0, []),
        ("the first sample has the usual length", [500, 600], 0, [(400, 500), (500, 600)]),
        ("a repeated sample ends at its stamp", [500], 410, [(410, 500)]),
        ("stamps that jitter still meet", [390, 510], 300, [(300, 390), (390, 510)]),
        ("nothing is known of a pause of the driver", [900], 500, [(800, 900)]),
        ("stamps out of order and repeated", [600, 500, 600], 400, [(400, 500), (500, 600)]),
    ],
)
def test_a_window_reaches_back_to_the_previous_one(
    law: str, stamps: list[int], before_us: int, expected: list[tuple[int, int]]
) -> None:
    windows = cut_windows(sampled(*stamps), before_us=before_us, window_us=100)
    assert [(window.start_us, window.end_us) for window in windows] == expected, law


def test_a_mean_is_over_the_known_part_of_the_interval() -> None:
    windows = cut_windows(
        [*sampled(200, percent=10), *sampled(300, percent=40)], before_us=100, window_us=100
    )
    assert mean_percent(windows, Interval(start_us=150, end_us=300)) == pytest.approx((150, 30))
    assert mean_percent(windows, Interval(start_us=50, end_us=150)) == pytest.approx((50, 10))
    # The newest value if nothing of the interval is known.
    assert mean_percent(windows, Interval(start_us=300, end_us=400)) == (0, 40)
    assert mean_percent(windows, None) == (0, 40)
    assert mean_percent([], Interval(start_us=150, end_us=150)) == (0, None)


def test_an_instant_belongs_to_its_own_window_or_else_the_next_one() -> None:
    windows = cut_windows(sampled(200, 300), before_us=100, window_us=100)
    ends = [window_at(windows, time_us) for time_us in (50, 200, 201, 300, 999)]
    assert [window and window.end_us for window in ends] == [200, 200, 300, 300, 300]
    assert window_at([], 100) is None


@pytest.mark.parametrize(
    ("law", "windows_behind", "shown", "expected"),
    [
        ("the rate is the same", 0.5, (30, 30, False), Freshness.LATEST),
        ("without rates there is only the sample", 0.5, (30, None, True), Freshness.LATEST),
        ("a sample of use with a rate of zero", 0.5, (30, 0, False), Freshness.UNKNOWN),
        ("zero with zero", 0.5, (0, 0, False), Freshness.LATEST),
        ("which may be old if idle windows are left out", 0.5, (0, 0, True), Freshness.UNKNOWN),
        ("also before the clock is known", None, (0, 0, True), Freshness.UNKNOWN),
        ("idle windows have closed since", 1.5, (30, 0, False), Freshness.BEHIND),
        ("also if the rates fail now", 1.5, (30, None, True), Freshness.BEHIND),
        ("use in the latest window has a sample", 1.5, (30, 30, True), Freshness.LEAPT),
        ("no sample yet", 1.5, (None, 0, False), Freshness.BEHIND),
    ],
)
def test_the_rate_and_the_covered_time_show_how_fresh_the_newest_sample_is(
    law: str,
    windows_behind: float | None,
    shown: tuple[int | None, int | None, bool],
    expected: Freshness,
) -> None:
    newest, rate, skips_idle = shown
    found = freshness(
        10**9,
        newest,
        rate_percent=rate,
        closed_us=None if windows_behind is None else 10**9 + windows_behind * WINDOW_US,
        window_us=WINDOW_US,
        skips_idle=skips_idle,
    )
    assert found is expected, law


@pytest.mark.parametrize(
    ("law", "windows_behind", "rate", "driver", "expected"),
    [
        ("a driver that is in time is late no more", 0.5, 30, {"late_us": 1e6}, Freshness.LATEST),
        ("a late sample has not come yet", 4.0, 0, {"late_us": 1e6}, Freshness.UNKNOWN),
        ("whatever the rate", 4.0, 30, {"late_us": 1e6}, Freshness.UNKNOWN),
        ("later than ever means idle", 9.0, 0, {"late_us": 1e6}, Freshness.BEHIND),
        ("but not beside use", 9.0, 30, {"late_us": 1e6}, Freshness.UNKNOWN),
        ("a lost sample never comes", 1.5, 30, {"loses_windows": True}, Freshness.UNKNOWN),
        ("and does not mean idle", 1.5, 0, {"loses_windows": True}, Freshness.UNKNOWN),
    ],
)
def test_a_missing_sample_of_a_late_or_lossy_driver_does_not_mean_idle(
    law: str, windows_behind: float, rate: int, driver: dict[str, Any], expected: Freshness
) -> None:
    found = freshness(
        10**9,
        30,
        rate_percent=rate,
        closed_us=10**9 + windows_behind * WINDOW_US,
        window_us=WINDOW_US,
        skips_idle=True,
        **driver,
    )
    assert found is expected, law
