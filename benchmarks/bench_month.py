"""The error of tenants' bills against the truth of a month played from the devices on.

`--seconds 2592000` plays all of it, which takes hours. In a shorter run each pod's start and end,
which are uncertain by a tick, have more weight.
"""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from benchmarks.figure import Figure
from tests.month import Month
from tests.month_scenario import DAYS, TenantTruth, owed

NAME = "month"
_HOUR_SECONDS: Final = 3600
_TICK_SECONDS: Final = 5.0


def run(*, seconds: float = 2 * _HOUR_SECONDS) -> Iterator[Figure]:
    """Yield the error of the worst tenant's bill, and the speed at which the month was played."""
    # Bills cover whole hours.
    hours = max(1, round(seconds / _HOUR_SECONDS))
    with TemporaryDirectory() as folder:
        month = Month(
            store=Path(folder) / "store",
            day_seconds=hours * _HOUR_SECONDS // DAYS,
            sampling_interval_seconds=_TICK_SECONDS,
        )
        began = time.process_time()
        truth = asyncio.run(month.play(before_late=lambda: None))
        spent = time.process_time() - began
        errors = _errors(month, truth)
    yield Figure(name="month_bill_error_max_ratio", value=max(errors.values()), unit="ratio")
    yield Figure(
        name="month_played_seconds",
        value=hours * _HOUR_SECONDS / spent,
        unit="played seconds/s/core",
    )


def _errors(month: Month, truth: dict[str, TenantTruth]) -> dict[str, float]:
    bill = month.bill()
    if bill.line_cost != bill.asset_cost:
        raise AssertionError("the bill does not add up")
    billed = {line.values[0]: float(line.cost) for line in bill.lines if not line.idle_kind}
    return {name: abs(billed.get(name, 0.0) / owed(name, one) - 1) for name, one in truth.items()}
