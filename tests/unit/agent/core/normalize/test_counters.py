"""A counter that falls was reset or wrapped; one that leaps is not accepted at once."""

from collections.abc import Mapping

import pytest

from gpuledger_agent.core.normalize.fields import CounterTotal, CounterTracker
from gpuledger_agent.core.readings import EVER, NANOSECONDS, PCIE_BYTES, Unit

SECOND_NS = 1_000_000_000


def run(unit: Unit, values: Mapping[int, int]) -> tuple[list[int | None], list[int]]:
    """Update with values by second; return the accepted ones, and the seconds in which one fell."""
    totals: dict[str, CounterTotal] = {}
    given: list[int | None] = []
    fell = []
    for second, value in values.items():
        counters = CounterTracker(totals=totals, now_ns=second * SECOND_NS)
        given.append(counters.update("counter", value, unit))
        fell += [second] * bool(counters.fell)
    return given, fell


@pytest.mark.parametrize(
    ("law", "unit", "values", "given", "fell"),
    [
        ("a rise is accepted", EVER, [1, 5, 5, 9], [1, 5, 5, 9], []),
        ("a fall is a reset", EVER, [5, 2, 3], [5, 2, 3], [1]),
        ("a count may rise by any amount", EVER, [5, 10**15], [5, 10**15], []),
        (
            "a leap is rejected, but a value that continues from it is accepted",
            NANOSECONDS,
            [0, 10**15, 10**15 + 10**9],
            [0, None, 10**15 + 10**9],
            [],
        ),
        (
            "one false value is neither accepted nor followed by a reset",
            NANOSECONDS,
            [10**9, 2**60, 2 * 10**9, 3 * 10**9],
            [10**9, None, 2 * 10**9, 3 * 10**9],
            [],
        ),
        (
            "two leaps to different values are both rejected",
            NANOSECONDS,
            [0, 2**60, 2**61, 10**9],
            [0, None, None, 10**9],
            [],
        ),
        (
            "a leap that is smaller than the one before is rejected too",
            NANOSECONDS,
            [0, 2**61, 2**60, 10**9],
            [0, None, None, 10**9],
            [],
        ),
        (
            "a counter of bytes continues across its wrap",
            PCIE_BYTES,
            [2**32 - 100, 900, 1000, 2**32 - 1, 4],
            [2**32 - 100, 2**32 + 900, 2**32 + 1000, 2**33 - 1, 2**33 + 4],
            [],
        ),
        (
            "a counter of bytes that fell far from its end was reset",
            PCIE_BYTES,
            [2**41, 5],
            [2**41, 5],
            [1],
        ),
        (
            "a reset drops the amount of earlier wraps",
            PCIE_BYTES,
            [2**32 - 100, 900, 2**40, 5, 6],
            [2**32 - 100, 2**32 + 900, None, 2**33 + 5, 2**33 + 6],
            [],
        ),
        (
            "after going back from a leap, a counter must leap twice again",
            NANOSECONDS,
            [5, 2**60, 5, 2**60, 2**60],
            [5, None, 5, None, 2**60],
            [],
        ),
    ],
)  # fmt: skip
def test_a_counter_accepts_plausible_rises_resets_and_wraps_and_rejects_leaps(
    law: str, unit: Unit, values: list[int], given: list[int | None], fell: list[int]
) -> None:
    assert run(unit, dict(enumerate(values))) == (given, fell), law


@pytest.mark.parametrize(
    ("law", "unit", "values", "given", "fell"),
    [
        (
            "a counter may rise for all the time since it was read last",
            NANOSECONDS,
            {0: 0, 30: 30 * 10**9, 300: 300 * 10**9},
            [0, 30 * 10**9, 300 * 10**9],
            [],
        ),
        (
            "but by no more than that",
            NANOSECONDS,
            {0: 0, 30: 63 * 10**9},
            [0, None],
            [],
        ),
        (
            "a counter that stands still counts as read",
            NANOSECONDS,
            {0: 7, 30: 7, 31: 30 * 10**9},
            [7, 7, None],
            [],
        ),
        (
            "a reset counts as a reading",
            NANOSECONDS,
            {0: 7, 30: 0, 31: 30 * 10**9},
            [7, 0, None],
            [30],
        ),
        (
            "a rise counts from the accepted value, not from a false one after it",
            NANOSECONDS,
            {0: 0, 29: 2**60, 30: 30 * 10**9},
            [0, None, 30 * 10**9],
            [],
        ),
        (
            "a value may continue from a leap for all the time without a reading",
            NANOSECONDS,
            {0: 0, 1: 10**15, 31: 10**15 + 30 * 10**9},
            [0, None, 10**15 + 30 * 10**9],
            [],
        ),
        (
            "but is rejected if it rises by more",
            NANOSECONDS,
            {0: 0, 30: 10**15, 31: 10**15 + 30 * 10**9},
            [0, None, None],
            [],
        ),
        (
            "a counter of bytes may wrap while it is not read",
            PCIE_BYTES,
            {0: 2**42 - 2**41, 10: 900},
            [2**41, 2**42 + 900],
            [],
        ),
    ],
)  # fmt: skip
def test_a_counter_may_rise_for_the_whole_time_since_its_last_reading(
    law: str, unit: Unit, values: dict[int, int], given: list[int | None], fell: list[int]
) -> None:
    assert run(unit, values) == (given, fell), law


def test_a_fall_is_not_a_wrap_if_another_counter_was_reset() -> None:
    counters = CounterTracker(totals={}, now_ns=0)
    counters.update("energy", 500, EVER)
    counters.update("sent", 2**32 - 100, PCIE_BYTES)
    after = CounterTracker(totals=counters.totals, now_ns=SECOND_NS)
    assert after.update("energy", 1, EVER) == 1
    assert after.update("sent", 900, PCIE_BYTES) == 900
    assert after.fell == ["energy", "sent"]


def test_each_counter_has_its_own_time() -> None:
    first = CounterTracker(totals={}, now_ns=0)
    for name in ("often", "rarely"):
        first.update(name, 0, NANOSECONDS)
    between = CounterTracker(totals=first.totals, now_ns=14 * SECOND_NS)
    between.update("often", 0, NANOSECONDS)
    last = CounterTracker(totals=between.totals, now_ns=15 * SECOND_NS)
    given = {name: last.update(name, 15 * 10**9, NANOSECONDS) for name in ("often", "rarely")}
    assert given == {"often": None, "rarely": 15 * 10**9}


def test_a_counter_that_was_not_read_is_remembered() -> None:
    counters = CounterTracker(totals={}, now_ns=0)
    counters.update("errors", 500, EVER)
    between = CounterTracker(totals=counters.totals, now_ns=SECOND_NS)
    after = CounterTracker(totals=between.totals, now_ns=2 * SECOND_NS)
    after.update("errors", 3, EVER)
    assert after.fell == ["errors"]
