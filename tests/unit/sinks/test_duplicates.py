"""A repeated tick is recognized by its node, boot and sequence number, whatever its time."""

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
        ("a repeated tick", [("a", 1), ("a", 1), ("a", 2)], [True, False, True]),
        ("an earlier tick", [("a", 2), ("a", 1)], [True, False]),
        (
            "two alternating boots",
            [("a", 5), ("b", 1), ("a", 6), ("b", 1), ("a", 6), ("b", 2)],
            [True, True, True, False, False, True],
        ),
    ],
)
def test_a_tick_not_beyond_the_last_one_of_its_boot_is_a_duplicate(
    what: str, ticks: list[tuple[str, int]], is_new: list[bool]
) -> None:
    assert news(*ticks) == is_new, what


@given(shown=st.lists(st.integers(-(10**9), 10**9), min_size=6, max_size=6))
def test_the_time_of_a_tick_does_not_make_it_new_or_old(shown: list[int]) -> None:
    ticks = [("a", 5), ("b", 1), ("a", 6), ("b", 1), ("a", 6), ("b", 2)]
    assert news(*ticks, shown=shown) == news(*ticks)


def test_ticks_of_the_last_five_boots_are_remembered() -> None:
    boots = [(boot, 7) for boot in "abcde"]
    assert news(*boots, *boots) == [True] * 5 + [False] * 5
