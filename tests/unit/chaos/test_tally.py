"""What the tally of a chaos run finds, and what it lets pass."""

import pytest

from benchmarks.ticks import SEQ_PER_TICK
from tests.chaos.tally import MAX_AHEAD, Mode, Tally

BOOTS = {"node-a": "boot-a", "node-b": "boot-b"}


def tally(*, acknowledged: int, events: list[tuple[int, bytes]]) -> Tally:
    """Return a tally with ticks and events of one node."""
    made = Tally(BOOTS)
    for number in range(acknowledged):
        made.acknowledge("node-a", number)
    for number, books in events:
        made.see("node-a", "boot-a", number * SEQ_PER_TICK, books)
    return made


@pytest.mark.parametrize(
    ("acknowledged", "events", "line"),
    [
        pytest.param(2, [(0, b"x"), (1, b"y")], "lost 0, duplicated 0, repeated 0", id="all"),
        pytest.param(2, [(1, b"y"), (0, b"x")], "lost 0, duplicated 0, repeated 0", id="any order"),
        pytest.param(3, [(1, b"y")], "lost 2, duplicated 0, repeated 0", id="first and last lost"),
        pytest.param(1, [(0, b"x")] * 3, "lost 0, duplicated 0, repeated 2", id="same again"),
        pytest.param(
            1, [(0, b"x"), (0, b"z")], "lost 0, duplicated 1, repeated 1", id="other books"
        ),
    ],
)
def test_at_least_once_forgives_an_event_that_comes_again_with_the_same_books(
    acknowledged: int, events: list[tuple[int, bytes]], line: str
) -> None:
    verdict = tally(acknowledged=acknowledged, events=events).judge()
    assert verdict.as_line("at_least_once") == f"at_least_once: {line}"


@pytest.mark.parametrize(
    ("mode", "kept"), [("at_least_once", True), ("exactly_once", False)], ids=str
)
def test_exactly_once_forgives_no_second_event(mode: Mode, *, kept: bool) -> None:
    verdict = tally(acknowledged=1, events=[(0, b"x"), (0, b"x")]).judge()
    assert verdict.keeps_promise(mode) is kept
    assert verdict.duplicated(mode) == (0 if kept else 1)


def test_a_lost_tick_breaks_every_promise_and_is_named() -> None:
    verdict = tally(acknowledged=2, events=[(0, b"x")]).judge()
    assert not verdict.keeps_promise("at_least_once")
    assert verdict.examples == ["lost: node-a boot-a 1000"]


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
def test_an_event_of_a_tick_that_nobody_published_breaks_every_promise(
    node: str, boot_id: str, seq: int
) -> None:
    made = tally(acknowledged=1, events=[(0, b"x")])
    made.see(node, boot_id, seq, b"x")
    verdict = made.judge()
    assert (verdict.strange, verdict.lost) == (1, 0)
    assert not verdict.keeps_promise("at_least_once")


def test_an_event_may_be_read_before_its_tick_is_known_to_be_acknowledged() -> None:
    made = tally(acknowledged=0, events=[(0, b"x")])
    made.acknowledge("node-a", 0)
    assert made.judge().keeps_promise("exactly_once")


def test_ticks_are_acknowledged_in_their_order() -> None:
    with pytest.raises(ValueError, match="tick 1 after 0 ticks"):
        Tally(BOOTS).acknowledge("node-a", 1)
