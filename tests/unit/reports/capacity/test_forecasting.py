"""Forecasts of demand: their laws on any series, and their errors on two real clusters."""

import csv
import gzip
import random
from itertools import accumulate
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger_reports.capacity.forecasting import (
    DAY,
    NEWEST,
    WEEK,
    Forecast,
    forecast,
    hours_needed,
)
from tests.tables import for_each

TRACES = Path(__file__).parents[3] / "data/traces"
SHORTEST = hours_needed(WEEK)
WEEKS = 6
amounts = st.integers(0, 10_000).map(float)


def read_trace(name: str) -> list[float]:
    with gzip.open(TRACES / f"{name}_hourly.csv.gz", "rt") as file:
        return [float(row["gpus"]) for row in csv.DictReader(file)]


def by_hour_of_week(week: list[float], hours: int) -> list[float]:
    return [week[hour % WEEK] for hour in range(hours)]


def inside(found: Forecast, band: int, actual: list[float]) -> float:
    """Return the share of the hours within the band."""
    limits = found.bands[band]
    hits = zip(limits.low, actual, limits.high, strict=True)
    return fmean(low <= value <= high for low, value, high in hits)


@for_each(
    "trace, error, naive_error",
    [("spot", 728.0, 923.0), ("philly", 132.0, 173.0)],
)
def test_the_last_six_weeks_of_real_clusters_are_forecast_better_than_by_the_week_before(
    trace: str, error: float, naive_error: float
) -> None:
    series = read_trace(trace)
    errors, naive_errors, coverages, wide_coverages = [], [], [], []
    for origin in range(len(series) - WEEKS * WEEK, len(series), WEEK):
        actual = series[origin : origin + WEEK]
        found = forecast(series[:origin], WEEK)
        errors += [abs(x - y) for x, y in zip(actual, found.expected, strict=True)]
        naive_errors += [
            abs(x - y) for x, y in zip(actual, series[origin - WEEK : origin], strict=True)
        ]
        coverages.append(inside(found, 0, actual))
        wide_coverages.append(inside(found, 1, actual))
    assert fmean(errors) <= error
    assert round(fmean(naive_errors)) == naive_error
    assert 0.75 <= fmean(coverages) <= 0.85
    assert 0.90 <= fmean(wide_coverages) <= 0.99


@given(week=st.lists(amounts, min_size=WEEK, max_size=WEEK), extra=st.integers(0, 300))
def test_a_demand_that_repeats_each_week_is_forecast_exactly(week: list[float], extra: int) -> None:
    length = SHORTEST + extra
    repeated = by_hour_of_week(week, length + WEEK)
    found = forecast(repeated[:length], WEEK)
    assert found.expected == pytest.approx(repeated[length:])
    assert found.error == found.naive_error == pytest.approx(0.0)
    for band in found.bands:
        assert band.low == pytest.approx(found.expected)
        assert band.high == pytest.approx(found.expected)


@given(
    week=st.lists(amounts, min_size=WEEK, max_size=WEEK),
    growth=st.floats(0.0, 100.0),
    extra=st.integers(0, 300),
)
def test_a_demand_that_grows_steadily_is_forecast_exactly_and_within_its_band(
    week: list[float], growth: float, extra: int
) -> None:
    length = SHORTEST + extra
    repeated = by_hour_of_week(week, length + WEEK)
    series = [value + growth * hour for hour, value in enumerate(repeated)]
    found = forecast(series[:length], WEEK)
    assert found.expected == pytest.approx(series[length:], abs=1e-3)
    for band in found.bands:
        assert band.low == pytest.approx(found.expected, abs=1e-3)
        assert band.high == pytest.approx(found.expected, abs=1e-3)


@given(st.data())
def test_bands_contain_each_other_and_no_demand_is_negative(data: st.DataObject) -> None:
    drawn = data.draw(st.lists(amounts, min_size=40, max_size=40))
    # Each value for a part of a day, so that series have jumps and flat parts.
    series = [drawn[hour // 17 % 40] for hour in range(SHORTEST)]
    found = forecast(series, WEEK)
    narrow, wide = found.bands
    assert all(value >= 0.0 for value in (*found.expected, *narrow.low, *wide.low))
    for band in found.bands:
        assert all(high >= low for low, high in zip(band.low, band.high, strict=True))
    assert len(found.expected) == len(narrow.low) == len(wide.high) == WEEK
    assert 0.0 <= narrow.measured <= 1.0


def test_no_limit_is_negative_if_demand_falls_faster_and_faster() -> None:
    found = forecast([1.0 - (hour / SHORTEST) ** 3 for hour in range(SHORTEST)], WEEK)
    for band in found.bands:
        assert all(0.0 <= low <= high for low, high in zip(band.low, band.high, strict=True))


def walk(seed: int, hours: int) -> list[float]:
    """Return a demand that changes at random, independently of its level."""
    drawn = random.Random(seed)  # noqa: S311  # not for secrets
    return list(accumulate((drawn.gauss(0.0, 5.0) for _ in range(hours)), initial=1_000.0))[1:]


def test_four_weeks_ahead_bands_hold_after_the_shortest_history() -> None:
    """About seven of ten weeks are within their bands, also of a demand without a pattern."""
    horizon = 4 * WEEK
    length = hours_needed(horizon) + horizon
    spot = read_trace("spot")
    starts = range(0, len(spot) - length + 1, 2 * WEEK)
    held: dict[str, list[bool]] = {"spot": [], "walk": []}
    for name, series in (
        *(("spot", spot[start : start + length]) for start in starts),
        *(("walk", walk(seed, length)) for seed in range(10)),
    ):
        band = forecast(series[:-horizon], horizon).bands[0]
        low, actual, high = (fmean(each[-WEEK:]) for each in (band.low, series, band.high))
        held[name].append(low <= actual <= high)
    assert fmean(held["spot"]) >= 0.7
    assert fmean(held["walk"]) >= 0.6


def test_the_coverage_is_that_of_the_last_week_of_the_horizon() -> None:
    """Random changes add up, so the first weeks of past horizons were within their bands."""
    series = walk(1, hours_needed(4 * WEEK))
    near, far = (forecast(series, horizon).bands[0].measured for horizon in (WEEK, 4 * WEEK))
    assert near >= 0.7
    assert far <= 0.1


@for_each("horizon", [DAY, WEEK, 14 * DAY, 90 * DAY])
def test_the_shortest_history_is_enough_and_an_hour_less_is_refused(horizon: int) -> None:
    history = [float(hour % DAY) for hour in range(hours_needed(horizon))]
    assert len(forecast(history, horizon).expected) == horizon
    with pytest.raises(ValueError, match=f"{len(history) - 1} hours of history are too few"):
        forecast(history[1:], horizon)


def growing(hours: int) -> list[float]:
    """Return a demand that grows by one GPU per hour."""
    return [float(hour) for hour in range(hours)]


def test_a_growing_demand_exceeds_a_capacity_about_when_it_will() -> None:
    series = growing(20 * WEEK)
    found = forecast(series, WEEK)
    (p50,) = found.hours_until_above(series[-1] + 100.0, [0.5])
    assert p50 is not None
    assert abs(p50 - 100) <= DAY


def test_a_capacity_that_the_demand_never_reaches_is_not_exceeded_within_the_horizon() -> None:
    found = forecast(growing(20 * WEEK), WEEK)
    assert found.hours_until_above(1e9, [0.1, 0.5, 0.9]) == [None, None, None]


@given(capacity=st.floats(0.0, 2_000.0))
def test_an_earlier_end_is_never_less_likely_than_a_later_one(capacity: float) -> None:
    series = [drawn % 1_000.0 for drawn in (7.0 * hour**1.1 for hour in range(SHORTEST))]
    found = forecast(series, WEEK).hours_until_above(capacity, [0.1, 0.5, 0.9])
    known = [WEEK if hours is None else hours for hours in found]
    assert known == sorted(known)


def test_the_chance_of_single_hours_does_not_exceed_a_capacity_that_demand_never_had() -> None:
    """Batch jobs take 7 to 13 GPUs, at random."""
    drawn = random.Random(1)  # noqa: S311  # not for secrets
    series = [drawn.choice([7.0, 9.0, 11.0, 13.0, 13.0]) for _ in range(30 * DAY)]
    found = forecast(series, 2 * DAY)
    assert found.hours_until_above(15.99, [0.1, 0.5, 0.9]) == [None, None, None]
    assert found.hours_until_above(12.99, [0.5]) != [None]


def test_peaks_grow_with_the_demand() -> None:
    """The demand of a day has a peak of twice its mean, and doubles in 20 weeks."""
    series = [
        10.0 * (1 + hour / (20 * WEEK)) * (2.0 if hour % DAY == 12 else 1.0)
        for hour in range(20 * WEEK)
    ]
    (found,) = forecast(series, 2 * WEEK).hours_until_above(41.0, [0.5])
    assert found is not None
    assert abs(found - WEEK) <= 2 * DAY


@for_each("assumed", [0.0, 5.0, 1_000.0])
def test_hours_of_unknown_demand_have_no_error(assumed: float) -> None:
    week = by_hour_of_week([float(hour % DAY) for hour in range(WEEK)], SHORTEST)
    series = [*week, *[assumed] * WEEK]
    found = forecast(series, WEEK, known=[at < SHORTEST for at in range(len(series))])
    assert found.error == pytest.approx(0.0)
    assert all(path == pytest.approx(found.expected) for path in found.paths)


def test_unknown_hours_are_no_history() -> None:
    series = [1.0] * SHORTEST * 2
    with pytest.raises(ValueError, match=f"{SHORTEST - 1} hours of history are too few"):
        forecast(series, WEEK, known=[at > SHORTEST for at in range(len(series))])


def test_only_the_newest_year_is_used_unless_its_known_hours_are_too_few() -> None:
    older, newest = walk(1, 5 * WEEK), walk(2, NEWEST)
    series = [*older, *newest]
    assert forecast(series, WEEK) == forecast(newest, WEEK)
    known = [at < len(series) - NEWEST or at >= len(series) - WEEK for at in range(len(series))]
    assert forecast(series, WEEK, known=known).error > 0.0


def test_work_ends_between_the_forecasts_of_a_backtest() -> None:
    pauses: list[int] = []

    def pause() -> None:
        pauses.append(1)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        forecast([1.0] * SHORTEST, WEEK, pause=pause)
