"""A driver is late if an answer lacks the sample of a window that had closed by then."""

from collections.abc import Sequence

import pytest

from gpuledger_agent.core.normalize.driver_clock import DriverClock
from gpuledger_agent.core.normalize.lateness import Lateness
from gpuledger_agent.core.raw import AnswerTime

SECOND_NS = 1_000_000_000
SECOND_US = 1_000_000
WINDOW_US = 200_000
SINCE_BOOT_US = 5_000 * SECOND_US
SINCE_EPOCH_US = 1_795_000_000 * SECOND_US


def learn(
    late_seconds: Sequence[float],
    *,
    first_us: int = SINCE_BOOT_US,
    lateness: Lateness = Lateness(),  # noqa: B008  # frozen, so sharing it is safe
    first_second: int = 0,
) -> Lateness:
    """Return what answers show, one each second, whose newest windows are late by these times."""
    seen_us = 0
    for second, late in enumerate(late_seconds, first_second):
        newest_us = first_us + round((second - late) * SECOND_US) // WINDOW_US * WINDOW_US
        stamps = range(max(seen_us, newest_us - 20 * SECOND_US), newest_us + 1, WINDOW_US)
        seen_us = max(seen_us, newest_us)
        lateness = lateness.learn(
            stamps,
            given=AnswerTime(second * SECOND_NS, second * SECOND_NS),
            wall_us=SINCE_EPOCH_US + second * SECOND_US,
            window_us=WINDOW_US,
        )
    return lateness


@pytest.mark.parametrize(
    ("law", "late_seconds", "late"),
    [
        ("samples in time are not late", [0.0] * 9, 0.0),
        ("nor are samples that jitter by less than half a window", [0.0, 0.05] * 5, 0.0),
        ("a sample is late by the time since its window closed", [0, 1, 2] * 3 + [0], 1.8),
        ("the maximum counts", [0, 1, 0, 1, 2, 3, 0, 1, 0], 2.8),
        ("two late answers prove nothing", [0, 1, 2, 0, 0, 1, 2, 0, 0], 0.0),
        ("over ten seconds are a change of the clock", [*range(13)] * 4 + [0], 0.0),
    ],
)
def test_lateness_is_what_an_answer_lacked_by_the_drivers_own_clock(
    law: str, late_seconds: list[float], late: float
) -> None:
    found = learn(late_seconds)
    assert found.late_us == pytest.approx(late * SECOND_US, abs=20_000), law
    assert found.shifts_usage == (late > 0), law


def test_samples_that_are_all_equally_late_show_it_only_by_the_wall_clock() -> None:
    by_boot, by_wall = learn([2.0] * 9), learn([2.0] * 9, first_us=SINCE_EPOCH_US)
    assert [(one.late_us, one.shifts_usage) for one in (by_boot, by_wall)] == [
        (0, False),
        (0, True),
    ]
    assert not learn([0.3] * 9, first_us=SINCE_EPOCH_US).shifts_usage


def test_a_late_drivers_clock_is_corrected_by_the_wall_clock() -> None:
    shown_us = SINCE_EPOCH_US - 2 * SECOND_US
    clock = DriverClock(earliest_us=shown_us - 5, latest_us=shown_us, covered_us=shown_us - 9)
    late = learn([2.0] * 9, first_us=SINCE_EPOCH_US)
    corrected = late.correct(clock, wall_us=SINCE_EPOCH_US)
    assert (corrected.latest_us, corrected.earliest_us) == (SINCE_EPOCH_US, SINCE_EPOCH_US - 5)
    assert corrected.covered_us == clock.covered_us
    assert Lateness().correct(clock, wall_us=SINCE_EPOCH_US) == clock


def test_lateness_counts_for_an_hour_after_it_was_shown() -> None:
    late = learn([0, 1, 2] * 3 + [0])
    assert learn([0.0] * 3, lateness=late.interrupt(), first_second=3500).shifts_usage
    assert not learn([0.0] * 3, lateness=late.interrupt(), first_second=3700).shifts_usage


def test_a_stop_of_the_drivers_clock_is_not_lateness() -> None:
    """After a reload, or after the clock was set back, earlier stamps show nothing."""
    before = learn([0.0] * 5)
    after = learn([3.0] * 9, lateness=before.interrupt(), first_second=5)
    assert after.late_us == 0
