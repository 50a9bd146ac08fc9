"""The tally of a chaos run: broken promises that it reports, and deviations that it accepts."""

import pytest

from benchmarks.ticks import SEQ_PER_TICK
from tests.chaos.tally import MAX_AHEAD, Tally

BOOTS = {"node-a": "boot-a", "node-b": "boot-b"}


def tally(*, acknowledged: int, events: list[int]) -> Tally:
    """Return a tally with ticks and events of one node."""
    made = Tally(BOOTS)
    for number in range(acknowledged):
        made.acknowledge("node-a", number)
    for number in events:
        made.observe("node-a", "boot-a", number * SEQ_PER_TICK)
    return made


@pytest.mark.parametrize(
    ("acknowledged", "events", "line"),
    [
        pytest.param(2, [0, 1], "lost 0, duplicated 0", id="all"),
        pytest.param(2, [1, 0], "lost 0, duplicated 0", id="any order"),
        pytest.param(3, [1], "lost 2, duplicated 0", id="first and last lost"),
        pytest.param(1, [0, 0, 0], "lost 0, duplicated 2", id="repeated"),
    ],
)
def test_each_tick_has_exactly_one_event_or_the_promise_is_broken(
    acknowledged: int, events: list[int], line: str
) -> None:
    verdict = tally(acknowledged=acknowledged, events=events).judge()
    assert verdict.as_line() == line
    assert verdict.is_kept == (line == "lost 0, duplicated 0")


def test_a_lost_tick_is_named() -> None:
    assert tally(acknowledged=2, events=[0]).judge().examples == ["lost: node-a boot-a 1000"]


@pytest.mark.parametrize(
    ("node", "boot_id", "seq"),
    [
        ("node-c", "boot-a", 0),
        ("node-a", "boot-b", 0),
        ("node-a", "boot-a", SEQ_PER_TICK),
        ("node-a", "boot-a", 1),
        ("node-a", "boot-a", (1 + MAX_AHEAD) * SEQ_PER_TICK),
    ],
    ids=["node", "boot", "tick", "between two ticks", "far tick"],
)
def test_an_event_of_a_tick_that_was_never_published_breaks_the_promise(
    node: str, boot_id: str, seq: int
) -> None:
    made = tally(acknowledged=1, events=[0])
    made.observe(node, boot_id, seq)
    verdict = made.judge()
    assert (verdict.strange, verdict.lost) == (1, 0)
    assert not verdict.is_kept


def test_an_event_may_be_read_before_its_tick_is_known_to_be_acknowledged() -> None:
    made = tally(acknowledged=0, events=[0])
    made.acknowledge("node-a", 0)
    assert made.judge().is_kept


def test_ticks_are_acknowledged_in_their_order() -> None:
    with pytest.raises(ValueError, match="tick 1 after 0 ticks"):
        Tally(BOOTS).acknowledge("node-a", 1)
