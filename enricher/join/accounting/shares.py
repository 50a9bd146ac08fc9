"""Splits one quantity of one GPU among the claims on it; what nobody claims is said apart.

Pure arithmetic over claims: no records, no names. Each function gives the shares in the order of
the claims, and together with `unclaimed` they never exceed what was to be split.
"""

from collections.abc import Sequence
from typing import Final

from enricher.join.accounting.claims import Claim
from gpuledger.records import Method

# Less than any driver can tell apart from nothing, and enough to divide by.
_LEAST_RATIO: Final = 1e-9
_EXCLUSIVE: Final = Method.EXCLUSIVE
_PROCESS_UTILIZATION: Final = Method.PROCESS_UTILIZATION


# Busy time, split: what each claim gets, in the claims' order; what was used and nobody claims; the
# sum of both; how the shares were found. A bare tuple, because one is made for each GPU and tick.
Split = tuple[list[float], float, float, Method]


def split_busy(
    utilization_ratio: float | None, claims: Sequence[Claim], seconds: float
) -> Split | None:
    """Split the time in which kernels ran; `None` where the driver said nothing of it."""
    ratio = utilization_ratio
    if ratio is None:
        if _are_unmeasured(claims):
            return None
        ratio = sum([claim.sm_ratio or 0.0 for claim in claims])
    busy_seconds = ratio * seconds if ratio < 1.0 else seconds
    if len(claims) > 1:
        return _split_among(busy_seconds, claims, seconds)
    if claims:
        return [busy_seconds], 0.0, busy_seconds, _EXCLUSIVE
    return [], busy_seconds, busy_seconds, _EXCLUSIVE


def _are_unmeasured(claims: Sequence[Claim]) -> bool:
    return all(claim.sm_ratio is None for claim in claims)


def _split_among(busy_seconds: float, claims: Sequence[Claim], seconds: float) -> Split:
    """Follow the processes' own utilization.

    The driver's process samples end with the process, so the kernels of the last moments of a
    process that ended show on the device only: what is missing is its. Otherwise the difference
    is rounding (whole percents on both sides), and spread in proportion.
    """
    ratios = [claim.sm_ratio or 0.0 for claim in claims]
    total = sum(ratios)
    if total == 0.0 and _are_unmeasured(claims):
        return _split_by_memory(busy_seconds, claims)
    missing = busy_seconds - total * seconds
    if missing > 0.0 and (ended := [claim for claim in claims if claim.has_ended]):
        part = missing / len(ended)
        shares = [
            ratio * seconds + part if claim.has_ended else ratio * seconds
            for claim, ratio in zip(claims, ratios, strict=True)
        ]
    elif total > _LEAST_RATIO:
        scale = busy_seconds / total
        shares = [ratio * scale for ratio in ratios]
    elif busy_seconds > 0.0:
        return _split_by_memory(busy_seconds, claims)
    else:
        shares = [0.0] * len(claims)
    return shares, 0.0, busy_seconds, _PROCESS_UTILIZATION


def _split_by_memory(busy_seconds: float, claims: Sequence[Claim]) -> Split:
    """Without a measure of use, memory held is the next best; without that, equal parts."""
    held = [claim.memory_bytes or 0 for claim in claims]
    total = sum(held)
    if total:
        shares = [busy_seconds * part / total for part in held]
        return shares, 0.0, busy_seconds, Method.MEMORY_SHARE
    shares = [busy_seconds / len(claims)] * len(claims)
    return shares, 0.0, busy_seconds, Method.EQUAL_SHARE


def split_memory(
    used_bytes: int | None, claims: Sequence[Claim], seconds: float, limit_bytes: int
) -> list[float]:
    """Split byte-seconds: the claims', then none, those in use that nobody claims, and free ones.

    What the processes hold is theirs, scaled down where they claim more than is in use. The rest
    is nobody's, unless the driver tells no process's memory and there is only one claim. Never more
    than `limit_bytes`: readings taken one after the other need not agree.
    """
    held: list[float] = [claim.memory_bytes or 0 for claim in claims]
    total = sum(held)
    used: float = min(total if used_bytes is None else used_bytes, limit_bytes)
    free = (limit_bytes - used) * seconds
    if total > used:
        # The processes' parts of what is in use, times its seconds.
        scale = used * seconds / total
        return [*[part * scale for part in held], 0.0, 0.0, free]
    if len(claims) == 1 and claims[0].memory_bytes is None and not claims[0].has_ended:
        return [used * seconds, 0.0, 0.0, free]
    return [*[part * seconds for part in held], 0.0, (used - total) * seconds, free]
