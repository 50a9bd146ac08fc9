"""What a process used of a GPU over its life, from the driver's account of it. Pure."""

from typing import Final

from agent.core.raw import ProcessAccounting, RawGpuSample
from agent.normalize import validation
from agent.normalize.validation import Validator
from gpuledger.records import GpuTotals, bounds

_MS_PER_SECOND: Final = 1000
_NS_PER_US: Final = 1000
# Longer, and it was no length of time.
_LIVED_MS: Final = (0, bounds.MAX_SECONDS * _MS_PER_SECOND)


def read_accounts(answers: RawGpuSample, sieve: Validator) -> list[tuple[int, GpuTotals]] | None:
    """Return what processes that are done with the GPU used, by pid."""
    if answers.accounted is None:
        return None
    return [(one.pid, total(answers.uuid, one, sieve)) for one in answers.accounted]


def total(gpu_uuid: str, account: ProcessAccounting, sieve: Validator) -> GpuTotals:
    """Return the totals of a process on a GPU, each where it can be true."""
    lived_ms = sieve.keep(account.lived_ms, _LIVED_MS, reading="accounted_time")
    lifetime_seconds = None if lived_ms is None else lived_ms / _MS_PER_SECOND
    return GpuTotals(
        gpu_uuid=gpu_uuid,
        busy_seconds=_part(lifetime_seconds, account.gpu_percent, sieve),
        memory_busy_seconds=_part(lifetime_seconds, account.memory_percent, sieve),
        max_memory_bytes=sieve.keep(
            account.max_memory_bytes, validation.MEMORY_BYTES, reading="accounted_memory"
        ),
        started_time_ns=account.started_us * _NS_PER_US
        if 0 < account.started_us < validation.TIMESTAMP_US[1] // _NS_PER_US
        else None,
        lifetime_seconds=lifetime_seconds,
    )


def _part(seconds: float | None, percent: float | None, sieve: Validator) -> float | None:
    if seconds is None or percent is None:
        return None
    lowest, highest = validation.PERCENT
    if not lowest <= percent <= highest:
        sieve.drop("accounted_utilization", "out_of_range")
        return None
    return seconds * percent / 100
