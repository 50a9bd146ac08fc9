"""Books one tick: for each GPU the entries that sum to it.

Here the split quantities become entries, and idle becomes what is left. Names and labels of pods
are the description's business (`describe`), not the books'.
"""

from collections.abc import Sequence
from typing import Final

from enricher.join.claims import Claim, gather_claims
from enricher.join.shares import split_busy, split_memory
from gpuledger.records import Account, Entry, GpuBooks, GpuReading, Method, NodeSample
from gpuledger.twins import twin_of

# Built for each account of each tick: the twins are what makes that cheap.
_Entry: Final = twin_of(Entry)
_GpuBooks: Final = twin_of(GpuBooks)
_Column = list[float] | list[None]
# The lines below the claims: what the driver reserved, what nobody claims, what nobody used.
_BELOW: Final = (Claim(Account.HOST), Claim(Account.UNATTRIBUTED), Claim(Account.IDLE))


def book_tick(sample: NodeSample) -> list[GpuBooks]:
    """Give the books of each GPU of the tick, in the tick's order.

    Raises `IndexError` where a process points to a GPU or a container that the tick has not.
    """
    seconds = sample.interval_ns / 1e9
    return [
        _GpuBooks(reading=reading, entries=book_gpu(reading, claims, seconds))
        for reading, claims in zip(sample.gpus, gather_claims(sample), strict=True)
    ]


def book_gpu(reading: GpuReading, claims: list[Claim], seconds: float) -> list[Entry]:
    """Give the entries of one GPU: one a claim, the host, what nobody claims, and idle.

    Busy seconds sum to `seconds`, memory byte-seconds to total memory times `seconds`, joules to
    the energy drawn; a quantity that the driver does not give is absent from all entries.
    """
    busy, method = _busy_column(reading, claims, seconds)
    memory = _memory_column(reading, claims, seconds)
    joules = _joules_column(reading, busy, seconds)
    entries = []
    for place, line in enumerate((*claims, *_BELOW)):
        time, size, energy = busy[place], memory[place], joules[place]
        # Of the lines below the claims, idle is always told.
        if time or size or energy or place < len(claims) or line.account is Account.IDLE:
            entries.append(
                _Entry(
                    account=line.account,
                    pod_uid=line.pod_uid,
                    container_id=line.container_id,
                    busy_seconds=time,
                    memory_byte_seconds=size,
                    joules=energy,
                    method=method,
                )
            )
    return entries


def _busy_column(
    reading: GpuReading, claims: Sequence[Claim], seconds: float
) -> tuple[_Column, Method]:
    split = split_busy(reading.utilization_ratio, claims, seconds)
    if split is None:
        return _nothing(claims), Method.EXCLUSIVE
    used = [*split.shares, 0.0, split.unclaimed]
    return [*used, max(0.0, seconds - sum(used))], split.method


def _memory_column(reading: GpuReading, claims: Sequence[Claim], seconds: float) -> _Column:
    """Book what processes hold on them, and what the driver reserved on the host."""
    total = reading.memory_total_bytes
    if total is None:
        return _nothing(claims)
    reserved = min(reading.memory_reserved_bytes or 0, total)
    held, unclaimed = split_memory(
        reading.memory_used_bytes, claims, seconds, limit_bytes=total - reserved
    )
    used = [*held, 0.0, unclaimed]
    used[_place_of_host(claims)] += reserved * seconds
    return [*used, max(0.0, total * seconds - sum(used))]


def _joules_column(reading: GpuReading, busy: _Column, seconds: float) -> _Column:
    """Follow the busy seconds; where those are not known, nobody can be named."""
    joules = reading.energy_joules
    if joules is None and reading.power_watts is not None:
        joules = reading.power_watts * seconds
    if joules is None:
        return [None] * len(busy)
    if busy[-1] is None:
        return [*[0.0] * (len(busy) - 2), joules, 0.0]
    watts = joules / seconds
    return [watts * (time or 0.0) for time in busy]


def _place_of_host(claims: Sequence[Claim]) -> int:
    for place, claim in enumerate(claims):
        if claim.account is Account.HOST:
            return place
    return len(claims)


def _nothing(claims: Sequence[Claim]) -> list[None]:
    return [None] * (len(claims) + len(_BELOW))
