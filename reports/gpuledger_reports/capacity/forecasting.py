"""Forecasts an hourly series of demand. Pure.

Three methods compete for each series:

- `seasonal_naive` repeats the last week.
- `weekly_profile` takes the median of each hour of the week over all weeks, and adds the last
  day's mean difference from it, which fades out with a time constant of two weeks.
- `weekly_trend` does the same with the last eight weeks without their trend, and then continues the
  trend. The trend is the median slope between the means of any two weeks (Theil and Sen).

A rolling backtest forecasts from every day of the newest year, with only the data before it. The
method with the smallest mean absolute error is chosen. Hours of unknown demand have an assumed
value, from which the methods learn, but no error.

The bands come from the errors of the backtest by adaptive conformal inference (Gibbs and Candès,
2021). The band of the n-th day ahead lies between two quantiles of the errors n days ahead. At
first, the share of errors outside these quantiles is 1 minus the nominal coverage. If more errors
of a day are outside, the share shrinks, so the band widens; if fewer are outside, the share grows.

The errors of one past forecast belong together: a demand that has grown stays higher for the rest
of the horizon. The time until a capacity is exceeded is therefore found on whole paths: the
forecast plus the errors of one past forecast each. Hourly noise is counted twice: once in the
history and once in the past error. An hour of a path therefore exceeds the largest demand
so far by at most the factor by which the mean of the path's day exceeds that of any day so far.
"""

import math
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median
from typing import Final

DAY: Final = 24
"""Hours."""
WEEK: Final = 7 * DAY
_TRAINING: Final = 2 * WEEK
"""Hours before the first forecast of a backtest."""
_ORIGINS: Final = 14
"""The minimum number of past forecasts whose whole horizon is known."""
_HORIZONS: Final = 3
"""The minimum history in horizons. Past forecasts that overlap have about the same errors."""
NEWEST: Final = 52 * WEEK
"""The hours of history that are used. More would take time, and hardly change a forecast."""
_FADING: Final = 2 * WEEK
_TREND: Final = 8 * WEEK
"""Hours from which a trend is estimated."""
_MEASURED_DAYS: Final = 56
_STEP: Final = 0.01
"""How fast a band adapts to its misses; gamma in the literature.

The candidates were 0, 0.01, 0.02 and 0.05. This value had the coverage nearest to 80 % on two
traces (tests/data/traces)."""

Method = Callable[[Sequence[float], int], list[float]]
_Limits = tuple[float, float]
_NO_LIMITS: Final = (-math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class Band:
    """Limits of a forecast, one pair per hour."""

    nominal: float
    """Share of hours that should lie within the limits, such as 0.8."""
    measured: float
    """Share of hours that past bands contained in the last week of their horizon, over eight
    weeks."""
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Forecast:
    """The forecast of a series, in the series' unit, beginning with the hour after its end."""

    method: str
    expected: tuple[float, ...]
    bands: tuple[Band, ...]
    error: float
    """Mean absolute error of the backtest."""
    naive_error: float
    """Mean absolute error of `seasonal_naive`."""
    paths: tuple[tuple[float, ...], ...]
    """The forecast with the errors of each past forecast: equally likely futures."""

    def hours_until_above(self, capacity: float, shares: Sequence[float]) -> list[int | None]:
        """Return, for each share, the hours after which this share of futures exceeds the capacity.

        `None` means later than the horizon. Shares of 0.1, 0.5 and 0.9 give P10, P50 and P90.
        """
        horizon = len(self.expected)
        crossed = sorted(
            next((hour for hour, value in enumerate(path) if value > capacity), horizon)
            for path in self.paths
        )
        last = len(crossed) - 1
        found = [crossed[min(last, int(share * len(crossed)))] for share in shares]
        return [None if hour == horizon else hour for hour in found]


def hours_needed(horizon: int) -> int:
    """Return the minimum length of a series for a forecast of `horizon` hours."""
    return max(_TRAINING + (_ORIGINS - 1) * DAY + horizon, _HORIZONS * horizon)


def forecast(
    series: Sequence[float],
    horizon: int,
    *,
    known: Sequence[bool] | None = None,
    coverages: Sequence[float] = (0.8, 0.95),
    pause: Callable[[], None] = lambda: None,
) -> Forecast:
    """Forecast `horizon` hours of a series of hourly values that are not negative.

    `known` tells whether the value of each hour is known, by default of all. `pause` is called
    between steps, and may raise to end the work.

    Raises `ValueError` if fewer hours are known than `hours_needed`.
    """
    known = known or [True] * len(series)
    if (hours := sum(known)) < (needed := hours_needed(horizon)):
        raise ValueError(f"{hours} hours of history are too few; {needed} are needed")
    # For a long horizon, or with few known hours in the newest year, older hours count, too.
    oldest_needed = [at for at, is_known in enumerate(known) if is_known][-needed]
    begin = max(0, min(oldest_needed, len(series) - max(NEWEST, 2 * needed)))
    series, known = series[begin:], known[begin:]
    actual = [
        value if is_known else math.nan for value, is_known in zip(series, known, strict=True)
    ]
    tests = {
        name: _backtest(series, actual, method, horizon, pause) for name, method in METHODS.items()
    }
    means = {name: _mean_error(errors) for name, errors in tests.items()}
    best = min(means, key=means.__getitem__)
    expected = METHODS[best](series, horizon)
    return Forecast(
        method=best,
        expected=tuple(expected),
        bands=tuple(_band(tests[best], expected, coverage) for coverage in coverages),
        error=means[best],
        naive_error=means["seasonal_naive"],
        paths=tuple(
            _path(series, expected, errors) for errors in tests[best] if len(errors) == horizon
        ),
    )


def seasonal_naive(series: Sequence[float], horizon: int) -> list[float]:
    """Repeat the last week."""
    return [series[-WEEK + hour % WEEK] for hour in range(horizon)]


def weekly_profile(series: Sequence[float], horizon: int) -> list[float]:
    """Repeat the median week, and add the last day's difference, which fades out."""
    whole = series[len(series) % WEEK :]
    profile = [median(whole[hour::WEEK]) for hour in range(WEEK)]
    differences = (
        value - usual for value, usual in zip(series[-DAY:], profile[-DAY:], strict=True)
    )
    level = fmean(differences)
    return [
        max(0.0, profile[hour % WEEK] + level * math.exp(-(hour + 1) / _FADING))
        for hour in range(horizon)
    ]


def weekly_trend(series: Sequence[float], horizon: int) -> list[float]:
    """Forecast the last weeks without their trend by `weekly_profile`, and continue the trend."""
    recent = series[-_TREND:]
    weeks = [fmean(recent[at : at + WEEK]) for at in range(len(recent) % WEEK, len(recent), WEEK)]
    pairs = combinations(enumerate(weeks), 2)
    slope = median((after - before) / (later - earlier)
                   for (earlier, before), (later, after) in pairs) / WEEK  # fmt: skip
    level = [value + slope * (len(recent) - at) for at, value in enumerate(recent)]
    return [
        max(0.0, value + slope * hour) for hour, value in enumerate(weekly_profile(level, horizon))
    ]


METHODS: Final[dict[str, Method]] = {
    "weekly_profile": weekly_profile,
    "seasonal_naive": seasonal_naive,
    "weekly_trend": weekly_trend,
}


def _backtest(
    series: Sequence[float],
    actual: Sequence[float],
    method: Method,
    horizon: int,
    pause: Callable[[], None],
) -> list[list[float]]:
    """Forecast from each day of the past; return the errors, fewer for the last forecasts.

    An error is NaN where `actual` is, because the hour is not known.
    """
    first = _TRAINING + (len(series) - _TRAINING) % DAY
    tests: list[list[float]] = []
    for origin in range(first, len(series), DAY):
        pause()
        pairs = zip(actual[origin:], method(series[:origin], horizon), strict=False)
        tests.append([value - expected for value, expected in pairs])
    return tests


def _known(errors: Iterable[float]) -> list[float]:
    return [error for error in errors if not math.isnan(error)]


def _mean_error(tests: list[list[float]]) -> float:
    return fmean(abs(error) for errors in tests for error in _known(errors))


def _path(
    series: Sequence[float], expected: Sequence[float], errors: Sequence[float]
) -> tuple[float, ...]:
    """Return the forecast with the errors; an unknown one is the mean of the last known day."""
    days = range(len(series) % DAY, len(series), DAY)
    peak, largest_day = max(series), max(fmean(series[day : day + DAY]) for day in days)
    path: list[float] = []
    level = 0.0
    for begin in range(0, len(expected), DAY):
        part = errors[begin : begin + DAY]
        level = fmean(known) if (known := _known(part)) else level
        day = [
            value + (level if math.isnan(error) else error)
            for value, error in zip(expected[begin : begin + DAY], part, strict=True)
        ]
        limit = peak * max(1.0, fmean(day) / (largest_day or 1.0))
        path += [min(value, limit) for value in day]
    return tuple(path)


def _band(tests: list[list[float]], expected: list[float], nominal: float) -> Band:
    """Return the band of the forecast, learned separately for each day of the horizon."""
    low: list[float] = []
    high: list[float] = []
    covered: list[float] = []
    for begin in range(0, len(expected), DAY):
        days = [part for errors in tests if (part := _known(errors[begin : begin + DAY]))]
        limits, covered_that_day = _walk(days, delay=begin // DAY + 1, nominal=nominal)
        part = expected[begin : begin + DAY]
        low += [max(0.0, value + limits[0]) for value in part]
        high += [max(0.0, value + limits[1]) for value in part]
        if begin >= len(expected) - WEEK:
            covered += covered_that_day[-_MEASURED_DAYS:]
    return Band(nominal, fmean(covered), tuple(low), tuple(high))


def _walk(days: list[list[float]], *, delay: int, nominal: float) -> tuple[_Limits, list[float]]:
    """Return the limits of the next errors, and the coverage of each past day.

    `days` has the errors of one forecast per day, which are known `delay` days later. The coverage
    of a day is the share of its errors within its limits; days without limits have none.
    """
    limits = _AdaptiveLimits(nominal)
    given: list[_Limits] = []
    for number in range(len(days)):
        if number >= delay:
            limits.learn(days[number - delay], given[number - delay])
        given.append(limits.find())
    for number in range(max(0, len(days) - delay), len(days)):
        limits.learn(days[number], given[number])
    return limits.find(), limits.covered


class _AdaptiveLimits:
    """Quantiles of known errors. The share of errors outside adapts to the coverage."""

    def __init__(self, nominal: float) -> None:
        self._nominal = nominal
        self._outside = 1.0 - nominal
        self._known: list[float] = []
        self.covered: list[float] = []
        """Share of each day's errors within the limits that `find` returned for that day."""

    def find(self) -> _Limits:
        """Return the limits, which are infinite until errors are known."""
        if not self._known:
            return _NO_LIMITS
        count = len(self._known)
        above = min(count, math.ceil((count + 1) * (1.0 - self._outside / 2)))
        below = max(1, math.floor((count + 1) * self._outside / 2))
        return self._known[below - 1], self._known[above - 1]

    def learn(self, errors: list[float], limits: _Limits) -> None:
        """Add a day's errors, and adapt the share outside to how many its limits covered."""
        if limits != _NO_LIMITS:
            covered = sum(limits[0] <= error <= limits[1] for error in errors) / len(errors)
            self.covered.append(covered)
            self._outside = min(1.0, max(0.0, self._outside + _STEP * (covered - self._nominal)))
        for error in errors:
            insort(self._known, error)
