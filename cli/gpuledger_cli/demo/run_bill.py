"""What a run of the demo costs, by owner: the bill of its hours, as `gpuledger bill` makes it.

And the last word to its store, by which that command makes it again: the join says how far a time
is complete as ticks go on, and of the last seconds of a run nobody would say it.
"""

from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Final

from gpuledger.clock import NS_PER_US
from gpuledger.errors import UserError
from gpuledger.records.base import BaseRecord
from gpuledger.store.commits import mark_complete
from gpuledger.store.query import open_table
from gpuledger.store.usage_schema import USAGE
from gpuledger_cli.demo.screen import ScreenLine
from gpuledger_cli.demo.tables import TableColumn, fit, fold, line
from gpuledger_reports.presenting.output import efficiency_text
from gpuledger_reports.pricing.billing import Bill, BillMaker, gpu_seconds
from gpuledger_reports.pricing.money import quantize_together
from gpuledger_reports.pricing.policy_file import read_policy
from gpuledger_reports.reading.times import HOUR_US, Window
from gpuledger_reports.reading.usage_sums import UsageReader

_DIGITS: Final = 4
"""A run of half a minute costs cents: a bill's two digits would be zeros."""
COLUMNS: Final = (
    TableColumn("Owner", "left", floor=18),
    TableColumn("Allocated GPU s", leaves=1),
    TableColumn("Used GPU s", leaves=2),
    TableColumn("Efficiency", leaves=4),
    TableColumn("Billed GPU s", leaves=3),
    TableColumn("Cost"),
    TableColumn("Unused cost"),
)
"""Of the bill's table; `BILL_COLUMNS` says what they mean."""
_MEANING: Final = (
    "Billed is allocated time while the GPU responded. For __host__ it is the used time, for"
    " __unresponsive__ the time without a response, and for __idle__ the rest."
)


class OwnerCost(BaseRecord, frozen=True, kw_only=True):
    """What an owner's pods cost, or a kind of idle."""

    owner: str
    """Kind and name of the workload, or a special value of bills, such as `__idle__`."""
    idle_kind: str | None = None
    """Why nobody pays it, as on bills; absent for an owner's."""
    allocated_gpu_seconds: float
    """How much of GPUs was allocated to it."""
    billed_gpu_seconds: float
    """How much of GPUs it pays for: what it held while they answered; the lines sum to all GPUs."""
    used_gpu_seconds: float
    """For how long its kernels ran."""
    cost: str
    """What that costs, in the bill's currency."""
    unused_cost: str
    """How much of it is for GPUs that were held, and used by nobody."""


class RunBill(BaseRecord, frozen=True, kw_only=True):
    """The bill of a run."""

    currency: str
    """Of all costs."""
    prices: str
    """By which prices."""
    lines: list[OwnerCost]
    """The dearest first."""
    cost: str
    """The sum of the lines."""


def bill_run(store: Path, *, began_ns: int, ended_ns: int) -> RunBill | None:
    """Return the bill of the hours of a run; `None` where the store has no usage of them."""
    # Bills are of whole hours: of a store that was there before, the rest of these hours is in
    # it too.
    hour_ns = HOUR_US * NS_PER_US
    window = Window(began_ns // hour_ns * HOUR_US, -(-ended_ns // hour_ns) * HOUR_US)
    try:
        # Of brokers that were away nothing may have come to the store. The run is over, and its
        # marks say only how far it was a moment before.
        reader = UsageReader(str(store), is_finished=True)
    except UserError:
        return None
    return of_bill(BillMaker(reader, read_policy(None), by=["owner"]).make(window))


def write_last_marks(store: Path) -> None:
    """Say that a store to which nobody writes any more is complete to the end of its usage."""
    table = open_table(str(store), USAGE.name)
    if table is not None:
        mark_complete(table, UsageReader(str(store), is_finished=True).usage_end_us)


def of_bill(bill: Bill) -> RunBill | None:
    """Return what of a bill is the run's: not the time of its hours in which nothing ran."""
    # Time without data is the rest of the last minute and the time between this run and an earlier
    # one. Neither belongs to this run.
    lines = [each for each in bill.lines if each.idle_kind != "no_data"]
    if not lines:
        return None
    # Together, as a bill's: the lines sum to what is said below them.
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
    """Return costs and what of each is unused as they are shown; they sum to the rounded sum."""
    # Both parts of all: rounded by itself, the unused part of a cost might be more than the cost.
    parts = [part for cost, unused in exact for part in (cost - unused, unused)]
    shown = quantize_together(parts, digits=_DIGITS)
    return [(used + unused, unused) for used, unused in zip(shown[::2], shown[1::2], strict=True)]


def draw_bill(bill: RunBill, *, width: int) -> list[ScreenLine]:
    """Return the lines that `--format table` ends with."""
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
    widths = fit(COLUMNS, rows, width=width)
    unused = sum((Decimal(each.unused_cost) for each in bill.lines), Decimal(0))
    # What costs nothing, as GPUs without a price, has no share of it.
    share = Fraction(unused) / Fraction(bill.cost) if Decimal(bill.cost) else Fraction(0)
    note = (
        f"It cost {bill.cost} {bill.currency} by {bill.prices}, including {unused}"
        f" ({float(share):.0%}) for GPUs that were allocated and unused."
    )
    return [
        ScreenLine(line(COLUMNS, [column.name for column in COLUMNS], widths), "bold"),
        *(ScreenLine(line(COLUMNS, row, widths)) for row in rows),
        *(ScreenLine(text, "dim") for text in fold(_MEANING, width=width, indent="  ")),
        *(ScreenLine(text) for text in fold(note, width=width, indent="  ")),
    ]
