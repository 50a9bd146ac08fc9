"""Converts the lines of a bill to rows, with the columns of all formats and of closed bills.

Times are in seconds of whole physical GPUs, with three decimals. Costs are Decimals.
"""

from decimal import Decimal
from fractions import Fraction
from typing import Any, Final

from gpuledger.clock import NS_PER_SECOND
from gpuledger_reports.pricing.billing import Bill, BillLine, gpu_seconds
from gpuledger_reports.pricing.money import minor_digits, quantize_to, rounded
from gpuledger_reports.pricing.rates import MILLIJOULES_PER_KILOWATT_HOUR

_GIBIBYTE_HOUR: Final = 2**30 * 3600
NUMBERS: Final = (
    "allocated_gpu_seconds",
    "used_gpu_seconds",
    "used_by_others_gpu_seconds",
    "billed_gpu_seconds",
    "memory_gibibyte_hours",
    "energy_kilowatt_hours",
)
COSTS: Final = ("gpu_cost", "energy_cost", "shared_cost", "unused_cost", "cost")


def memory_byte_seconds(line: BillLine) -> Decimal:
    """Return a line's memory, multiplied by the time for which it was in use."""
    return rounded(Fraction(line.memory_byte_ns, NS_PER_SECOND), digits=0)


def columns_of(bill: Bill) -> tuple[str, ...]:
    """Return the columns of a bill's lines."""
    return ("line", *bill.by, "idle_kind", *NUMBERS, *COSTS, "currency")


def row_of(bill: Bill, line: BillLine) -> dict[str, Any]:
    """Return a line's values by column; costs are Decimals with the currency's digits.

    The rounded GPU, energy and shared costs sum to the line's cost.
    """
    digits = minor_digits(bill.currency)
    parts = (line.gpu_cost, line.energy_cost, line.shared_cost)
    gpu, energy, shared = quantize_to(line.cost, parts, digits=digits)
    return {
        "line": line.id,
        **dict(zip(bill.by, line.values, strict=True)),
        "idle_kind": line.idle_kind,
        "allocated_gpu_seconds": gpu_seconds(line.allocated),
        "used_gpu_seconds": gpu_seconds(line.used),
        "used_by_others_gpu_seconds": gpu_seconds(line.by_others),
        "billed_gpu_seconds": gpu_seconds(line.billed),
        # Converted from the number that closed bills store, so that both show the same hours.
        "memory_gibibyte_hours": rounded(
            Fraction(memory_byte_seconds(line)) / _GIBIBYTE_HOUR, digits=6
        ),
        "energy_kilowatt_hours": rounded(
            Fraction(line.energy_millijoules, MILLIJOULES_PER_KILOWATT_HOUR), digits=6
        ),
        "gpu_cost": gpu,
        "energy_cost": energy,
        "shared_cost": shared,
        "unused_cost": rounded(line.unused_cost, digits=digits),
        "cost": line.cost,
        "currency": bill.currency,
    }
