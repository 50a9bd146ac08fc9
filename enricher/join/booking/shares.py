"""Splits one quantity of one GPU among the claims on it; what nobody claims is said apart.

Pure arithmetic over claims: no records, no names. A split is a rate: so much for each unit of what
a claim weighs. Together with what nobody claims the parts never exceed what was to be split.
"""

from collections.abc import Sequence
from typing import Final

from enricher.join.booking.claims import Claim
from gpuledger.records import Method

# Less than any driver can tell apart from nothing, and enough to divide by.
_MIN_RATIO: Final = 1e-9
_EXCLUSIVE: Final = Method.EXCLUSIVE
_PROCESS_UTILIZATION: Final = Method.PROCESS_UTILIZATION
_ONE: Final = (1.0,)

# Bare tuples, because two are made for each GPU and tick; weights are in the claims' order.
# Busy time: the weights; seconds for a unit of weight; seconds that a claim of which a process has
# ended gets besides; the sum of all that was busy, nobody's where there is no claim; the method.
BusySplit = tuple[Sequence[float], float, float, float, Method]
# Memory: the weights; seconds for a unit of weight; byte-seconds in use that nobody claims; free.
MemorySplit = tuple[Sequence[float], float, float, float]


def split_busy(
    utilization_ratio: float | None, claims: Sequence[Claim], seconds: float
) -> BusySplit | None:
    """Split the time in which kernels ran; `None` where the driver said nothing of it."""
    if utilization_ratio is not None:
        ratio = utilization_ratio
    elif _are_unmeasured(claims):
        return None
    else:
        ratio = add_up([claim.sm_ratio or 0.0 for claim in claims])
    busy_seconds = ratio * seconds if ratio < 1.0 else seconds
    if len(claims) > 1:
        return _split_among(busy_seconds, claims, seconds)
    return _ONE, busy_seconds, 0.0, busy_seconds, _EXCLUSIVE


def _are_unmeasured(claims: Sequence[Claim]) -> bool:
    return all(claim.sm_ratio is None for claim in claims)


def add_up(weights: Sequence[float]) -> float:
    """Sum as Python did before 3.12, whose sum() rounds less: all versions are to book the same."""
    total = 0.0
    for weight in weights:
        total += weight
    return total


def _split_among(busy_seconds: float, claims: Sequence[Claim], seconds: float) -> BusySplit:
    """Follow the processes' own utilization.

    The driver's process samples end with the process, so the kernels of the last moments of a
    process that ended show on the device only: what is missing is its. Otherwise the difference
    is rounding (whole percents on both sides), and spread in proportion.
    """
    ratios = [claim.sm_ratio or 0.0 for claim in claims]
    total = add_up(ratios)
    if total == 0.0 and _are_unmeasured(claims):
        return _split_by_memory(busy_seconds, claims)
    missing = busy_seconds - total * seconds
    if missing > 0.0 and (ended := [claim for claim in claims if claim.has_ended]):
        return ratios, seconds, missing / len(ended), busy_seconds, _PROCESS_UTILIZATION
    if total > _MIN_RATIO:
        return ratios, busy_seconds / total, 0.0, busy_seconds, _PROCESS_UTILIZATION
    if busy_seconds > 0.0:
        return _split_by_memory(busy_seconds, claims)
    return ratios, 0.0, 0.0, busy_seconds, _PROCESS_UTILIZATION


def _split_by_memory(busy_seconds: float, claims: Sequence[Claim]) -> BusySplit:
    """Without a measure of use, memory held is the next best; without that, equal parts."""
    held = [claim.memory_bytes or 0 for claim in claims]
    total = add_up(held)
    if total:
        return held, busy_seconds / total, 0.0, busy_seconds, Method.MEMORY_SHARE
    ones = _ONE * len(claims)
    return ones, busy_seconds / len(claims), 0.0, busy_seconds, Method.EQUAL_SHARE


def split_memory(
    used_bytes: int | None, claims: Sequence[Claim], seconds: float, limit_bytes: int
) -> MemorySplit:
    """Split the bytes in use, times the seconds.

    What the processes hold is theirs, scaled down where they claim more than is in use. The rest
    is nobody's, unless the driver tells no process's memory and there is only one claim. Never more
    than `limit_bytes`: readings taken one after the other need not agree.
    """
    held = [claim.memory_bytes or 0 for claim in claims]
    total = add_up(held)
    limit = float(limit_bytes)
    used = total if used_bytes is None else float(used_bytes)
    if used > limit:  # noqa: PLR1730 - min() costs three times as much, for each GPU and tick
        used = limit
    free = (limit - used) * seconds
    if total > used:
        # The processes' parts of what is in use, times its seconds.
        return held, used * seconds / total, 0.0, free
    if len(claims) == 1 and claims[0].memory_bytes is None and not claims[0].has_ended:
        return (used,), seconds, 0.0, free
    return held, seconds, (used - total) * seconds, free
