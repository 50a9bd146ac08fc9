"""Exact confidence intervals and tests for rare events, with the standard library. Pure."""

import math
from collections.abc import Callable
from typing import Final

_STEPS: Final = 60
_NEGLIGIBLE: Final = 1e-17


def poisson_interval(count: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Return the confidence interval for the mean of a Poisson distribution, given a count.

    This is the exact interval of Garwood (1936). At the lower limit, the probability of at least
    `count` events is half of 1 - `confidence`; at the upper limit, that of at most `count` events.
    """
    tail = (1 - confidence) / 2
    highest = count + 10 * math.sqrt(count + 1) + 10
    low = 0.0
    if count:
        low = _root(lambda mean: tail - (1 - _poisson_cdf(count - 1, mean)), 0.0, float(count))
    return low, _root(lambda mean: _poisson_cdf(count, mean) - tail, float(count), highest)


def binomial_tail(count: int, trials: int, share: float) -> float:
    """Return the probability of at least `count` successes, each with the probability `share`."""
    if count <= 0 or share >= 1:
        return 1.0
    if share <= 0:
        return 0.0
    of_all, found = math.lgamma(trials + 1), 0.0
    for number in range(count, trials + 1):
        part = math.exp(
            of_all
            - math.lgamma(number + 1)
            - math.lgamma(trials - number + 1)
            + number * math.log(share)
            + (trials - number) * math.log1p(-share)
        )
        found += part
        # Above the mean, the terms decrease.
        if number > trials * share and part < found * _NEGLIGIBLE:
            break
    return min(1.0, found)


def _poisson_cdf(count: int, mean: float) -> float:
    """Return the probability of at most `count` events."""
    if mean <= 0:
        return 1.0
    return math.fsum(
        math.exp(number * math.log(mean) - mean - math.lgamma(number + 1))
        for number in range(count + 1)
    )


def _root(decreasing: Callable[[float], float], low: float, high: float) -> float:
    """Return the zero of a decreasing function, by bisection."""
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if decreasing(middle) > 0 else (low, middle)
    return (low + high) / 2
