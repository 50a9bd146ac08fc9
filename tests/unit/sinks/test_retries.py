"""What is asked of a receiver is tried again until it answers."""

import pytest
from structlog.testing import capture_logs

from gpuledger.runtime import Check, Readiness
from sinks.errors import ReceiverUnavailableError, RejectedError
from sinks.retrying import until_answered
from tests.unit.sinks.builders import (
    ManualClock,
)


async def test_an_outage_of_the_receiver_is_logged_where_it_begins_and_where_it_ends() -> None:
    check = Readiness().check("t.receiver")

    async def attempt(number: int) -> None:
        if number < 20:
            raise ReceiverUnavailableError("connection refused")

    with capture_logs() as logged:
        await until_answered(attempt, sink="t", check=check, clock=ManualClock(), receiver="there")

    assert [line["event"] for line in logged] == ["check_failed", "check_recovered"]
    assert check.detail == "there"


@pytest.mark.parametrize("failures", [0, 1, 4])
async def test_an_attempt_is_repeated_with_growing_pauses_until_it_is_answered(
    failures: int,
) -> None:
    clock, check = ManualClock(), Check()

    async def attempt(number: int) -> int:
        if number < failures:
            assert number == 0 or not check.is_ok
            raise ReceiverUnavailableError("later")
        return number

    assert await until_answered(attempt, sink="t", check=check, clock=clock) == failures
    assert check.is_ok
    assert clock.slept == sorted(clock.slept)
    assert len(clock.slept) == failures


async def test_a_receiver_that_names_a_time_is_left_alone_until_then() -> None:
    clock = ManualClock()

    async def attempt(number: int) -> None:
        if number == 0:
            raise ReceiverUnavailableError("later", retry_after_seconds=42)

    await until_answered(attempt, sink="t", check=Check(), clock=clock)

    assert clock.slept == [42]


async def test_a_final_answer_is_not_tried_again() -> None:
    async def attempt(number: int) -> None:
        raise RejectedError("400 no")

    with pytest.raises(RejectedError, match="400 no"):
        await until_answered(attempt, sink="t", check=Check(), clock=ManualClock())
