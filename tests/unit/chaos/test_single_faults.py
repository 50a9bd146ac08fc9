"""The result of a fault, compared with its row of the table."""

import pytest

from tests.chaos.faults import FAULTS, Fault
from tests.chaos.injecting import nothing
from tests.chaos.single_faults import Found
from tests.chaos.stored_time import StoredTime


def stored(
    *, lost: float = 0.0, repeated: float = 0.0, named: float = 0.0, unknown: float = 0.0
) -> StoredTime:
    """Return the time in a store."""
    return StoredTime(
        lost_seconds=lost,
        repeated_seconds=repeated,
        named_seconds=named,
        unknown_seconds=unknown,
        newest_ns=1,
    )


def found(
    time: StoredTime | None,
    *,
    lasting: str = "A",
    repaired: str = "",
    has_recovered: bool = True,
) -> Found:
    """Return a result with these alerts, one letter each."""
    return Found(
        stored=time,
        has_recovered=has_recovered,
        lasting={alert: ["agent"] for alert in lasting},
        repaired={alert: ["agent"] for alert in repaired},
    )


def fault(
    *, loses: bool = False, may_lose: float = 0.0, at_once: str = "", unknown: float = 0.0
) -> Fault:
    """Return a fault that raises A, and perhaps C as well."""
    return Fault(
        name="fault",
        inject=nothing,
        loses=loses,
        may_lose_seconds=may_lose,
        unknown_seconds=unknown,
        alerts=frozenset("A"),
        consequences=frozenset("C"),
        at_once=frozenset(at_once),
    )


@pytest.mark.parametrize(
    ("result", "row", "problems"),
    [
        pytest.param(found(stored()), fault(), [], id="as required"),
        pytest.param(found(stored(), lasting="AC"), fault(), [], id="with consequences"),
        pytest.param(found(stored(lost=1)), fault(), ["time is lost"], id="lost"),
        pytest.param(found(None), fault(), ["time is lost"], id="an empty store"),
        pytest.param(found(stored(repeated=1)), fault(), ["time is stored twice"], id="twice"),
        pytest.param(found(stored(named=1)), fault(), ["time is missing"], id="a gap"),
        pytest.param(found(stored(named=1)), fault(loses=True), [], id="a named gap"),
        pytest.param(found(stored()), fault(loses=True), ["no gap is named"], id="no gap"),
        pytest.param(found(stored(named=1)), fault(may_lose=1), [], id="a short gap"),
        pytest.param(found(stored(named=2)), fault(may_lose=1), ["time is missing"], id="long"),
        pytest.param(
            found(stored(unknown=1)),
            fault(unknown=2),
            ["allocations are not unknown"],
            id="allocations that are known",
        ),
        pytest.param(found(stored(unknown=2)), fault(unknown=2), [], id="unknown allocations"),
        pytest.param(
            found(stored(), has_recovered=False),
            fault(),
            ["it is not repaired"],
            id="not repaired",
        ),
        pytest.param(found(stored(), lasting="C"), fault(), ["does not fire: A"], id="silent"),
        pytest.param(found(stored(), lasting="AB"), fault(), ["fires: B"], id="another alert"),
        pytest.param(
            found(stored(), repaired="A"), fault(), ["fires although repaired: A"], id="too early"
        ),
        pytest.param(found(stored(), repaired="A"), fault(at_once="A"), [], id="at once"),
        pytest.param(
            found(stored()), fault(at_once="A"), ["does not fire at once: A"], id="too late"
        ),
    ],
)
def test_a_result_that_differs_from_the_table_is_a_problem(
    result: Found, row: Fault, problems: list[str]
) -> None:
    assert result.problems(row) == problems


def test_each_fault_has_a_name_of_its_own() -> None:
    assert len({each.name for each in FAULTS}) == len(FAULTS)


def test_a_result_shows_the_components_that_alerts_name() -> None:
    line = found(stored(named=2)).as_line()
    assert line == (
        "lost 0.0 s, duplicated 0.0 s, named as a gap 2.0 s, allocation unknown 0.0 s;"
        " alerts: A (agent); if repaired: none"
    )
