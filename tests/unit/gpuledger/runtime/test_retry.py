"""A call is repeated with growing pauses until it no longer raises the expected error."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from prometheus_client import CollectorRegistry, Counter

from gpuledger.errors import BusUnavailableError
from gpuledger.runtime import Backoff, Check, RetryingCaller


class Waits:
    """A clock that does not wait, and remembers how long it should have."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


def failing(*failures: Exception) -> Callable[[], Awaitable[str]]:
    """Return a call that raises these errors in turn and then succeeds."""
    plan = list(failures)

    async def call() -> str:
        if plan:
            raise plan.pop(0)
        return "done"

    return call


def backoff() -> Backoff:
    return Backoff(first_seconds=1, max_seconds=4, jitter=lambda: 1.0)


class RecordingCheck:
    """A check that records its details, and how long had been waited by then."""

    def __init__(self, clock: Waits) -> None:
        self.all: list[str] = []
        self.check = Check(on_change=self._record, on_still_failing=self._record)
        self._clock = clock

    def _record(self, check: Check) -> None:
        self.all.append(f"{check.detail} at {sum(self._clock.slept):g}")


async def test_each_failure_fails_the_check_and_is_followed_by_a_growing_pause() -> None:
    clock = Waits()
    reported = RecordingCheck(clock)
    retry = RetryingCaller(
        on=BusUnavailableError, check=reported.check, receiver="bus", clock=clock, backoff=backoff
    )

    assert await retry(failing(*map(BusUnavailableError, "abcd"))) == "done"

    assert reported.all == ["a at 0", "b at 1", "c at 3", "d at 7", "bus at 11"]
    assert reported.check.is_ok
    assert retry.attempts == 5


async def test_each_call_begins_with_the_first_wait() -> None:
    clock = Waits()
    retry = RetryingCaller(on=BusUnavailableError, check=Check(), clock=clock, backoff=backoff)

    for _ in range(2):
        await retry(failing(BusUnavailableError("a"), BusUnavailableError("b")))

    assert clock.slept == [1, 2, 1, 2]


async def test_a_longer_wait_that_a_receiver_requests_is_used() -> None:
    clock = Waits()
    retry = RetryingCaller(
        on=BusUnavailableError,
        check=Check(),
        clock=clock,
        backoff=backoff,
        min_seconds=lambda error: float(str(error)),
    )

    await retry(failing(BusUnavailableError("9"), BusUnavailableError("0")))

    assert clock.slept == [9, 2]


async def test_an_unexpected_error_is_raised() -> None:
    clock, check = Waits(), Check()
    retry = RetryingCaller(on=BusUnavailableError, check=check, clock=clock, backoff=backoff)

    with pytest.raises(ZeroDivisionError):
        await retry(failing(BusUnavailableError("a"), ZeroDivisionError()))

    assert clock.slept == [1]
    assert check.has_failed
    assert retry.attempts == 2


async def test_failures_are_counted_and_successes_are_not() -> None:
    counter = Counter("attempts_failed", "Failures.", registry=(registry := CollectorRegistry()))
    retry = RetryingCaller(
        on=BusUnavailableError,
        check=Check(),
        counter=counter,
        clock=Waits(),
        describe=lambda error: f"reading: {error}",
    )

    await retry(failing(BusUnavailableError("a"), BusUnavailableError("b")))

    assert registry.get_sample_value("attempts_failed_total") == 2


async def test_the_check_does_not_pass_if_other_calls_must_succeed_first() -> None:
    check = Check()
    retry = RetryingCaller(
        on=BusUnavailableError,
        check=check,
        passes_check=False,
        clock=Waits(),
        describe=lambda error: f"reading: {error}",
    )

    await retry(failing(BusUnavailableError("a")))

    assert check.has_failed
    assert check.detail == "reading: a"


async def test_a_caller_raises_the_last_error_at_its_deadline_and_not_later() -> None:
    clock = Waits()
    reported = RecordingCheck(clock)
    retry = RetryingCaller(
        on=BusUnavailableError, check=reported.check, clock=clock, backoff=backoff
    )
    now = asyncio.get_running_loop().time()

    with pytest.raises(BusUnavailableError, match="b"):
        await retry(failing(*map(BusUnavailableError, "abcd")), deadline_seconds=now + 1.5)

    first, rest = clock.slept
    assert first == 1
    assert 0 < rest <= 1.5
    assert retry.attempts == 2
