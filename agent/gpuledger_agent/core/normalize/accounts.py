"""Validates the driver's accounting entries of processes that have closed a GPU."""

from typing import Final

from gpuledger.clock import NS_PER_MS, NS_PER_US
from gpuledger.records import GpuTotals, bounds
from gpuledger_agent.core.raw import ProcessAccounting, RawGpuSample
from gpuledger_agent.core.readings import MEMORY_LIMITS, PERCENT, TIMESTAMP_US, Validator

# A longer time cannot be a lifetime.
_LIFETIME_MS: Final = (0, bounds.MAX_DURATION_NS // NS_PER_MS)
# Accounting entries contain percentages with four decimal places.
_PARTS_PER_PERCENT: Final = 10_000


def read_accounts(raw: RawGpuSample, validator: Validator) -> list[tuple[int, GpuTotals]] | None:
    """Return the accounting entries of processes that have closed the GPU, each with its pid.

    Invalid values are left out. Return `None` if the driver keeps no accounting entries.
    """
    if raw.process_stats is None:
        return None
    return [(account.pid, _totals(raw.uuid, account, validator)) for account in raw.process_stats]


def _totals(gpu_uuid: str, account: ProcessAccounting, validator: Validator) -> GpuTotals:
    lifetime_ms = validator.keep(account.lived_ms, _LIFETIME_MS, reading="accounted_time")
    lifetime_ns = None if lifetime_ms is None else lifetime_ms * NS_PER_MS

    def part(percent: float | None) -> int | None:
        if lifetime_ns is None or percent is None:
            return None
        lowest, highest = PERCENT
        if not lowest <= percent <= highest:
            validator.drop("accounted_utilization", "out_of_range")
            return None
        return lifetime_ns * round(percent * _PARTS_PER_PERCENT) // (highest * _PARTS_PER_PERCENT)

    return GpuTotals(
        gpu_uuid=gpu_uuid,
        busy_ns=part(account.gpu_percent),
        memory_busy_ns=part(account.memory_percent),
        max_memory_bytes=validator.keep(
            account.max_memory_bytes, MEMORY_LIMITS, reading="accounted_memory"
        ),
        started_time_ns=account.started_us * NS_PER_US
        if 0 < account.started_us < TIMESTAMP_US[1] // NS_PER_US
        else None,
        lifetime_ns=lifetime_ns,
    )
