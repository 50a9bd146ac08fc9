"""A counter that falls has restarted or overflowed; one that jumps is not accepted at once."""

from collections.abc import Mapping

import pytest

from gpuledger_agent.core.normalize.fields import CounterTotal, CounterTracker
from gpuledger_agent.core.readings import EVER, NANOSECONDS, PCIE_BYTES, Unit

SECOND_NS = 1_000_000_000


def run(unit: Unit, values: Mapping[int, int]) -> tuple[list[int | None], list[int]]:
    """Enter values second by second; return the accepted ones and the seconds with a fall."""
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
        ("a rise is a rise", EVER, [1, 5, 5, 9], [1, 5, 5, 9], []),
        ("a fall is a new beginning", EVER, [5, 2, 3], [5, 2, 3], [1]),
        ("a count may rise by anything", EVER, [5, 10**15], [5, 10**15], []),
        (
            "a leap is not believed, and what goes on from there is",
            NANOSECONDS,
            [0, 10**15, 10**15 + 10**9],
            [0, None, 10**15 + 10**9],
            [],
        ),
        (
            "one false value neither counts nor looks like a new beginning",
            NANOSECONDS,
            [10**9, 2**60, 2 * 10**9, 3 * 10**9],
            [10**9, None, 2 * 10**9, 3 * 10**9],
            [],
        ),
        (
            "two leaps to different values are both not believed",
            NANOSECONDS,
            [0, 2**60, 2**61, 10**9],
            [0, None, None, 10**9],
            [],
        ),
        (
            "nor is a leap that is less far than the one before",
            NANOSECONDS,
            [0, 2**61, 2**60, 10**9],
            [0, None, None, 10**9],
            [],
        ),
        (
            "a counter of bytes goes on over its end",
            PCIE_BYTES,
            [2**32 - 100, 900, 1000, 2**32 - 1, 4],
            [2**32 - 100, 2**32 + 900, 2**32 + 1000, 2**33 - 1, 2**33 + 4],
            [],
        ),
        (
            "a counter of bytes that fell far from its end has begun again",
            PCIE_BYTES,
            [2**41, 5],
            [2**41, 5],
            [1],
        ),
        (
            "what its wraps had added is gone where it begins again",
            PCIE_BYTES,
            [2**32 - 100, 900, 2**40, 5, 6],
            [2**32 - 100, 2**32 + 900, None, 2**33 + 5, 2**33 + 6],
            [],
        ),
        (
            "what went back from a leap has to leap twice again",
            NANOSECONDS,
            [5, 2**60, 5, 2**60, 2**60],
            [5, None, 5, None, 2**60],
            [],
        ),
    ],
)  # fmt: skip
def test_a_counter_over_time(
    law: str, unit: Unit, values: list[int], given: list[int | None], fell: list[int]
) -> None:
    assert run(unit, dict(enumerate(values))) == (given, fell), law


@pytest.mark.parametrize(
    ("law", "unit", "values", "given", "fell"),
    [
        (
            "what was not read for long may rise for all the time between",
            NANOSECONDS,
            {0: 0, 30: 30 * 10**9, 300: 300 * 10**9},
            [0, 30 * 10**9, 300 * 10**9],
            [],
        ),
        (
            "and by no more than that",
            NANOSECONDS,
            {0: 0, 30: 63 * 10**9},
            [0, None],
            [],
        ),
        (
            "what stood still was read all the same",
            NANOSECONDS,
            {0: 7, 30: 7, 31: 30 * 10**9},
            [7, 7, None],
            [],
        ),
        (
            "what began again was read then",
            NANOSECONDS,
            {0: 7, 30: 0, 31: 30 * 10**9},
            [7, 0, None],
            [30],
        ),
        (
            "a rise is since the value that was believed, not since a false one after it",
            NANOSECONDS,
            {0: 0, 29: 2**60, 30: 30 * 10**9},
            [0, None, 30 * 10**9],
            [],
        ),
        (
            "a leap goes on for as long as it was not read",
            NANOSECONDS,
            {0: 0, 1: 10**15, 31: 10**15 + 30 * 10**9},
            [0, None, 10**15 + 30 * 10**9],
            [],
        ),
        (
            "and is not believed where it goes on by more",
            NANOSECONDS,
            {0: 0, 30: 10**15, 31: 10**15 + 30 * 10**9},
            [0, None, None],
            [],
        ),
        (
            "a counter of bytes that was not read for long may come to its end between",
            PCIE_BYTES,
            {0: 2**42 - 2**41, 10: 900},
            [2**41, 2**42 + 900],
            [],
        ),
    ],
)  # fmt: skip
def test_a_counter_that_is_not_read_in_each_tick(
    law: str, unit: Unit, values: dict[int, int], given: list[int | None], fell: list[int]
) -> None:
    assert run(unit, values) == (given, fell), law


def test_where_another_counter_began_again_a_fall_is_no_wrap() -> None:
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


def test_a_counter_that_was_not_asked_is_remembered() -> None:
    counters = CounterTracker(totals={}, now_ns=0)
    counters.update("errors", 500, EVER)
    between = CounterTracker(totals=counters.totals, now_ns=SECOND_NS)
    after = CounterTracker(totals=between.totals, now_ns=2 * SECOND_NS)
    after.update("errors", 3, EVER)
    assert after.fell == ["errors"]
