"""The time at which an operation may be tried again: growing waits, and how they end."""

from gpuledger.clock import NS_PER_SECOND
from gpuledger.runtime import Backoff, RetryTimer


def timer(*, calm_seconds: float = 0.0) -> RetryTimer:
    backoff = Backoff(first_seconds=1, max_seconds=8, jitter=lambda: 1.0)
    return RetryTimer(backoff, calm_seconds=calm_seconds)


def attempts_of(retry: RetryTimer, *, seconds: int) -> list[int]:
    """Return when a caller that polls each second tries an operation that always fails."""
    attempts = []
    for second in range(seconds):
        if retry.is_due(second * NS_PER_SECOND):
            attempts.append(second)
            retry.record_attempt(second * NS_PER_SECOND)
    return attempts


def test_an_operation_that_was_never_tried_is_due_at_once() -> None:
    assert timer().is_due(0)
    assert not timer().is_running


def test_a_failing_operation_is_tried_ever_more_rarely() -> None:
    assert attempts_of(timer(), seconds=40) == [0, 1, 3, 7, 15, 23, 31, 39]


def test_a_success_resets_the_waits() -> None:
    retry = timer()
    attempts_of(retry, seconds=10)
    retry.record_success(10 * NS_PER_SECOND)
    assert not retry.is_running
    assert retry.is_due(0)
    assert attempts_of(retry, seconds=4) == [0, 1, 3]


def test_an_early_success_does_not_end_the_wait() -> None:
    retry = timer(calm_seconds=60)
    retry.record_attempt(0)
    retry.record_attempt(0)
    retry.record_success(NS_PER_SECOND)
    assert retry.wait_ns(NS_PER_SECOND) == NS_PER_SECOND
    retry.record_success(60 * NS_PER_SECOND)
    assert not retry.is_running


def test_a_wait_of_a_given_length_is_followed_by_the_first_one() -> None:
    retry = timer()
    attempts_of(retry, seconds=10)
    retry.wait(0, seconds=5)
    assert attempts_of(retry, seconds=9) == [5, 6, 8]


def test_a_skipped_wait_is_over_and_does_not_shorten_the_next_one() -> None:
    retry = timer()
    retry.record_attempt(0)
    retry.skip_wait()
    assert retry.is_due(0)
    assert retry.is_running
    retry.record_attempt(0)
    assert retry.wait_ns(0) == 2 * NS_PER_SECOND
