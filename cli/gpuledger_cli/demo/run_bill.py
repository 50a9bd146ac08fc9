"""Bills a run of the demo by workload, as `gpuledger bill` does for the hours of the run."""

from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Final

from gpuledger.clock import NS_PER_US
from gpuledger.errors import UserError
from gpuledger.records.base import BaseRecord
from gpuledger_cli.demo.screen import ScreenLine
from gpuledger_cli.demo.tables import BILL_TITLE, TableColumn, fit, fold, line, note_hidden
from gpuledger_reports.presenting.output import efficiency_text
from gpuledger_reports.pricing.billing import Bill, BillMaker, gpu_seconds
from gpuledger_reports.pricing.money import quantize_together
from gpuledger_reports.pricing.policy_file import read_policy
from gpuledger_reports.reading.times import HOUR_US, Window
from gpuledger_reports.reading.usage_sums import UsageReader

_DIGITS: Final = 4
"""A run of half a minute costs only cents. With two digits, as on a bill, most costs would be 0."""


class OwnerCost(BaseRecord, frozen=True, kw_only=True):
    """The cost of an owner's pods, or of a kind of idle time."""

    owner: str
    """Kind and name of the workload, or a special value of bills, such as `__idle__`."""
    idle_kind: str | None = None
    """Why the cost has no owner, as on bills; absent if it has one."""
    allocated_gpu_seconds: float
    """GPU-seconds that were allocated to it."""
    billed_gpu_seconds: float
    """GPU-seconds that it pays for: allocated while the GPUs responded. The lines sum to the time
    of all GPUs."""
    used_gpu_seconds: float
    """GPU-seconds in which its kernels ran."""
    cost: str
    """Cost of the billed time, in the bill's currency."""
    unused_cost: str
    """Part of the cost for GPUs that were allocated and unused."""


class RunBill(BaseRecord, frozen=True, kw_only=True):
    """The bill of a run."""

    currency: str
    """Currency of all costs."""
    prices: str
    """Name of the price list."""
    lines: list[OwnerCost]
    """Line items, the most expensive first."""
    cost: str
    """Sum of the lines."""


def bill_columns(currency: str) -> tuple[TableColumn, ...]:
    """Return the columns of the bill's table, which `BILL_COLUMNS` explains."""
    return (
        TableColumn("Workload", "left", floor=18),
        TableColumn("Allocated GPU-s", leaves=1),
        TableColumn("Used GPU-s", leaves=2),
        TableColumn("Efficiency", leaves=4),
        TableColumn("Billed GPU-s", leaves=3),
        TableColumn(f"Cost {currency}"),
        TableColumn(f"Unused {currency}"),
    )


def bill_run(store: Path, *, began_ns: int, ended_ns: int) -> RunBill | None:
    """Return the bill of the hours of a run; `None` if the store has no usage in them."""
    # Bills cover whole hours. In a store with earlier runs they include other usage of these hours.
    hour_ns = HOUR_US * NS_PER_US
    window = Window(began_ns // hour_ns * HOUR_US, -(-ended_ns // hour_ns) * HOUR_US)
    try:
        # `is_finished`, because the run is over, although its watermarks end a moment earlier.
        # Raises `UserError` if the store is empty, for example because of unavailable brokers.
        reader = UsageReader(str(store), is_finished=True)
    except UserError:
        return None
    return of_bill(BillMaker(reader, read_policy(None), by=["owner"]).make(window))


def of_bill(bill: Bill) -> RunBill | None:
    """Return the bill without the time that is not part of the run; `None` if no line is left."""
    # Time without data is the rest of the last minute and the time between this run and an earlier
    # one. Neither belongs to this run.
    lines = [each for each in bill.lines if each.idle_kind != "no_data"]
    if not lines:
        return None
    # Rounded together, as on a bill, so that the lines sum to the total.
    costs = shown_costs([(each.exact_cost, each.unused_cost) for each in lines])
    made = [
        OwnerCost(
            owner=each.values[0],
            idle_kind=each.idle_kind,
            allocated_gpu_seconds=float(gpu_seconds(each.allocated)),
            billed_gpu_seconds=float(gpu_seconds(each.billed)),
            used_gpu_seconds=float(gpu_seconds(each.used)),
            cost=f"{cost:f}",
            unused_cost=f"{unused:f}",
        )
        for each, (cost, unused) in zip(lines, costs, strict=True)
    ]
    return RunBill(
        currency=bill.currency,
        prices=bill.policy.name,
        lines=sorted(made, key=lambda each: (-Decimal(each.cost), each.owner)),
        cost=f"{sum((cost for cost, _ in costs), Decimal(0)):f}",
    )


def shown_costs(exact: Sequence[tuple[Fraction, Fraction]]) -> list[tuple[Decimal, Decimal]]:
    """Return each cost and its unused part, rounded so that the costs sum to the rounded sum."""
    # Used and unused parts are rounded together, or an unused part could exceed its cost.
    parts = [part for cost, unused in exact for part in (cost - unused, unused)]
    shown = quantize_together(parts, digits=_DIGITS)
    return [(used + unused, unused) for used, unused in zip(shown[::2], shown[1::2], strict=True)]


def draw_bill(bill: RunBill, *, width: int) -> list[ScreenLine]:
    """Return the bill's table with its title and its total."""
    columns = bill_columns(bill.currency)
    rows = [
        [
            each.owner,
            f"{each.allocated_gpu_seconds:.1f}",
            f"{each.used_gpu_seconds:.1f}",
            efficiency_text(each.used_gpu_seconds, each.allocated_gpu_seconds),
            f"{each.billed_gpu_seconds:.1f}",
            each.cost,
            each.unused_cost,
        ]
        for each in bill.lines
    ]
    widths = fit(columns, rows, width=width)
    unused = sum((Decimal(each.unused_cost) for each in bill.lines), Decimal(0))
    # GPUs without a price cost nothing.
    share = Fraction(unused) / Fraction(bill.cost) if Decimal(bill.cost) else Fraction(0)
    title = f"{BILL_TITLE}, at {bill.prices}"
    total = (
        f"Total {bill.cost} {bill.currency}; {unused} {bill.currency} ({float(share * 100):.0f} %)"
        " for GPUs that were allocated and unused. `gpuledger bill` bills whole minutes: the"
        " rest of the last minute is __no_data__."
    )
    return [
        *(ScreenLine(text, "bold") for text in fold(title, width=width, indent="  ")),
        ScreenLine(line(columns, [column.name for column in columns], widths), "bold"),
        *(ScreenLine(line(columns, row, widths)) for row in rows),
        *(ScreenLine(text, "dim") for text in note_hidden(columns, widths, width=width)),
        *(ScreenLine(text) for text in fold(total, width=width, indent="  ")),
    ]
