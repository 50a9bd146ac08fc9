import pytest

from gpuledger.clock import NS_PER_SECOND
from gpuledger_agent.loop import Schedule

TICK_NS = NS_PER_SECOND


@pytest.mark.parametrize(
    ("law", "now_seconds", "wait_seconds", "next_due_seconds"),
    [
        ("an instant tick", 10.0, 1.0, 11),
        ("a slow tick is followed on time", 10.3, 0.7, 11),
        ("a tick that takes too long skips one", 11.2, 0.8, 12),
        ("as many as were missed", 14.9, 0.1, 15),
        ("a sleep that ended early", 9.99, 1.01, 11),
    ],
)
def test_ticks_stay_on_their_grid(
    law: str, now_seconds: float, wait_seconds: float, next_due_seconds: int
) -> None:
    schedule = Schedule(tick_ns=TICK_NS, due_ns=10 * TICK_NS)
    assert schedule.advance(round(now_seconds * TICK_NS)) == pytest.approx(wait_seconds), law
    assert schedule.due_ns == next_due_seconds * TICK_NS


def test_a_tick_is_late_after_half_a_tick() -> None:
    schedule = Schedule(tick_ns=TICK_NS, due_ns=10 * TICK_NS)
    assert not schedule.is_late(10 * TICK_NS + TICK_NS // 2)
    assert schedule.is_late(10 * TICK_NS + TICK_NS // 2 + 1)
