"""The outlook of a group of GPUs: its forecast demand, compared with its GPUs. Pure."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any, Final

from gpuledger_reports.capacity.demand import Demand
from gpuledger_reports.capacity.forecasting import DAY, WEEK, Forecast, forecast, hours_needed

_SHARES: Final = (0.1, 0.5, 0.9)
_ALL_BUT: Final = 0.01
"""How many GPUs may be free if a group counts as full."""
COLUMNS: Final = (
    "history_days",
    "gpus",
    "demand",
    "horizon_days",
    "expected",
    "low_80",
    "high_80",
    "low_95",
    "high_95",
    *(f"full_days_p{share * 100:.0f}" for share in _SHARES),
    "method",
    "error",
    "naive_error",
    "coverage_80",
    "coverage_95",
    "filled_hours",
    "unknown_gpu_hours",
    "note",
)
"""The columns of an outlook after its dimensions. Amounts are GPUs, unless the name has a unit."""


def find_outlook(
    demand: Demand, dimensions: Sequence[str], *, days: int, added_gpus: float = 0.0
) -> dict[str, Any]:
    """Return the values of the dimensions and of `COLUMNS`; `None` where nothing is known.

    `added_gpus` changes the number of GPUs with which the demand is compared.
    """
    found: dict[str, Any] = dict.fromkeys((*dimensions, *COLUMNS))
    found |= dict(zip(dimensions, demand.key, strict=True))
    hours, gpus = len(demand.allocated), max(0.0, demand.gpus + added_gpus)
    found |= {
        "history_days": hours // DAY,
        "gpus": round(gpus, 2),
        "demand": round(fmean(demand.allocated[-DAY:]), 2),
        "horizon_days": days,
        "filled_hours": demand.filled_hours,
        "unknown_gpu_hours": round(demand.unknown_hours, 2),
    }
    needed = hours_needed(days * DAY)
    if hours < needed:
        found["note"] = f"too short a history; {-(-needed // DAY)} days are needed"
        return found
    made = forecast(demand.allocated, days * DAY)
    found |= _of_forecast(made, gpus)
    if demand.filled_hours:
        found["note"] = f"{demand.filled_hours} hours without samples"
    return found


def _of_forecast(made: Forecast, gpus: float) -> dict[str, Any]:
    narrow, wide = made.bands
    # Allocations cannot exceed the GPUs, so full means that all are allocated.
    crossings = made.hours_until_above(gpus - _ALL_BUT, _SHARES)
    return {
        "expected": _mean_of_end(made.expected),
        "low_80": _mean_of_end(narrow.low),
        "high_80": _mean_of_end(narrow.high),
        "low_95": _mean_of_end(wide.low),
        "high_95": _mean_of_end(wide.high),
        **{
            f"full_days_p{share * 100:.0f}": None if hours is None else round(hours / DAY, 1)
            for share, hours in zip(_SHARES, crossings, strict=True)
        },
        "method": made.method,
        "error": round(made.error, 2),
        "naive_error": round(made.naive_error, 2),
        "coverage_80": round(narrow.measured, 3),
        "coverage_95": round(wide.measured, 3),
    }


def _mean_of_end(hours: Sequence[float]) -> float:
    """Return the mean of the last week, or of all hours if there are fewer."""
    return round(fmean(hours[-WEEK:]), 2)
