"""Books one tick: for each GPU the entries that sum to it.

Here the split quantities become entries, and idle becomes what is left. Names and labels of pods
are the description's business (`describe`), not the books'.
"""

from collections.abc import Sequence
from typing import Final

from enricher.join.claims import Claim, gather_claims
from enricher.join.instances import own_readings
from enricher.join.shares import split_busy, split_memory
from gpuledger.records import Account, Entry, GpuBooks, GpuReading, Method, NodeSample
from gpuledger.twins import twin_of

# Built for each account of each tick: the twins are what makes that cheap.
_Entry: Final = twin_of(Entry)
_GpuBooks: Final = twin_of(GpuBooks)
_Column = list[float] | list[None]
_HOST: Final = Account.HOST
# The lines below the claims: what the driver reserved, what nobody claims, what nobody used.
_BELOW: Final = ((-3, Account.HOST), (-2, Account.UNATTRIBUTED), (-1, Account.IDLE))


def book_tick(sample: NodeSample) -> list[GpuBooks]:
    """Give the books of each GPU of the tick, in the tick's order.

    Raises `IndexError` where a process points to a GPU or a container that the tick has not.
    """
    seconds = sample.interval_ns / 1e9
    claims = gather_claims(sample)
    own = own_readings(sample.gpus, claims)
    return [
        _GpuBooks(reading=reading, entries=book_gpu(its_own, on_it, seconds))
        for reading, its_own, on_it in zip(sample.gpus, own, claims, strict=True)
    ]


def book_gpu(reading: GpuReading, claims: list[Claim], seconds: float) -> list[Entry]:
    """Give the entries of one GPU: one a claim, the host, what nobody claims, and idle.

    Busy seconds sum to `seconds`, memory byte-seconds to total memory times `seconds`, joules to
    the energy drawn; a quantity that the driver does not give is absent from all entries.
    """
    busy, method = _busy_column(reading, claims, seconds)
    memory = _memory_column(reading, claims, seconds)
    joules = _joules_column(reading, busy, seconds)
    entries = [
        _Entry(
            account=claim.account,
            pod_uid=claim.pod_uid,
            container_id=claim.container_id,
            busy_seconds=time,
            memory_byte_seconds=size,
            joules=energy,
            method=method,
        )
        for claim, time, size, energy in zip(claims, busy, memory, joules, strict=False)
    ]
    for place, account in _BELOW:
        time, size, energy = busy[place], memory[place], joules[place]
        if time or size or energy or account is Account.IDLE:
            entries.append(
                _Entry(
                    account=account,
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
    shares, unclaimed, method = split
    idle = max(0.0, seconds - sum(shares) - unclaimed)
    return [*shares, 0.0, unclaimed, idle], method


def _memory_column(reading: GpuReading, claims: Sequence[Claim], seconds: float) -> _Column:
    """Book what processes hold on them, and what the driver reserved on the host."""
    total = reading.memory_total_bytes
    if total is None:
        return _nothing(claims)
    reserved = min(reading.memory_reserved_bytes or 0, total)
    held, unclaimed = split_memory(
        reading.memory_used_bytes, claims, seconds, limit_bytes=total - reserved
    )
    free = max(0.0, (total - reserved) * seconds - sum(held) - unclaimed)
    column = [*held, 0.0, unclaimed, free]
    column[_place_of_host(claims)] += reserved * seconds
    return column


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
    """Give the host's line: its claim's, or the one for what the driver reserved."""
    for place, claim in enumerate(claims):
        if claim.account is _HOST:
            return place
    return -3


def _nothing(claims: Sequence[Claim]) -> list[None]:
    return [None] * (len(claims) + len(_BELOW))
