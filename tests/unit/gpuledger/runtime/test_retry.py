"""A call is made until it does not fail as was foreseen, with growing pauses in between."""

from collections.abc import Awaitable, Callable

import pytest

from gpuledger.errors import BusUnavailableError
from gpuledger.runtime import Backoff, until_done


def failing(*failures: Exception) -> Callable[[], Awaitable[str]]:
    """Return a call that fails by a plan, and is done then."""
    plan = list(failures)

    async def call() -> str:
        if plan:
            raise plan.pop(0)
        return "done"

    return call


class Told:
    """What was told and waited, in its order."""

    def __init__(self) -> None:
        self.all: list[str | float] = []

    def failed(self, error: Exception) -> None:
        self.all.append(str(error))

    async def sleep(self, seconds: float) -> None:
        self.all.append(seconds)


def backoff() -> Backoff:
    return Backoff(first_seconds=1, max_seconds=4, jitter=lambda: 1.0)


async def test_each_failure_is_told_and_then_waited_out_with_growing_pauses() -> None:
    told, waits = Told(), backoff()
    calls = failing(*(BusUnavailableError(each) for each in "abcd"))

    done = await until_done(
        calls, error=BusUnavailableError, failed=told.failed, backoff=waits, sleep=told.sleep
    )

    assert done == "done"
    assert told.all == ["a", 1, "b", 2, "c", 4, "d", 4]
    assert waits.next_seconds() == 1, "a success begins the waits anew"


async def test_who_wants_to_be_left_alone_for_longer_is() -> None:
    told = Told()

    await until_done(
        failing(BusUnavailableError("9"), BusUnavailableError("0")),
        error=BusUnavailableError,
        failed=told.failed,
        backoff=backoff(),
        sleep=told.sleep,
        min_seconds=lambda error: float(str(error)),
    )

    assert told.all == ["9", 9.0, "0", 2]


async def test_an_error_that_was_not_foreseen_ends_it() -> None:
    told = Told()

    with pytest.raises(ZeroDivisionError):
        await until_done(
            failing(BusUnavailableError("a"), ZeroDivisionError()),
            error=BusUnavailableError,
            failed=told.failed,
            backoff=backoff(),
            sleep=told.sleep,
        )

    assert told.all == ["a", 1]
