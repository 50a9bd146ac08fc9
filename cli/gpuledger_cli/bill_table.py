"""A bill as a table for a terminal. Numbers and line ids are always shown in full.

On a narrow terminal, headings are folded first, then the texts of dimensions. If this is not
sufficient, columns are left out, and the caption lists them. Pure.
"""

from collections.abc import Sequence
from functools import partial
from typing import Final, Literal, NamedTuple

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from gpuledger_reports.presenting.output import efficiency_text, hours_text, state_of
from gpuledger_reports.pricing.billing import Bill
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


def bill_table(bill: Bill, *, width: int) -> tuple[Table, int]:
    """Return the table of a bill and the width that it needs, at least `width`."""
    layout, gone = _Layout(_columns(bill), width), []
    for name in _MAY_GO:
        if layout.total <= width:
            break
        gone.append(name)
        layout = _Layout([each for each in layout.columns if each.name != name], width)
    begin, end = map(time_text, bill.window)
    caption = _totals(bill)
    if gone:
        caption += f"\nnot shown, terminal too narrow: {', '.join(gone)}; see --format csv"
    table = Table(
        title=f"{begin} to {end}, {state_of(bill)}, in {bill.currency}, by {bill.policy.name}",
        title_justify="left",
        caption=caption,
        caption_justify="left",
    )
    for column, wide in zip(layout.columns, layout.widths, strict=True):
        justify: Literal["right", "left"] = "right" if column.is_number else "left"
        table.add_column(column.name, justify=justify, overflow="fold", width=wide)
    for cells in zip(*(column.cells for column in layout.columns), strict=True):
        # As Text, because rich would parse brackets in a name as a style.
        table.add_row(*map(Text, cells))
    return table, max(width, layout.total)


def _columns(bill: Bill) -> list[_Column]:
    # Sorted by cost, highest first. In files, lines are sorted by dimension for comparisons.
    lines = sorted(bill.lines, key=lambda line: (-line.cost, line.values))
    others = {"Used by others": [hours_text(line.by_others) for line in lines]}
    numbers = {
        "Allocated GPU-hours": [hours_text(line.allocated) for line in lines],
        "Used GPU-hours": [hours_text(line.used) for line in lines],
        # Rare, so the column is shown only if a line has such use.
        **(others if any(line.by_others for line in lines) else {}),
        "Efficiency": [efficiency_text(line.used, line.allocated) for line in lines],
        "Billed GPU-hours": [hours_text(line.billed) for line in lines],
        "Cost": [money_text(line.cost, bill.currency) for line in lines],
        "Unused cost": [money_text(line.unused_cost, bill.currency) for line in lines],
    }
    return [
        *(
            _Column(name, [line.values[at] for line in lines], folds=True)
            for at, name in enumerate(bill.by)
        ),
        _Column("Idle", [line.idle_kind or "" for line in lines]),
        *(_Column(name, cells, is_number=True) for name, cells in numbers.items()),
        _Column("Line", [line.id for line in lines]),
    ]


def _totals(bill: Bill) -> str:
    money = partial(money_text, currency=bill.currency)
    parts = [f"Sum of line items {money(bill.line_cost)} = cost of GPUs {money(bill.asset_cost)}"]
    for name, ratio in (
        ("data coverage", bill.data_coverage_ratio),
        ("measured usage", bill.measured_ratio),
    ):
        if ratio is not None:
            parts.append(f"{name} {text_of(ratio * 100, digits=2)} %")
    for state in bill.budgets:
        spent = f"{money(state.spent)} of {money(state.amount)} {bill.currency}"
        at_end = "" if state.forecast is None else f", forecast {money(state.forecast)}"
        parts.append(f"\nbudget {state.name}: {spent}{at_end}")
    return "  ".join(parts)
