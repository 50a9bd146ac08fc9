"""Made-up boots never displace a boot that a node is really in.

The attack model: an attacker who may write ticks writes any number of them under the node's name,
of any boot including the node's own, with any `seq` and any timestamp, starting once the node's
boot has been booked. Two attacks remain and are left out here (see docs/concepts/clocks.md):

- A `seq` of the node's own boot that is ahead by less than two days makes its later ticks
  duplicates.
- Ticks of a made-up boot that cover the node's own time make its ticks overlap.
"""

from dataclasses import dataclass
from typing import Final

from hypothesis import example
from hypothesis import given as for_any
from hypothesis import strategies as st

from tests.unit.enricher.join.builders import T_NS, Given
from tests.unit.enricher.join.ticks import record, sample

SECOND: Final = 1000
HOUR: Final = 3600 * SECOND
DAY: Final = 24 * HOUR
T_MS: Final = T_NS // 10**6
BOOT: Final = "the-boot-that-it-is-in"


@dataclass(frozen=True)
class Forged:
    """A tick that the node did not write."""

    boot: int | None
    """Which made-up boot it names; `None` for the node's own."""
    seq: int
    stamped_ms: int
    """How far its record's timestamp is from now."""


@dataclass(frozen=True)
class Passage:
    """The time before the node's next tick."""

    after_ms: int
    """How long the node was unresponsive."""
    forged: list[Forged]
    at_ratio: float
    """When in that time the forged ticks came."""
    hands_over: bool
    """Whether another worker then takes over the partition."""


forged = st.builds(
    Forged,
    boot=st.none() | st.integers(0, 30),
    seq=st.sampled_from([1, DAY, 30 * DAY, 3650 * DAY]) | st.integers(1, 3650 * DAY),
    stamped_ms=st.sampled_from([-99 * DAY, 0, DAY]) | st.integers(-99 * DAY, DAY),
)
passages = st.builds(
    Passage,
    after_ms=st.sampled_from([SECOND, SECOND, HOUR]) | st.integers(1, HOUR),
    forged=st.lists(forged, max_size=12),
    at_ratio=st.floats(0, 1),
    hands_over=st.booleans(),
)
BOOTS: Final = [Forged(boot, 1, 0) for boot in range(12)]
REPORTED: Final = Passage(SECOND, [*BOOTS, Forged(None, 1, 0)], 0.5, hands_over=False)


def offer(given: Given, tick: Forged, *, read_ms: int, length_ms: int = 1) -> int:
    """Let the stage read a tick; return how many events it made."""
    given.now_ns = read_ms * 10**6
    boot_id = BOOT if tick.boot is None else f"made-up-{tick.boot}"
    stamped_ms = read_ms + tick.stamped_ms
    written = record(
        sample(
            boot_id=boot_id,
            seq=tick.seq,
            # Made-up boots cover only time before the node's.
            time_ns=(stamped_ms if tick.boot is None else stamped_ms - 200 * DAY) * 10**6,
            interval_ns=length_ms * 10**6,
            containers=[],
        )
    )
    return len(given.stage.take_samples([written._replace(timestamp_ms=stamped_ms)]))


def hand_over(given: Given) -> None:
    watermarks = given.stage.drain_progress(3)
    given.stage.forget(3)
    given.read_watermarks(watermarks)


@example(uptime_ms=30 * DAY, passages=[REPORTED, REPORTED])
@example(uptime_ms=30 * DAY, passages=[REPORTED, Passage(HOUR, BOOTS * 2, 0.9, hands_over=True)])
@for_any(uptime_ms=st.integers(1, 400 * DAY), passages=st.lists(passages, max_size=15))
def test_each_tick_of_a_node_is_booked_whatever_boots_are_made_up(
    uptime_ms: int, passages: list[Passage]
) -> None:
    given, seq, now_ms = Given(), uptime_ms, T_MS
    assert offer(given, Forged(None, seq, 0), read_ms=now_ms) == 1
    for passage in passages:
        for tick in passage.forged:
            at_ms = now_ms + int(passage.after_ms * passage.at_ratio)
            is_ahead = tick.boot is None and seq < tick.seq < seq + 5 * DAY
            if not is_ahead:
                offer(given, tick, read_ms=at_ms)
        if passage.hands_over:
            hand_over(given)
        seq, now_ms = seq + passage.after_ms, now_ms + passage.after_ms
        length_ms = min(SECOND, passage.after_ms)
        node = Forged(None, seq, 0)
        assert offer(given, node, read_ms=now_ms, length_ms=length_ms) == 1


def test_a_node_that_rebooted_often_keeps_its_current_boot() -> None:
    """Each earlier boot was booked for less time than the current one."""
    given, now_ms = Given(), T_MS
    for boot in range(100, 120):
        offer(given, Forged(boot, 1000, 0), read_ms=now_ms)
        now_ms += 60 * SECOND
    seq = 3 * DAY
    while seq < 3 * DAY + 2 * HOUR:
        assert offer(given, Forged(None, seq, 0), read_ms=now_ms) == 1
        seq, now_ms = seq + 60 * SECOND, now_ms + 60 * SECOND
    for tick in BOOTS:
        offer(given, tick, read_ms=now_ms)
    offer(given, Forged(None, 1, 0), read_ms=now_ms)
    assert offer(given, Forged(None, seq, 0), read_ms=now_ms) == 1
