"""Divides a bill's lines into parts: one for each price, and one for shared costs.

Exports with quantities and unit prices are made from these parts. Closed bills store them, because
the prices cannot be looked up later. Pure.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import product
from typing import Final, Literal, NamedTuple

import msgspec

from gpuledger_reports.pricing.billing import Bill, BillLine
from gpuledger_reports.pricing.lookup import Cell, CellKey, Pricing
from gpuledger_reports.pricing.money import fraction_of, minor_digits, quantize_together, rounded
from gpuledger_reports.pricing.rates import MILLIJOULES_PER_KILOWATT_HOUR, Rate
from gpuledger_reports.reading.charging_sql import HOUR_UNITS

Unit = Literal["Hours", "kWh"]
RATIO_DIGITS: Final = 12
QUANTITY_DIGITS: Final = 9


class ChargePart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of a line; a part for shared costs has no unit, price or quantity."""

    cost: Decimal
    unit: Unit | None = None
    quantity: Decimal | None = None
    unit_price: Decimal | None = None
    """In the bill's currency."""
    price: str | None = None
    """The name of the price's row; `None` if no price matches."""
    is_spot: bool = False
    mig_profile: str | None = None
    model: str | None = None
    allocated_hours: Decimal = Decimal(0)
    used_hours: Decimal = Decimal(0)
    used_by_others_hours: Decimal = Decimal(0)
    pricing_currency: str | None = None
    """The currency of the price's row if it differs from the bill's; otherwise `None`."""
    pricing_unit_price: Decimal | None = None
    pricing_cost: Decimal | None = None
    allocated_ratio: Decimal | None = None
    """The line's part of the billed time of all devices with the same price; the parts of all lines
    sum to 1."""


class _Priced(NamedTuple):
    exact_cost: Fraction
    pricing: Pricing | None = None
    cell: Cell | None = None
    unit: Unit | None = None
    quantity: Fraction = Fraction(0)
    unit_price: Fraction = Fraction(0)
    by_others: int = 0


def parts_of(bill: Bill) -> dict[CellKey, list[ChargePart]]:
    """Return the parts of each line by its key; their costs sum to the line's cost."""
    cells = _cells_of(bill)
    others: dict[CellKey, dict[Pricing, int]] = defaultdict(lambda: defaultdict(int))
    for lines, by_pricing in bill.by_others.items():
        for key, (pricing, cell) in product(set(lines), by_pricing.items()):
            others[key][pricing] += cell.units
    ratios = _ratios(bill, cells)
    digits = minor_digits(bill.currency)
    found = {}
    for line in bill.lines:
        parts = list(_priced(cells.get(line.key, {}), line, others[line.key]))
        costs = quantize_together([part.exact_cost for part in parts], digits=digits)
        if costs:
            # Lines are rounded together, so a line's cost may differ from the sum of its rounded
            # parts. The largest part takes the difference.
            largest = max(range(len(costs)), key=lambda at: (abs(costs[at]), -at))
            costs[largest] += line.cost - sum(costs, Decimal(0))
        found[line.key] = [
            _part(part, cost, line=line, ratios=ratios)
            for part, cost in zip(parts, costs, strict=True)
        ]
    return found


def encode_parts(parts: Sequence[ChargePart]) -> str:
    """Return parts as JSON, with decimals as strings."""
    return msgspec.json.encode(parts).decode()


def decode_parts(text: str) -> list[ChargePart]:
    """Return parts from JSON; raises msgspec.ValidationError if they are invalid."""
    return msgspec.json.decode(text, type=list[ChargePart])


def _cells_of(bill: Bill) -> dict[CellKey, dict[Pricing, list[Cell]]]:
    keys = {line.key for line in bill.lines}
    cells: dict[CellKey, dict[Pricing, list[Cell]]] = defaultdict(lambda: defaultdict(list))
    for key, by_pricing in bill.cells.items():
        # Cells have more dimensions than lines, and lines without amounts are not in the bill.
        line = CellKey(key.values[: bill.shown], key.kind)
        for pricing, cell in by_pricing.items() if line in keys else ():
            cells[line][pricing].append(cell)
    return cells


def _priced(
    cells: Mapping[Pricing, Sequence[Cell]], line: BillLine, others: Mapping[Pricing, int]
) -> Iterable[_Priced]:
    for pricing, of_pricing in cells.items():
        cell = Cell(
            billed=sum(each.billed for each in of_pricing),
            allocated=sum(each.allocated for each in of_pricing),
            used=sum(each.used for each in of_pricing),
            energy_millijoules=sum(each.energy_millijoules for each in of_pricing),
        )
        rate = pricing.rate
        # A line may have only energy, for example of a host that used an allocated device.
        by_others = others.get(pricing, 0)
        if cell.billed or by_others or not rate.energy:
            cost, hours = cell.cost(pricing), Fraction(cell.billed, HOUR_UNITS)
            yield _Priced(cost, pricing, cell, "Hours", hours, rate.per_gpu_hour, by_others)
        if rate.energy and cell.energy_millijoules:
            kilowatt_hours = Fraction(cell.energy_millijoules, MILLIJOULES_PER_KILOWATT_HOUR)
            price = rate.per_millijoule * MILLIJOULES_PER_KILOWATT_HOUR
            yield _Priced(cell.energy_cost(pricing), pricing, None, "kWh", kilowatt_hours, price)
    if line.shared_cost:
        yield _Priced(line.shared_cost)


def _part(
    part: _Priced,
    cost: Decimal,
    *,
    line: BillLine,
    ratios: Mapping[tuple[CellKey, Pricing], Decimal],
) -> ChargePart:
    if part.pricing is None:
        return ChargePart(cost=cost)
    rate, is_time = part.pricing.rate, part.unit == "Hours"
    row = rate.price if is_time else rate.energy
    made = ChargePart(
        cost=cost,
        unit=part.unit,
        quantity=_quantity(part.quantity),
        unit_price=rounded(part.unit_price, digits=RATIO_DIGITS),
        price=row.name if row else None,
        # The price's row determines this, not the node's capacity type.
        is_spot=bool(row and row.capacity_type == "spot"),
        mig_profile=row.mig_profile if row else None,
        model=part.pricing.scope.model,
        allocated_hours=_quantity(Fraction(part.cell.allocated if part.cell else 0, HOUR_UNITS)),
        used_hours=_quantity(Fraction(part.cell.used if part.cell else 0, HOUR_UNITS)),
        used_by_others_hours=_quantity(Fraction(part.by_others, HOUR_UNITS)),
        allocated_ratio=ratios[line.key, part.pricing] if is_time else None,
    )
    return _in_its_currency(made, part, rate) if is_time and rate.exchange else made


def _in_its_currency(made: ChargePart, part: _Priced, rate: Rate) -> ChargePart:
    if rate.exchange is None:
        return made
    factor = fraction_of(rate.exchange.rate)
    digits = minor_digits(rate.exchange.currency)
    return msgspec.structs.replace(
        made,
        pricing_currency=rate.exchange.currency,
        pricing_unit_price=rounded(part.unit_price / factor, digits=RATIO_DIGITS),
        pricing_cost=rounded(part.exact_cost / factor, digits=digits),
    )


def _ratios(
    bill: Bill, cells: Mapping[CellKey, Mapping[Pricing, Sequence[Cell]]]
) -> dict[tuple[CellKey, Pricing], Decimal]:
    """Return each line's share of the billed time of all devices with the same prices and rules.

    The keys are a line's key and the prices and rules (`Pricing`). The shares of all lines with the
    same `Pricing` sum to 1.
    """
    by_pricing: dict[Pricing, dict[CellKey, int]] = defaultdict(lambda: defaultdict(int))
    for line in bill.lines:
        for pricing, of_pricing in cells.get(line.key, {}).items():
            by_pricing[pricing][line.key] += sum(cell.billed for cell in of_pricing)
    ratios: dict[tuple[CellKey, Pricing], Decimal] = {}
    for pricing, billed in by_pricing.items():
        total = sum(billed.values())
        # Rounded together, because FOCUS requires them to sum to 1.
        exact = [Fraction(units, total) if total else Fraction(0) for units in billed.values()]
        parts = quantize_together(exact, digits=RATIO_DIGITS)
        ratios |= {(line, pricing): part for line, part in zip(billed, parts, strict=True)}
    return ratios


def _quantity(amount: Fraction) -> Decimal:
    return rounded(amount, digits=QUANTITY_DIGITS)
