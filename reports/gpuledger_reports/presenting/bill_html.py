"""Makes a bill as one HTML file that works offline: an overview, then all lines.

Amounts are rounded in charts and exact in tables. Cluster users choose the names of tenants.
Therefore every name is escaped, and the page's security policy allows only its own style and
script, by their hashes. Pure: the same bill gives the same page.
"""

import shlex
from base64 import b64encode
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from gpuledger_reports.presenting.bill_charts import (
    Bar,
    BarPart,
    Gauge,
    draw_bars,
    draw_days,
    draw_gauges,
    printable,
)
from gpuledger_reports.presenting.output import (
    efficiency_text,
    hours_text,
    notes_of,
    state_of,
    usage_text,
)
from gpuledger_reports.pricing.billing import Bill, BillLine, gpu_seconds
from gpuledger_reports.pricing.closing import ClosedLine, change_since_close
from gpuledger_reports.pricing.money import minor_digits, money_text, quantize_together, rounded
from gpuledger_reports.pricing.policy import IDLE_KINDS
from gpuledger_reports.reading.times import DAY_US, time_text

_FOLDER: Final = Path(__file__).with_name("bill_page")
_MAX_BARS: Final = 20
_MIN_DAYS: Final = 2
_PARTS: Final[Mapping[str, str]] = {
    "used": "allocated, used",
    "billed_unused": "unused",
    "tenants": "tenants",
    "shared": "distributed idle",
    "idle": "idle",
    "unused": "unused, not billed",
    "overhead": "overhead",
    "no_data": "no data",
}
"""The names of the parts of the cost. The keys are also the names of their colours."""
_TILES: Final[Mapping[str, str]] = {
    "billed_unused": "unused cost",
    "idle": "idle cost",
    "unused": "unused, not billed",
    "overhead": "overhead",
    "no_data": "no data",
}
"""The names of parts of the cost on the page's tiles, where no legend explains them."""


def as_html(bill: Bill, *, closed: Sequence[ClosedLine], arguments: Sequence[str]) -> str:
    """Return a bill as an HTML page.

    `closed` contains the lines of all revisions of the bill. `arguments` are the arguments with
    which `gpuledger bill explain` makes the same bill.
    """
    page = _BillPage(bill)
    # Not escaped, because the security policy contains the hashes of these exact texts.
    style, script = _asset("bill_page.css"), _asset("bill_page.js")
    command = shlex.join(["gpuledger", "bill", "explain", "LINE", *arguments])
    text = _template().render(
        bill=bill,
        page=page,
        parts=_PARTS,
        state=_state_text(bill),
        change=change_since_close(bill, closed),
        usage_text=usage_text(bill),
        notes=notes_of(bill),
        command=command,
        style=style,
        script=script,
        policy="; ".join(
            (
                "default-src 'none'",
                f"style-src '{_hash(style)}'",
                f"script-src '{_hash(script)}'",
                "base-uri 'none'",
                "form-action 'none'",
            )
        ),
        time_text=time_text,
        gpu_seconds=gpu_seconds,
        efficiency_text=efficiency_text,
    )
    return f"{text}\n"


@dataclass(frozen=True, kw_only=True)
class _Amount:
    """A part of the total cost; `ratio` is its exact ratio to the total, from 0 to 1."""

    part: str
    cost: Decimal
    ratio: Fraction


class _BillPage:
    """The texts and charts of the page, for the template."""

    def __init__(self, bill: Bill) -> None:
        self._bill = bill
        self._digits = minor_digits(bill.currency)
        # Highest cost first, as in the terminal's table.
        self.lines = sorted(
            bill.lines, key=lambda line: (-line.cost, line.values, line.idle_kind or "")
        )
        self.tenant_lines = [line for line in self.lines if line.idle_kind is None]
        self.has_energy = any(line.energy_cost for line in bill.lines)
        self.has_shared = any(line.shared_cost for line in bill.lines)
        self.has_others = any(line.by_others for line in bill.lines)

    def money(self, amount: Fraction | Decimal) -> str:
        """Return an amount as text with the currency's digits, such as `1,234.50`."""
        return money_text(amount, self._bill.currency)

    def plain(self, amount: Fraction | Decimal) -> Decimal:
        """Return an amount as a number with the currency's digits, as in the other formats."""
        return rounded(Fraction(amount), digits=self._digits)

    def hours(self, units: int) -> str:
        """Return units as GPU-hours with at least three decimals."""
        return hours_text(units, digits=3)

    def efficiency(self, used: int, allocated: int) -> str:
        """Return used over allocated time as a sort key with six decimals; -1 if undefined."""
        # Lines without allocated time sort first or last.
        ratio = Fraction(used, allocated) if allocated else Fraction(-1)
        return f"{rounded(ratio, digits=6):f}"

    def percent(self, ratio: Fraction) -> str:
        """Return a ratio in percent, rounded down so that nothing incomplete shows as 100 %."""
        return f"{Decimal(ratio.numerator * 10**4 // ratio.denominator).scaleb(-2):f} %"

    def name_of(self, line: BillLine) -> str:
        """Return a line's name for charts."""
        return " / ".join(map(printable, line.values))

    def exact(self, line: BillLine) -> dict[str, Decimal]:
        """Return a line's unused, energy and shared cost, rounded as in the other formats."""
        return {
            "unused_cost": self.plain(line.unused_cost),
            "energy_cost": self.plain(line.energy_cost),
            "shared_cost": self.plain(line.shared_cost),
        }

    @property
    def totals(self) -> dict[str, int]:
        """The sums of allocated, used and billed time over all lines, in units."""
        return {
            name: sum(getattr(line, name) for line in self.lines)
            for name in ("allocated", "used", "billed")
        }

    @property
    def amounts(self) -> list[_Amount]:
        """The parts of the total cost; they sum to the bill."""
        exact: dict[str, Fraction] = defaultdict(Fraction)
        for line in self.lines:
            for part, cost in _parts_of(line).items():
                exact[part] += cost
        whole = sum(exact.values(), Fraction(0))
        found = [(part, exact[part]) for part in _PARTS if exact.get(part)]
        costs = quantize_together([cost for _, cost in found], digits=self._digits)
        return [
            _Amount(part=part, cost=cost, ratio=amount / whole if whole else Fraction(0))
            for (part, amount), cost in zip(found, costs, strict=True)
        ]

    @property
    def tiles(self) -> list[tuple[str, Decimal]]:
        """Name and cost of up to two tiles: billed unused cost, and the costliest kind of idle."""
        costs = {amount.part: amount.cost for amount in self.amounts}
        largest = max(
            (kind for kind in IDLE_KINDS if kind in costs), key=costs.__getitem__, default=None
        )
        return [(_TILES[part], costs[part]) for part in ("billed_unused", largest) if part in costs]

    @property
    def no_data_cost(self) -> Decimal | None:
        """The cost of time without data; `None` if data coverage is sufficient for closing."""
        covered, minimum = (
            self._bill.data_coverage_ratio,
            self._bill.policy.policy.close.min_data_coverage_ratio,
        )
        if covered is None or covered >= minimum:
            return None
        return next((each.cost for each in self.amounts if each.part == "no_data"), None)

    @property
    def tenants(self) -> list[dict[str, Any]]:
        """The rows of the tenants' chart: the highest costs, then one row for all others."""
        shown, rest = self.tenant_lines[:_MAX_BARS], self.tenant_lines[_MAX_BARS:]
        # More bars would be unreadable; the table has all lines.
        rows = [
            {"name": self.name_of(line), "parts": _parts_of(line), "cost": line.cost}
            for line in shown
        ]
        if rest:
            sums: dict[str, Fraction] = defaultdict(Fraction)
            for line in rest:
                for part, cost in _parts_of(line).items():
                    sums[part] += cost
            whole = sum((line.cost for line in rest), Decimal(0))
            rows.append(
                {
                    "name": "1 other" if len(rest) == 1 else f"{len(rest)} others",
                    "parts": sums,
                    "cost": whole,
                }
            )
        return rows

    @property
    def tenants_chart(self) -> Markup:
        """The chart of tenants; empty if no tenant has a cost."""
        bars = [
            Bar(
                name=row["name"],
                parts=self._chart_parts(row["name"], row["parts"]),
                text=f"{row['cost']:,f}",
            )
            for row in self.tenants
        ]
        return draw_bars(bars, title="Cost by tenant") if _has_length(bars) else Markup("")

    @property
    def parts_chart(self) -> Markup:
        """The chart of the parts of the cost."""
        bars = [
            Bar(
                name=_PARTS[amount.part],
                parts=self._chart_parts("", {amount.part: Fraction(amount.cost)}),
                text=f"{float(amount.ratio) * 100:.1f} %",
            )
            for amount in self.amounts
        ]
        return draw_bars(bars, title="Cost by category") if _has_length(bars) else Markup("")

    @property
    def days(self) -> list[dict[str, Any]]:
        """Each day's costs by kind, before idle is distributed; all days sum to the bill."""
        days = self._bill.days
        kinds = [kind for kind in (None, *IDLE_KINDS) if any(day.costs.get(kind) for day in days)]
        # All cells are rounded together, so that the days shown sum to the bill.
        cells = [(day, kind) for day in days for kind in kinds]
        costs = quantize_together(
            [day.costs.get(kind, Fraction(0)) for day, kind in cells], digits=self._digits
        )
        of_day: dict[int, dict[str, Decimal]] = {day.begin_us: {} for day in days}
        for (day, kind), cost in zip(cells, costs, strict=True):
            of_day[day.begin_us][kind or "tenants"] = cost
        return [
            {"day": day_text(begin), "costs": costs, "total": sum(costs.values(), Decimal(0))}
            for begin, costs in of_day.items()
        ]

    @property
    def days_chart(self) -> Markup:
        """The chart of days; empty if there are fewer than two or all costs are zero."""
        days = self.days
        bars = [
            Bar(
                name=row["day"],
                parts=self._chart_parts(
                    row["day"], {part: Fraction(cost) for part, cost in row["costs"].items()}
                ),
            )
            for row in days
        ]
        if len(bars) < _MIN_DAYS or not _has_length(bars):
            return Markup("")
        return draw_days(bars, title="Cost by day")

    @property
    def budgets(self) -> list[dict[str, Any]]:
        """The budgets with amount, spending, remaining amount, elapsed time and forecast."""
        return [
            {
                "name": printable(state.name),
                "amount": state.amount,
                "spent": state.spent,
                "left": Fraction(state.amount) - state.spent,
                "elapsed": state.elapsed,
                "forecast": state.forecast,
                "is_over": state.spent > state.amount,
            }
            for state in self._bill.budgets
        ]

    @property
    def budgets_chart(self) -> Markup:
        """The chart of budgets; empty if no budget has an amount."""
        gauges = [
            Gauge(
                name=state.name,
                spent_ratio=_ratio_of(state.spent, state.amount),
                elapsed_ratio=_ratio_of(state.elapsed, Decimal(1)),
                forecast_ratio=None
                if state.forecast is None
                else _ratio_of(state.forecast, state.amount),
                text=self.percent(state.spent / Fraction(state.amount)),
            )
            for state in self._bill.budgets
            if state.amount
        ]
        return draw_gauges(gauges, title="Budgets") if gauges else Markup("")

    def _chart_parts(self, name: str, costs: Mapping[str, Fraction]) -> list[BarPart]:
        currency = self._bill.currency
        return [
            BarPart(
                colour=part,
                amount=self.plain(costs[part]),
                text=": ".join(
                    filter(None, (name, _PARTS[part], f"{self.money(costs[part])} {currency}"))
                ),
            )
            for part in _PARTS
            if costs.get(part)
        ]


def day_text(begin_us: int) -> str:
    """Return a day as text, such as 2026-10-01."""
    return datetime.fromtimestamp(begin_us // DAY_US * 86_400, tz=UTC).date().isoformat()


def _parts_of(line: BillLine) -> dict[str, Fraction]:
    """Return the parts of a line's exact cost; they sum to it."""
    if line.idle_kind is not None:
        return {line.idle_kind: line.exact_cost}
    return {
        "used": line.gpu_cost + line.energy_cost - line.unused_cost,
        "billed_unused": line.unused_cost,
        "shared": line.shared_cost,
    }


def _has_length(bars: Iterable[Bar]) -> bool:
    return any(part.amount > 0 for bar in bars for part in bar.parts)


def _ratio_of(part: Fraction, whole: Decimal) -> Decimal:
    return rounded(part / Fraction(whole), digits=4)


def _state_text(bill: Bill) -> str:
    state = state_of(bill)
    return state if bill.revision is None else f"{state} as revision {bill.revision}"


def _asset(name: str) -> Markup:
    return Markup((_FOLDER / name).read_text(encoding="utf-8"))  # noqa: S704  # our own file


def _hash(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        # An unknown name in the template must be an error, not an empty text.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["printable"] = printable
    return environment.get_template("bill_page.html.jinja")
