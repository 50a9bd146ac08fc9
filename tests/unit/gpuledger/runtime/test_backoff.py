"""Waits double up to a bound, are randomized, and start over after a success."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.runtime import Backoff
from tests.errors import has_words


def test_waits_double_up_to_the_maximum() -> None:
    backoff = Backoff(first_seconds=0.5, max_seconds=3.0, jitter=lambda: 1.0)

    assert [backoff.next_seconds() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_randomization_shortens_a_wait_by_at_most_half() -> None:
    backoff = Backoff(first_seconds=1.0, max_seconds=8.0, jitter=lambda: 0.0)

    assert [backoff.next_seconds() for _ in range(4)] == [0.5, 1.0, 2.0, 4.0]


def test_after_a_reset_the_first_wait_is_used_again() -> None:
    backoff = Backoff(first_seconds=1.0, jitter=lambda: 1.0)
    backoff.next_seconds()
    backoff.next_seconds()
    backoff.reset()

    assert backoff.next_seconds() == 1.0


@given(attempts=st.integers(1, 3000), chance=st.floats(0, 1))
def test_no_wait_is_zero_or_longer_than_the_maximum(attempts: int, chance: float) -> None:
    backoff = Backoff(jitter=lambda: chance)

    assert all(0 < backoff.next_seconds() <= 30.0 for _ in range(attempts))


@pytest.mark.parametrize(("first", "most"), [(0.0, 1.0), (-1.0, 1.0), (2.0, 1.0)])
def test_invalid_bounds_are_refused(first: float, most: float) -> None:
    with pytest.raises(ValueError, check=has_words("first")):
        Backoff(first_seconds=first, max_seconds=most)
