"""What a process used of a GPU over its life, from the driver's account of it. Pure."""

from typing import Final

from agent.nvml.answers import AccountedProcess, GpuAnswers
from agent.reading import plausibility
from agent.reading.plausibility import Sieve
from gpuledger.records import GpuTotals, bounds

_MS_PER_SECOND: Final = 1000
_NS_PER_US: Final = 1000
# Longer, and it was no length of time.
_LIVED_MS: Final = (0, bounds.MAX_SECONDS * _MS_PER_SECOND)


def read_accounts(answers: GpuAnswers, sieve: Sieve) -> list[tuple[int, GpuTotals]] | None:
    """Give what processes that are done with the GPU used, by pid."""
    if answers.accounted is None:
        return None
    return [(one.pid, total(answers.uuid, one, sieve)) for one in answers.accounted]


def total(gpu_uuid: str, account: AccountedProcess, sieve: Sieve) -> GpuTotals:
    """Give the totals of a process on a GPU, each where it can be true."""
    lived_ms = sieve.keep(account.lived_ms, _LIVED_MS, reading="accounted_time")
    lived_seconds = None if lived_ms is None else lived_ms / _MS_PER_SECOND
    return GpuTotals(
        gpu_uuid=gpu_uuid,
        busy_seconds=_part(lived_seconds, account.gpu_percent, sieve),
        memory_busy_seconds=_part(lived_seconds, account.memory_percent, sieve),
        max_memory_bytes=sieve.keep(
            account.max_memory_bytes, plausibility.MEMORY_BYTES, reading="accounted_memory"
        ),
        started_time_ns=account.started_us * _NS_PER_US
        if 0 < account.started_us < plausibility.TIMESTAMP_US[1] // _NS_PER_US
        else None,
        lived_seconds=lived_seconds,
    )


def _part(seconds: float | None, percent: float | None, sieve: Sieve) -> float | None:
    if seconds is None or percent is None:
        return None
    lowest, highest = plausibility.PERCENT
    if not lowest <= percent <= highest:
        sieve.drop("accounted_utilization", "out_of_range")
        return None
    return seconds * percent / 100
