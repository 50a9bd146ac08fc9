"""A bill as a table for a terminal. Numbers and line ids are always shown in full.

The last row is the sum of all lines. If only some lines are requested, the row before it is the sum
of the others.

On a narrow terminal, headings are folded first, then the texts of dimensions. If this is not
sufficient, columns are left out, and the caption lists them. Pure.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from fractions import Fraction
from functools import partial
from typing import Any, Final, Literal, NamedTuple

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from gpuledger_reports.presenting.output import efficiency_text, hours_text, state_of
from gpuledger_reports.pricing.billing import Bill, BillLine
from gpuledger_reports.pricing.money import money_text, text_of
from gpuledger_reports.reading.times import time_text

# Characters that rich adds around each cell; one more comes before the first cell.
_AROUND: Final = 3
_NARROWEST: Final = 10
"""Minimum width to which a dimension's text folds before a column is left out."""
_MAY_GO: Final = (
    "Unused cost",
    "Used by others",
    "Used GPU-hours",
    "Allocated GPU-hours",
    "Efficiency",
    "Billed GPU-hours",
)
"""Columns that may be left out, in this order."""
Sort = Literal["allocated", "billed", "cost", "efficiency", "unused", "used"]
_SORTS: Final[Mapping[Sort, Callable[[BillLine], Any]]] = {
    "allocated": lambda line: line.allocated,
    "billed": lambda line: line.billed,
    "cost": lambda line: line.cost,
    "efficiency": lambda line: Fraction(line.used, line.allocated) if line.allocated else -1,
    "unused": lambda line: line.unused_cost,
    "used": lambda line: line.used,
}


class _Column(NamedTuple):
    name: str
    cells: Sequence[str]
    is_number: bool = False
    folds: bool = False
    """Whether the column's texts may be folded to several lines."""

    @property
    def width(self) -> int:
        """Width of the column's widest cell."""
        return max(map(cell_len, self.cells), default=0)


class _Layout:
    """The width of each column; narrower than preferred if the table would not fit."""

    def __init__(self, columns: Sequence[_Column], width: int) -> None:
        self.columns = columns
        liked = [max(column.width, cell_len(column.name)) for column in columns]
        self.widths = liked
        if self.total <= width:
            return
        # Headings fold between words, regardless of the cells below.
        self.widths = [max(each.width, *map(cell_len, each.name.split())) for each in columns]
        folding = [at for at, column in enumerate(columns) if column.folds]
        # The widest dimension becomes narrower first.
        while self.total > width and folding:
            widest = max(folding, key=self.widths.__getitem__)
            if self.widths[widest] <= _NARROWEST:
                break
            self.widths[widest] -= 1
        # Headings get the remaining width.
        for at, wide in enumerate(liked):
            self.widths[at] += max(0, min(wide - self.widths[at], width - self.total))

    @property
    def total(self) -> int:
        """Width of the table, including padding and borders."""
        return sum(self.widths) + _AROUND * len(self.widths) + 1


def bill_table(
    bill: Bill, *, width: int, sort: Sort = "cost", top: int | None = None
) -> tuple[Table, int]:
    """Return the table of a bill and the width that it needs, at least `width`.

    The lines are sorted by a column, highest first; all after the first `top` are summed.
    """
    # In files, lines are sorted by dimension for comparisons.
    lines = sorted(bill.lines, key=lambda line: (-_SORTS[sort](line), line.values))
    shown, others = lines[:top], lines[len(lines[:top]) :]
    sums = {name: summed for name, summed in (("others", others), ("total", lines)) if summed}
    layout, gone = _Layout(_columns(bill, shown, sums), width), []
    for name in _MAY_GO:
        if layout.total <= width:
            break
        kept = [each for each in layout.columns if each.name != name]
        if len(kept) < len(layout.columns):
            gone.append(name)
            layout = _Layout(kept, width)
    begin, end = map(time_text, bill.window)
    caption = _totals(bill)
    if gone:
        caption += f"\nnot shown, terminal too narrow: {', '.join(gone)}; see --format csv"
    table = Table(
        title=f"{begin} to {end}, {state_of(bill)}, in {bill.currency},"
        f" priced by {bill.policy.name}",
        title_justify="left",
        caption=caption,
        caption_justify="left",
    )
    for column, wide in zip(layout.columns, layout.widths, strict=True):
        justify: Literal["right", "left"] = "right" if column.is_number else "left"
        table.add_column(column.name, justify=justify, overflow="fold", width=wide)
    rows = zip(*(column.cells for column in layout.columns), strict=True)
    for number, cells in enumerate(rows, 1):
        # As Text, because rich would parse brackets in a name as a style.
        table.add_row(*map(Text, cells), end_section=number == len(shown))
    return table, max(width, layout.total)


def _columns(
    bill: Bill, shown: Sequence[BillLine], sums: Mapping[str, Sequence[BillLine]]
) -> list[_Column]:
    lines = [*shown, *(_sum_of(summed) for summed in sums.values())]
    # Without a sum, because the same use may be on two lines.
    by_others = [hours_text(line.by_others) for line in shown] + [""] * len(sums)
    others = {"Used by others": by_others}
    names = [[name, *[""] * (len(bill.by) - 1)] for name in sums]
    numbers = {
        "Allocated GPU-hours": [hours_text(line.allocated) for line in lines],
        "Used GPU-hours": [hours_text(line.used) for line in lines],
        # Rare, so the column is shown only if a line has such use.
        **(others if any(line.by_others for line in shown) else {}),
        "Efficiency": [efficiency_text(line.used, line.allocated) for line in lines],
        "Billed GPU-hours": [hours_text(line.billed) for line in lines],
        "Cost": [money_text(line.cost, bill.currency) for line in lines],
        "Unused cost": [money_text(line.unused_cost, bill.currency) for line in lines],
    }
    return [
        *(
            _Column(
                name, [*(line.values[at] for line in shown), *(n[at] for n in names)], folds=True
            )
            for at, name in enumerate(bill.by)
        ),
        _Column("Idle", [*(line.idle_kind or "" for line in shown), *[""] * len(sums)]),
        *(_Column(name, cells, is_number=True) for name, cells in numbers.items()),
        _Column("Line", [line.id for line in lines]),
    ]


def _sum_of(lines: Sequence[BillLine]) -> BillLine:
    """Return a line without a name that has the amounts of several lines."""
    amounts: dict[str, Any] = {
        field.name: sum(getattr(line, field.name) for line in lines)
        for field in fields(BillLine)
        if field.name not in ("id", "values", "idle_kind")
    }
    return BillLine(id="", values=(), idle_kind=None, **amounts)


def _totals(bill: Bill) -> str:
    money = partial(money_text, currency=bill.currency)
    parts = [f"Sum of line items {money(bill.line_cost)} = cost of GPUs {money(bill.asset_cost)}"]
    for name, ratio in (
        ("data coverage", bill.data_coverage_ratio),
        ("measured usage", bill.measured_ratio),
    ):
        if ratio is not None:
            parts.append(f"{name} {text_of(ratio * 100, digits=2)} %")
    if units := sum(line.billed for line in bill.lines if line.idle_kind):
        parts.append(f"\nGPU-hours without a tenant: {hours_text(units)}")
    for state in bill.budgets:
        spent = f"{money(state.spent)} of {money(state.amount)} {bill.currency}"
        at_end = "" if state.forecast is None else f", forecast {money(state.forecast)}"
        parts.append(f"\nbudget {state.name}: {spent}{at_end}")
    return "  ".join(parts)
