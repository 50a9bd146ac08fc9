"""A counter that falls has begun again or wrapped; one that leaps is not believed at once."""

import pytest

from agent.nvml.questions import EVER, NANOSECONDS, PCIE_BYTES, Unit
from agent.reading.totals import Ledger, Totals

SECOND_NS = 1_000_000_000


def run(unit: Unit, *values: int) -> tuple[list[int | None], list[int]]:
    """Enter values a second apart; give what was believed and the ticks in which one fell."""
    totals: Totals = {}
    given: list[int | None] = []
    fell = []
    for place, value in enumerate(values):
        ledger = Ledger(before=totals, interval_ns=SECOND_NS)
        given.append(ledger.enter("counter", value, unit))
        fell += [place] * bool(ledger.fell)
        totals = ledger.after
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
    ],
)  # fmt: skip
def test_a_counter_over_time(
    law: str, unit: Unit, values: list[int], given: list[int | None], fell: list[int]
) -> None:
    assert run(unit, *values) == (given, fell), law


def test_where_another_counter_began_again_a_fall_is_no_wrap() -> None:
    ledger = Ledger(before={}, interval_ns=SECOND_NS)
    ledger.enter("energy", 500, EVER)
    ledger.enter("sent", 2**32 - 100, PCIE_BYTES)
    after = Ledger(before=ledger.after, interval_ns=SECOND_NS)
    assert after.enter("energy", 1, EVER) == 1
    assert after.enter("sent", 900, PCIE_BYTES) == 900
    assert after.fell == ["energy", "sent"]


@pytest.mark.parametrize(("is_rare", "given"), [(True, 30 * 10**9), (False, None)])
def test_what_is_asked_rarely_may_rise_for_all_the_time_between(
    is_rare: bool,  # noqa: FBT001  # a parameter of the test
    given: int | None,
) -> None:
    ledger = Ledger(before={}, interval_ns=SECOND_NS)
    ledger.enter("held", 0, NANOSECONDS)
    after = Ledger(before=ledger.after, interval_ns=SECOND_NS, rare_interval_ns=15 * SECOND_NS)
    assert after.enter("held", 30 * 10**9, NANOSECONDS, is_rare=is_rare) == given


def test_a_counter_that_was_not_asked_is_remembered() -> None:
    ledger = Ledger(before={}, interval_ns=SECOND_NS)
    ledger.enter("errors", 500, EVER)
    between = Ledger(before=ledger.after, interval_ns=SECOND_NS)
    after = Ledger(before=between.after, interval_ns=SECOND_NS)
    after.enter("errors", 3, EVER)
    assert after.fell == ["errors"]
