"""Exact intervals and tests, compared with published values."""

import pytest

from gpuledger_reports.capacity.failure_rates import binomial_tail, poisson_interval


@pytest.mark.parametrize(
    ("count", "low", "high"),
    [
        # Garwood's table, as in every textbook of epidemiology.
        (0, 0.0, 3.689),
        (1, 0.0253, 5.572),
        (3, 0.6187, 8.767),
        (10, 4.795, 18.39),
        (100, 81.36, 121.63),
        (1000, 938.97, 1063.94),
    ],
)
def test_the_interval_of_a_count_is_exact(count: int, low: float, high: float) -> None:
    assert list(poisson_interval(count)) == pytest.approx([low, high], rel=1e-3)


@pytest.mark.parametrize(
    ("count", "trials", "share", "expected"),
    [
        (12, 12, 0.5, 2**-12),
        (6, 10, 0.5, 386 / 1024),
        (0, 10, 0.1, 1.0),
        (10, 10, 1.0, 1.0),
        (1, 10, 0.0, 0.0),
        (2, 3, 0.25, 10 / 64),
        (1, 100_000, 1e-5, 1 - (1 - 1e-5) ** 100_000),
    ],
)
def test_the_probability_of_so_many_failures(
    count: int, trials: int, share: float, expected: float
) -> None:
    assert binomial_tail(count, trials, share) == pytest.approx(expected)
