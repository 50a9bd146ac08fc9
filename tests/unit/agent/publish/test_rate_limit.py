"""A backlog is sent faster than it was made, but never faster than allowed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger_agent.publish.publisher import pause_seconds

times = st.lists(st.integers(0, 3_600_000), min_size=2, max_size=60).map(sorted)


@pytest.mark.parametrize(
    ("times_ms", "chance", "seconds"),
    [
        ([0], 0.0, 0.0),
        ([], 0.0, 0.0),
        ([0, 1000], 0.0, 0.04),
        ([0, 1000], 1.0, 0.08),
        ([1000 * second for second in range(60)], 0.0, 1.2),
        ([0, 7_200_000], 0.0, 2.4),
        ([5000, 0], 0.0, 0.0),
        ([*range(0, 30_000, 1000), *range(3_600_000, 3_630_000, 1000)], 0.0, 1.2),
    ],
    ids=[
        "one",
        "none",
        "two",
        "two, unlucky",
        "a minute",
        "a gap of hours",
        "a clock set back",
        "a minute with a leap",
    ],
)
def test_a_pause_is_the_time_of_the_ticks_divided_by_the_factor(
    times_ms: list[int], chance: float, seconds: float
) -> None:
    assert pause_seconds(times_ms, factor=50, chance=chance) == pytest.approx(seconds)


@given(times_ms=times, chance=st.floats(0, 1))
def test_ticks_are_sent_at_between_half_the_factor_and_the_factor(
    times_ms: list[int], chance: float
) -> None:
    fastest = pause_seconds(times_ms, factor=50, chance=0)
    assert fastest <= pause_seconds(times_ms, factor=50, chance=chance) <= 2 * fastest
