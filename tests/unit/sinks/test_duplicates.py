"""A tick that comes twice is recognised by its node, boot and seq, whatever its time."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger_sinks.timelines import SeenTicks
from tests.unit.sinks.builders import SECOND_NS, START_NS, ManualClock, event, place_of

AT = place_of("node-a")


def news(*ticks: tuple[str, int], shown: Sequence[int] = ()) -> list[bool]:
    seen = SeenTicks(clock=ManualClock())
    times = [*shown, *[0] * len(ticks)]
    return [
        seen.is_new(AT, event(boot_id=boot, seq=seq, time_ns=START_NS + second * SECOND_NS))
        for (boot, seq), second in zip(ticks, times, strict=False)
    ]


@pytest.mark.parametrize(
    ("what", "ticks", "is_new"),
    [
        ("a tick again", [("a", 1), ("a", 1), ("a", 2)], [True, False, True]),
        ("what came before it", [("a", 2), ("a", 1)], [True, False]),
        (
            "two boots in turns",
            [("a", 5), ("b", 1), ("a", 6), ("b", 1), ("a", 6), ("b", 2)],
            [True, True, True, False, False, True],
        ),
    ],
)
def test_what_is_not_beyond_its_boots_last_tick_was_seen_before(
    what: str, ticks: list[tuple[str, int]], is_new: list[bool]
) -> None:
    assert news(*ticks) == is_new, what


@given(shown=st.lists(st.integers(-(10**9), 10**9), min_size=6, max_size=6))
def test_no_time_that_a_tick_shows_makes_it_new_or_old(shown: list[int]) -> None:
    ticks = [("a", 5), ("b", 1), ("a", 6), ("b", 1), ("a", 6), ("b", 2)]
    assert news(*ticks, shown=shown) == news(*ticks)


def test_of_the_last_five_boots_everything_is_remembered() -> None:
    boots = [(boot, 7) for boot in "abcde"]
    assert news(*boots, *boots) == [True] * 5 + [False] * 5
