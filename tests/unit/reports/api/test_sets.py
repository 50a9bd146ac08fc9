"""Sets: how steps and the calendar divide a window."""

from datetime import UTC, datetime
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.errors import ArgumentError
from gpuledger_reports.api.sets import MAX_SETS, Accumulate, parse_accumulate, sets_of
from gpuledger_reports.reading.times import DAY_US, Window

HOUR_US = 3_600_000_000


def us(text: str) -> int:
    """Return a time of October 2026 from text such as `07 13:45`, or with its month before it."""
    whole = f"2026-10-{text}" if text[2:3] != "-" else f"2026-{text}"
    form = "%Y-%m-%d %H:%M" if ":" in whole else "%Y-%m-%d"
    return int(datetime.strptime(whole, form).replace(tzinfo=UTC).timestamp()) * 10**6


@pytest.mark.parametrize(
    ("step", "accumulate", "expected"),
    [
        (None, "", ["01 05:00", "15 07:00"]),
        ("1w", "all", ["01 05:00", "15 07:00"]),
        ("1w", "", ["01 05:00", "08 05:00", "15 05:00", "15 07:00"]),
        (None, "week", ["01 05:00", "04", "11", "15 07:00"]),
        ("1h", "month", ["01 05:00", "15 07:00"]),
    ],
)
def test_sets_are_divided_by_steps_and_calendars(
    step: str | None, accumulate: Accumulate, expected: list[str]
) -> None:
    window = Window(us("01 05:00"), us("15 07:00"))
    cuts = [us(text) for text in expected]
    found = sets_of(window, step=step, accumulate=accumulate)
    assert found == tuple(map(Window, cuts, cuts[1:]))


def test_quarters_begin_in_january_april_july_and_october() -> None:
    cuts = [us(text) for text in ("02-15", "04-01", "07-01", "10-01", "11-02")]
    found = sets_of(Window(cuts[0], cuts[-1]), step=None, accumulate="quarter")
    assert found == tuple(map(Window, cuts, cuts[1:]))


@given(
    begin=st.integers(0, 60 * 365 * 24),
    hours=st.integers(1, MAX_SETS),
    accumulate=st.sampled_from(["", "true", "hour", "day", "week", "weeknow", "month", "quarter"]),
    step=st.none() | st.integers(1, 24 * 40).map(lambda hours: f"{hours}h"),
)
def test_sets_cover_each_hour_of_the_window_once(
    begin: int, hours: int, accumulate: str, step: str | None
) -> None:
    window = Window(begin * HOUR_US, (begin + hours) * HOUR_US)
    sets = sets_of(window, step=step, accumulate=parse_accumulate(accumulate))
    assert (sets[0].begin_us, sets[-1].end_us) == window
    assert all(one.end_us == other.begin_us for one, other in pairwise(sets))
    assert all(one.begin_us < one.end_us and one.begin_us % HOUR_US == 0 for one in sets)
    if accumulate == "day":
        assert {one.begin_us % DAY_US for one in sets[1:]} <= {0}


@pytest.mark.parametrize(("step", "accumulate"), [("1h", ""), (None, "hour")])
def test_more_sets_than_the_maximum_are_rejected(step: str | None, accumulate: Accumulate) -> None:
    with pytest.raises(ArgumentError, match=str(MAX_SETS)):
        sets_of(Window(0, 60 * DAY_US), step=step, accumulate=accumulate)
