"""Requests to a receiver are retried until it answers."""

from itertools import count

import pytest
from structlog.testing import capture_logs

from gpuledger.runtime import Check, Readiness
from gpuledger_sinks.errors import ReceiverUnavailableError, RejectedError, retry_receiver
from tests.unit.sinks.builders import ManualClock


async def test_an_outage_of_the_receiver_is_logged_when_it_begins_and_when_it_ends() -> None:
    check, attempts = Readiness().check("t.receiver"), count()

    async def attempt() -> None:
        if next(attempts) < 20:
            raise ReceiverUnavailableError("connection refused")

    with capture_logs() as logged:
        await retry_receiver(sink="t", check=check, clock=ManualClock(), receiver="there")(attempt)

    assert [line["event"] for line in logged] == ["check_failed", "check_recovered"]
    assert check.detail == "there"


async def test_no_request_is_sent_before_the_time_that_the_receiver_names() -> None:
    clock, check, attempts = ManualClock(), Check(), count()

    async def attempt() -> None:
        if next(attempts) == 0:
            raise ReceiverUnavailableError("later", retry_after_seconds=42)

    await retry_receiver(sink="t", check=check, clock=clock)(attempt)

    assert clock.slept == [42]
    assert check.is_ok


async def test_a_final_response_is_not_retried() -> None:
    async def attempt() -> None:
        raise RejectedError("400 no")

    with pytest.raises(RejectedError, match="400 no"):
        await retry_receiver(sink="t", check=Check(), clock=ManualClock())(attempt)
