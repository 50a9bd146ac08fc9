"""A breaker opens after failures in a row, then allows single probes at growing intervals."""

import pytest

from gpuledger.clock import NS_PER_SECOND
from gpuledger.runtime import Backoff
from gpuledger_agent.core.raw import CallGroup
from gpuledger_agent.gpu.breaker import BreakerLog, GroupBreaker, Permit


@pytest.fixture
def breaker() -> GroupBreaker:
    backoff = Backoff(first_seconds=4, max_seconds=16, jitter=lambda: 1.0)
    return GroupBreaker("GPU-breaker", CallGroup.USAGE, log=BreakerLog(), backoff=backoff)


def turns(breaker: GroupBreaker, *seconds: int) -> list[Permit]:
    return [breaker.permit(second * NS_PER_SECOND) for second in seconds]


def test_failures_that_are_not_in_a_row_do_not_open_the_breaker(breaker: GroupBreaker) -> None:
    for _ in range(5):
        breaker.failed(0, reason="error")
        breaker.failed(0, reason="error")
        breaker.succeeded()
    assert breaker.permit(0) is Permit.QUERY


def test_the_third_failure_in_a_row_opens_the_breaker(breaker: GroupBreaker) -> None:
    shown = []
    for _ in range(4):
        breaker.failed(0, reason="error")
        shown.append(breaker.is_open)
    assert shown == [False, False, True, True]


def test_an_open_breaker_waits_and_then_allows_a_probe(
    breaker: GroupBreaker,
) -> None:
    breaker.trip(0)
    assert turns(breaker, 0, 3, 4, 5) == [Permit.SKIP, Permit.SKIP, Permit.PROBE, Permit.PROBE]


def test_failing_probes_become_rarer_up_to_a_limit(breaker: GroupBreaker) -> None:
    breaker.trip(0)
    probed = []
    for second in range(60):
        if breaker.permit(second * NS_PER_SECOND) is Permit.PROBE:
            probed.append(second)
            breaker.failed(second * NS_PER_SECOND, reason="probe")
    assert probed == [4, 12, 28, 44]


def test_a_successful_probe_closes_the_breaker_and_resets_its_waits(breaker: GroupBreaker) -> None:
    breaker.trip(0)
    breaker.failed(4 * NS_PER_SECOND, reason="probe")
    breaker.succeeded()
    assert breaker.permit(5 * NS_PER_SECOND) is Permit.QUERY
    breaker.trip(5 * NS_PER_SECOND)
    assert turns(breaker, 8, 9) == [Permit.SKIP, Permit.PROBE]
