"""Bills as FOCUS 1.2, the FinOps Foundation's format of costs, with the allocation columns of 1.3.

A row is a part of a line with one price, so that unit price times quantity is the row's cost. The
parts of a line sum to the line. What is shared of idle is an adjustment: it has no quantity.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final, NamedTuple

import msgspec

from reports.bill_output import time_text
from reports.billing import Bill, BillLine
from reports.charging_sql import HOUR_UNITS
from reports.money import minor_digits, quantize_together, rounded
from reports.periods import month_of
from reports.policy import FocusNames, is_of_device
from reports.rates import MILLIJOULES_PER_KILOWATT_HOUR
from reports.terms import Cell, CellKey, Terms

DECIMAL, STRING, TIME, JSON = "decimal", "string", "date/time", "json"
_RATIO_DIGITS: Final = 12
_QUANTITY_DIGITS: Final = 9


class FocusColumn(NamedTuple):
    """A column of the specification."""

    name: str
    kind: str
    is_nullable: bool


def _of_kind(kind: str, names: str, *, is_nullable: bool) -> Iterator[FocusColumn]:
    for name in names.split():
        yield FocusColumn(name, kind, is_nullable)


# Those that a bill of GPUs has; the specification's conditional ones that it never has are left
# out, as it allows: commitments, capacity reservations, prices in a virtual currency.
COLUMNS: Final = (
    *_of_kind(DECIMAL, "BilledCost ContractedCost EffectiveCost ListCost", is_nullable=False),
    *_of_kind(DECIMAL, "ListUnitPrice ContractedUnitPrice", is_nullable=True),
    *_of_kind(DECIMAL, "PricingQuantity ConsumedQuantity", is_nullable=True),
    *_of_kind(STRING, "PricingUnit ConsumedUnit PricingCategory", is_nullable=True),
    *_of_kind(STRING, "BillingAccountId BillingCurrency", is_nullable=False),
    *_of_kind(STRING, "BillingAccountName InvoiceId", is_nullable=True),
    *_of_kind(
        TIME,
        "BillingPeriodStart BillingPeriodEnd ChargePeriodStart ChargePeriodEnd",
        is_nullable=False,
    ),
    *_of_kind(STRING, "ChargeCategory ChargeFrequency", is_nullable=False),
    *_of_kind(STRING, "ChargeClass ChargeDescription", is_nullable=True),
    *_of_kind(
        STRING,
        "InvoiceIssuerName ProviderName PublisherName ServiceCategory ServiceName",
        is_nullable=False,
    ),
    *_of_kind(STRING, "ServiceSubcategory", is_nullable=False),
    *_of_kind(STRING, "RegionId RegionName AvailabilityZone", is_nullable=True),
    *_of_kind(STRING, "ResourceId ResourceName ResourceType", is_nullable=True),
    *_of_kind(STRING, "SkuId SkuMeter SkuPriceId", is_nullable=True),
    *_of_kind(STRING, "SubAccountId SubAccountName SubAccountType", is_nullable=True),
    *_of_kind(JSON, "Tags", is_nullable=True),
    *_of_kind(STRING, "x_Line x_PolicyHash", is_nullable=False),
    *_of_kind(STRING, "x_IdleKind", is_nullable=True),
    *_of_kind(DECIMAL, "x_HeldGpuHours x_UsedGpuHours", is_nullable=False),
    *_of_kind(DECIMAL, "x_CoveredRatio", is_nullable=True),
)
ALLOCATION_COLUMNS: Final = (
    *_of_kind(STRING, "AllocatedMethodId AllocatedResourceId", is_nullable=True),
    *_of_kind(STRING, "AllocatedResourceName", is_nullable=True),
    *_of_kind(JSON, "AllocatedMethodDetails AllocatedTags", is_nullable=True),
)


class _PartOfLine(NamedTuple):
    """A part of a line: its time, its energy, or what is shared."""

    exact_cost: Fraction
    terms: Terms | None = None
    cell: Cell | None = None
    unit: str | None = None
    quantity: Fraction | None = None
    unit_price: Fraction | None = None


def focus_rows(bill: Bill, *, allocations: bool) -> Iterator[dict[str, Any]]:
    """Yield the rows of a bill, by column; with the columns of allocations where asked for."""
    ratios = _ratios(bill) if allocations else {}
    for line in bill.lines:
        parts = list(_parts(bill, line))
        digits = minor_digits(bill.currency)
        costs = quantize_together([part.exact_cost for part in parts], digits=digits)
        if costs:
            # The line was rounded with all others, and may be a unit off its parts.
            largest = max(range(len(costs)), key=lambda at: (abs(costs[at]), -at))
            costs[largest] += line.cost - sum(costs, Decimal(0))
        for part, cost in zip(parts, costs, strict=True):
            row = _row(bill, line, part, cost)
            if allocations:
                row |= _allocation(bill, line, part, ratios)
            yield row


def focus_columns(*, allocations: bool) -> tuple[FocusColumn, ...]:
    """Return the columns that `focus_rows` has."""
    return (*COLUMNS, *ALLOCATION_COLUMNS) if allocations else COLUMNS


def _cells(bill: Bill, line: BillLine) -> dict[Terms, list[Cell]]:
    cells: dict[Terms, list[Cell]] = defaultdict(list)
    for key, by_terms in bill.cells.items():
        if CellKey(key.values[: bill.shown], key.kind) == CellKey(line.values, line.idle_kind):
            for terms, cell in by_terms.items():
                cells[terms].append(cell)
    return cells


def _parts(bill: Bill, line: BillLine) -> Iterator[_PartOfLine]:
    for terms, cells in _cells(bill, line).items():
        cell = Cell(
            charged=sum(each.charged for each in cells),
            held=sum(each.held for each in cells),
            used=sum(each.used for each in cells),
            energy_millijoules=sum(each.energy_millijoules for each in cells),
        )
        # A line may have energy alone: of a host that used what somebody else held.
        if cell.charged or not terms.rate.energy:
            hours = Fraction(cell.charged, HOUR_UNITS)
            yield _PartOfLine(
                cell.cost(terms), terms, cell, "Hours", hours, terms.rate.per_gpu_hour
            )
        if terms.rate.energy and cell.energy_millijoules:
            kilowatt_hours = Fraction(cell.energy_millijoules, MILLIJOULES_PER_KILOWATT_HOUR)
            price = terms.rate.per_millijoule * MILLIJOULES_PER_KILOWATT_HOUR
            yield _PartOfLine(cell.energy_cost(terms), terms, None, "kWh", kilowatt_hours, price)
    if line.shared_cost:
        yield _PartOfLine(line.shared_cost)


def _row(bill: Bill, line: BillLine, part: _PartOfLine, cost: Decimal) -> dict[str, Any]:
    names = bill.policy.policy.focus
    row: dict[str, Any] = dict.fromkeys(column.name for column in COLUMNS)
    row |= dict.fromkeys(("BilledCost", "ContractedCost", "EffectiveCost", "ListCost"), cost)
    # FOCUS' billing periods are months; a longer or an odd bill is its own period.
    month = month_of(bill.end_us)
    period = month if month.begin_us <= bill.window.begin_us else bill.window
    row |= {
        "BillingPeriodStart": time_text(period.begin_us),
        "BillingPeriodEnd": time_text(max(period.end_us, bill.end_us)),
        "ChargePeriodStart": time_text(bill.window.begin_us),
        "ChargePeriodEnd": time_text(bill.end_us),
        "BillingCurrency": bill.currency,
        "ChargeCategory": "Usage" if part.terms else "Adjustment",
        "ChargeFrequency": "Usage-Based",
        "ChargeDescription": _description(bill, line),
        "ServiceCategory": "Compute",
        "ServiceSubcategory": "Other (Compute)",
        "ServiceName": "GPU",
        "Tags": _tags(bill, line),
        "x_Line": line.id,
        "x_IdleKind": line.idle_kind,
        "x_PolicyHash": bill.policy.sha256,
        "x_HeldGpuHours": _quantity(Fraction(part.cell.held if part.cell else 0, HOUR_UNITS)),
        "x_UsedGpuHours": _quantity(Fraction(part.cell.used if part.cell else 0, HOUR_UNITS)),
        "x_CoveredRatio": None
        if bill.covered_ratio is None
        else rounded(bill.covered_ratio, digits=_RATIO_DIGITS),
        **_of_names(names),
        **_sub_account(bill, line),
    }
    if part.terms:
        row |= _priced(bill, line, part, part.terms)
    return row


def _priced(bill: Bill, line: BillLine, part: _PartOfLine, terms: Terms) -> dict[str, Any]:
    price = terms.rate.price if part.unit == "Hours" else terms.rate.energy
    values = dict(zip(bill.by, line.values, strict=True))
    # By the row of the price book: a spot price is a spot price, whatever the node is called.
    capacity = price.capacity_type if price else None
    category = {"spot": "Dynamic", "reserved": "Committed"}.get(capacity or "", "Standard")
    quantity = None if part.quantity is None else _quantity(part.quantity)
    found: dict[str, Any] = {
        "PricingQuantity": quantity,
        "PricingUnit": part.unit,
        "RegionId": values.get("region"),
        "RegionName": values.get("region"),
        "AvailabilityZone": values.get("zone"),
        "ResourceId": values.get("gpu"),
        "ResourceName": values.get("gpu") and terms.scope[2],
        "ResourceType": values.get("gpu") and "GPU",
    }
    if price and part.unit_price is not None:
        unit_price = rounded(part.unit_price, digits=_RATIO_DIGITS)
        found |= {
            "PricingCategory": category,
            "ListUnitPrice": unit_price,
            "ContractedUnitPrice": unit_price,
            "SkuId": terms.scope[2] or price.name,
            "SkuMeter": "GPU hours" if part.unit == "Hours" else "Energy",
            "SkuPriceId": price.name,
        }
    if part.cell and not line.idle_kind:
        used = _quantity(Fraction(part.cell.used, HOUR_UNITS))
        found |= {"ConsumedQuantity": used, "ConsumedUnit": "Hours"}
    return found


def _of_names(names: FocusNames) -> dict[str, str]:
    return {
        "BillingAccountId": names.billing_account_id,
        "BillingAccountName": names.billing_account_name,
        "InvoiceIssuerName": names.invoice_issuer_name,
        "ProviderName": names.provider_name,
        "PublisherName": names.publisher_name,
    }


def _sub_account(bill: Bill, line: BillLine) -> dict[str, str]:
    """Return the first dimension of tenants, which is who FOCUS calls a sub account."""
    # A node or a model is no account of anybody.
    for name, value in zip(bill.by, line.values, strict=True):
        if not is_of_device(name):
            return {"SubAccountId": value, "SubAccountName": value, "SubAccountType": name}
    return {}


def _description(bill: Bill, line: BillLine) -> str:
    named = ", ".join(f"{name} {value}" for name, value in zip(bill.by, line.values, strict=True))
    return f"GPUs, {line.idle_kind}: {named}" if line.idle_kind else f"GPUs: {named}"


def _tags(bill: Bill, line: BillLine) -> str:
    return msgspec.json.encode(dict(zip(bill.by, line.values, strict=True))).decode()


def _quantity(amount: Fraction) -> Decimal:
    return rounded(amount, digits=_QUANTITY_DIGITS)


def _ratios(bill: Bill) -> dict[tuple[str, Terms], Decimal]:
    """Return the part of all devices with the same terms that each line has; they sum to 1."""
    by_terms: dict[Terms, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for line in bill.lines:
        for terms, cells in _cells(bill, line).items():
            by_terms[terms][line.id] += sum(cell.charged for cell in cells)
    ratios: dict[tuple[str, Terms], Decimal] = {}
    for terms, charged in by_terms.items():
        total = sum(charged.values())
        # To so many digits, and together: the specification wants them to sum to 1.
        exact = [Fraction(units, total) if total else Fraction(0) for units in charged.values()]
        parts = quantize_together(exact, digits=_RATIO_DIGITS)
        ratios |= {(line, terms): part for line, part in zip(charged, parts, strict=True)}
    return ratios


def _allocation(
    bill: Bill, line: BillLine, part: _PartOfLine, ratios: Mapping[tuple[str, Terms], Decimal]
) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(column.name for column in ALLOCATION_COLUMNS)
    if part.terms is None or part.unit != "Hours" or part.quantity is None:
        return row
    element = {
        "AllocatedRatio": ratios[line.id, part.terms],
        "UsageUnit": "Hours",
        "UsageQuantity": _quantity(part.quantity),
    }
    encoder = msgspec.json.Encoder(decimal_format="number")
    return row | {
        "AllocatedMethodId": "gpuledger-board-time",
        "AllocatedMethodDetails": encoder.encode({"Elements": [element]}).decode(),
        "AllocatedResourceId": "/".join(line.values),
        "AllocatedResourceName": "/".join(line.values),
        "AllocatedTags": _tags(bill, line),
    }
