"""The intervals of a node's ticks meet, whatever windows its drivers turn out to have."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuledger_agent.core.raw import ClockReading
from gpuledger_agent.core.tick_clock import TickClock, TickInterval

SECOND_NS = 1_000_000_000


def at(seconds: float) -> ClockReading:
    ns = round(seconds * SECOND_NS)
    return ClockReading(time_ns=10**18 + ns, monotonic_ns=ns, boottime_ns=ns + 7)


def tick(
    windows_us: list[list[float]], sampling_interval_seconds: float = 1.0
) -> list[TickInterval]:
    """Return the intervals of ticks; before each tick, windows of these lengths are known."""
    clock, made = TickClock(), []
    for number, known in enumerate(windows_us):
        now = at((number + 100) * sampling_interval_seconds)
        length_ns = clock.follow(now)
        clock.learn_lag(known)
        if length_ns:
            made.append(clock.interval(now, length_ns))
    return made


windows = st.lists(st.sampled_from([20_000.0, 166_667.0, 250_000.0, 1e6, 6e8]), max_size=2)


@given(st.lists(windows, min_size=3, max_size=20), st.sampled_from([0.2, 1.0, 10.0]))
def test_intervals_have_neither_overlaps_nor_holes(
    windows_us: list[list[float]], sampling_interval_seconds: float
) -> None:
    for earlier, later in pairwise(tick(windows_us, sampling_interval_seconds)):
        assert later.begin_ns == earlier.end_ns < later.end_ns
        assert later.from_time_ns == earlier.time_ns


@pytest.mark.parametrize(
    ("law", "windows_us", "lag_seconds"),
    [
        ("without windows there is no lag", [[]] * 4, 0.0),
        ("the lag is one and a half windows", [[200_000.0]] * 4, 0.3),
        ("of the longest window", [[200_000.0, 400_000.0]] * 4, 0.6),
        ("at most that of a window of a second", [[6e8]] * 4, 1.5),
        ("almost equal lengths count as equal", [[200_000.0]] * 3 + [[205_000.0]], 0.3),
        ("a longer lag is reached in several ticks", [[200_000.0]] * 3 + [[1e6]] * 5, 1.5),
        ("so is a shorter one", [[1e6]] * 3 + [[200_000.0]] * 4, 0.3),
        ("without an answer from a driver it stays", [[200_000.0]] * 3 + [[]], 0.3),
    ],
)
def test_a_tick_lags_so_far_behind_that_all_its_time_is_sampled(
    law: str, windows_us: list[list[float]], lag_seconds: float
) -> None:
    last = tick(windows_us)[-1]
    now = at(len(windows_us) - 1 + 100)
    assert (now.boottime_ns - last.end_ns) / SECOND_NS == pytest.approx(lag_seconds), law
    assert now.time_ns - last.time_ns == now.boottime_ns - last.end_ns


def test_samples_of_both_times_are_expected_until_the_drivers_buffers_are_renewed() -> None:
    """Or until the clock has passed its former time, whichever is earlier."""
    shown = {}
    for back_seconds in (0.01, 5, 3600):
        clock = TickClock()
        shown[back_seconds] = 0
        for second in range(400):
            back_ns = round(back_seconds * SECOND_NS) if second >= 100 else 0
            now = at(second)
            clock.follow(replace(now, time_ns=now.time_ns - back_ns))
            shown[back_seconds] += clock.is_set_back
    assert shown == {0.01: 0, 5: 8, 3600: 152}
