"""A month, from the devices to the bill: what each tenant pays, and what a late hour changes.

The month has thirty days of four minutes each, because a core plays an agent's two hours within a
minute; `make bench ARGS="month --seconds 2592000"` plays all of it. So each tick that is in doubt
weighs 360 times as much here.
"""

import asyncio
import io
import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

import pytest

from gpuledger_cli.command import main
from gpuledger_reports.pricing.billing import Bill
from gpuledger_reports.pricing.closing import ClosedLine, closed_lines
from gpuledger_reports.reading.times import Window
from tests.month import LATE_NS, Month
from tests.month_scenario import (
    BLENDED,
    DAYS,
    EPOCH_NS,
    H100,
    L4,
    POLICY,
    PRICES,
    USED,
    TenantTruth,
    owed,
)

DAY_SECONDS: Final = 240
TOLERANCE: Final = 0.01
Key = tuple[str, str | None]
"""A namespace or a special value such as `__idle__`, and the kind of idle."""


@dataclass(frozen=True, kw_only=True)
class Billed:
    """The output of a command, and its exit code."""

    code: int
    out: str
    err: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The month's bills, and the truth."""

    truth: dict[str, TenantTruth]
    store: str
    arguments: list[str]
    closed: Billed
    early: Bill
    """The bill while a node's last hour was missing."""
    late: Bill

    def ask(self, *command: str) -> Billed:
        return ask(*command, *self.arguments)

    def lines(self) -> list[ClosedLine]:
        begin_us = EPOCH_NS // 10**3
        window = Window(begin_us, begin_us + DAYS * DAY_SECONDS * 10**6)
        return closed_lines(self.store, window, ["namespace"])


def ask(*command: str) -> Billed:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(list(command))
    return Billed(code=code or 0, out=out.getvalue(), err=err.getvalue())


def costs(bill: Bill) -> dict[Key, Decimal]:
    return {(line.values[0], line.idle_kind): line.cost for line in bill.lines}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Play the month, close it while an hour is missing, and let that hour come."""
    folder = tmp_path_factory.mktemp("month")
    (folder / "prices.yaml").write_text(POLICY)
    month = Month(store=folder / "store", day_seconds=DAY_SECONDS, sampling_interval_seconds=10.0)
    times = ["--from", "2026-10-01T00:00:00Z", "--to", "2026-10-01T02:00:00Z"]
    arguments = ["--store", str(month.store), *times, "--prices", str(folder / "prices.yaml")]
    early: list[Bill] = []
    closed: list[Billed] = []

    def close() -> None:
        early.append(month.bill())
        closed.append(ask("bill", "close", *arguments))

    truth = asyncio.run(month.play(before_late=close))
    return Outcome(
        truth=truth,
        store=str(month.store),
        arguments=arguments,
        closed=closed[0],
        early=early[0],
        late=month.bill(),
    )


def test_each_tenant_pays_for_its_true_use(outcome: Outcome) -> None:
    found = costs(outcome.late)
    expected = {name: owed(name, truth) for name, truth in outcome.truth.items()}
    assert {name for name, kind in found if kind is None} == expected.keys()
    off = {name: float(found[name, None]) / cost - 1 for name, cost in expected.items()}
    assert max(map(abs, off.values())) < TOLERANCE, off


def test_cost_that_no_tenant_pays_is_the_rest_of_the_asset_cost(outcome: Outcome) -> None:
    """A lost GPU belongs to no tenant, and allocated but unbilled time is a kind of its own."""
    found, hours = costs(outcome.late), DAYS * DAY_SECONDS / 3600
    gpu_cost = hours * (2 * PRICES[H100] + 3 * PRICES[L4])
    unresponsive = (
        sum(one.unresponsive.get(L4, 0.0) for one in outcome.truth.values()) / 3600 * PRICES[L4]
    )
    unused = sum(
        (truth.allocated.get(model, 0.0) / 3600 * price)
        for name, truth in outcome.truth.items()
        for model, price in PRICES.items()
        if name in {USED, BLENDED}
    ) - sum(owed(name, outcome.truth[name]) for name in (USED, BLENDED))
    tenants = sum(owed(name, truth) for name, truth in outcome.truth.items())
    expected = {
        ("__unresponsive__", "overhead"): unresponsive,
        ("__unused__", "unused"): unused,
        ("__idle__", "idle"): gpu_cost - unresponsive - unused - tenants,
    }
    off = {key: (float(found[key]) - cost) / gpu_cost for key, cost in expected.items()}
    assert max(map(abs, off.values())) < TOLERANCE, off
    assert float(sum(found.values())) == pytest.approx(gpu_cost, rel=0.001)


def test_lines_sum_to_the_asset_cost_to_the_last_unit(outcome: Outcome) -> None:
    for bill in (outcome.early, outcome.late):
        assert sum(costs(bill).values()) == bill.line_cost == bill.asset_cost


def test_a_late_hour_gives_corrections_that_sum_to_the_difference(outcome: Outcome) -> None:
    assert "closed as revision 1" in outcome.closed.out, outcome.closed
    before, after = costs(outcome.early), costs(outcome.late)
    no_data = ("__no_data__", "no_data")
    found = before[no_data] - after.get(no_data, 0)
    assert float(found) == pytest.approx(LATE_NS / 3600e9 * PRICES[L4], rel=TOLERANCE)
    assert "revision 2" in outcome.ask("bill", "close").out
    corrections = [one for one in outcome.lines() if one.revision == 2]
    assert sum(one.cost for one in corrections) == sum(after.values()) - sum(before.values())
    assert sum(one.cost for one in outcome.lines()) == outcome.late.line_cost
    changes = {key: after.get(key, 0) - before.get(key, 0) for key in {**before, **after}}
    # A correction of a few milliseconds costs nothing.
    corrections = [one for one in corrections if one.cost]
    assert {key_of(one): one.cost for one in corrections} == {
        key: change for key, change in changes.items() if change
    }
    for one in corrections:
        explained = outcome.ask("bill", "explain", one.line).out
        assert ("revision 1: closed" in explained) == (key_of(one) in before)
        assert f"revision 2: correction {one.cost.normalize():f} USD" in explained


def key_of(line: ClosedLine) -> Key:
    (namespace,) = json.loads(line.dimension_values)
    return (namespace, line.idle_kind)
