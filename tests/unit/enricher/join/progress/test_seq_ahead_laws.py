"""No honest tick is refused for its `seq`, and no forged one blocks its node for long."""

from dataclasses import dataclass
from typing import Final

from hypothesis import given as for_any
from hypothesis import strategies as st

from tests.unit.enricher.join.builders import T_NS, Given
from tests.unit.enricher.join.ticks import record, sample

SECOND: Final = 1000
HOUR: Final = 3600 * SECOND
DAY: Final = 24 * HOUR
T_MS: Final = T_NS // 10**6
MAX_UNRESPONSIVE_MS: Final = 3 * DAY


@dataclass(frozen=True)
class Tick:
    """A tick of an honest node, with what kept it from being read at once."""

    after_ms: int
    """How long after the previous tick; the agent may have been down."""
    clock_ms: int
    """How far the node's clock is ahead, at most a day when it is sent; or behind."""
    lies_ms: int
    """How long it stayed on its node."""
    waits_ms: int
    """How long it stayed on the topic."""


spans = st.sampled_from([0, SECOND, HOUR, DAY]) | st.integers(0, 40 * DAY)
honest_ticks = st.builds(
    Tick,
    after_ms=spans.map(lambda span: span + SECOND),
    clock_ms=st.sampled_from([-20 * 365 * DAY, -DAY, 0, DAY]) | st.integers(-99 * DAY, DAY),
    lies_ms=st.sampled_from([0, HOUR, DAY]) | st.integers(0, DAY),
    waits_ms=spans,
)


def offer(given: Given, *, seq: int, stamped_ms: int, read_ms: int) -> int:
    """Let the stage read a tick; return how many events it made."""
    given.now_ns = read_ms * 10**6
    tick = record(sample(seq=seq, time_ns=max(0, stamped_ms) * 10**6, containers=[]))
    return len(given.stage.take_samples([tick._replace(timestamp_ms=max(0, stamped_ms))]))


@for_any(
    ticks=st.lists(honest_ticks, min_size=1, max_size=12),
    uptime_ms=spans,
    hands_over=st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_no_honest_tick_is_refused(
    ticks: list[Tick], uptime_ms: int, hands_over: list[bool]
) -> None:
    """Whether the agent was down for days, the tick was sent or read late, or the clock was wrong.

    A node sends in order and a topic keeps that order, so nothing is read before its predecessors.
    """
    given, seq, sent_ms, read_ms = Given(), uptime_ms, 0, 0
    for tick, hand_over in zip(ticks, hands_over, strict=False):
        seq += tick.after_ms
        made_ms = T_MS + seq - uptime_ms
        sent_ms = max(sent_ms, made_ms + tick.lies_ms)
        stamped_ms = min(made_ms + tick.clock_ms, sent_ms + DAY)
        read_ms = max(read_ms, sent_ms + tick.waits_ms)
        assert offer(given, seq=seq, stamped_ms=stamped_ms, read_ms=read_ms) == 1
        if hand_over:
            watermarks = given.stage.drain_progress(3)
            given.stage.forget(3)
            given.read_watermarks(watermarks)


forged_ticks = st.lists(
    st.tuples(st.integers(0, 3660 * DAY), st.integers(-99 * DAY, DAY)), max_size=20
)


@for_any(forged=forged_ticks, uptime_ms=spans)
def test_forged_ticks_block_a_node_for_three_days_at_most(
    forged: list[tuple[int, int]], uptime_ms: int
) -> None:
    """However many there are, each as far ahead and stamped as late as a broker accepts."""
    given = Given()
    assert offer(given, seq=uptime_ms, stamped_ms=T_MS, read_ms=T_MS) == 1
    for seq, stamped_ms in forged:
        offer(given, seq=seq, stamped_ms=T_MS + stamped_ms, read_ms=T_MS)
    after_ms = MAX_UNRESPONSIVE_MS + SECOND
    then_ms = T_MS + after_ms
    assert offer(given, seq=uptime_ms + after_ms, stamped_ms=then_ms, read_ms=then_ms) == 1
