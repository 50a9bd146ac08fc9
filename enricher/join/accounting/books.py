"""Books one tick: for each GPU the entries that sum to it.

Here the split quantities become entries, and idle becomes what is left. Names and labels of pods
are the description's business (`describe`), not the books'.
"""

from collections.abc import Sequence
from typing import Final

from enricher.join.accounting.claims import Claim, gather_claims
from enricher.join.accounting.energy import Drawn, split_joules
from enricher.join.accounting.holders import Parts, find_holders
from enricher.join.accounting.idle import idle_entries
from enricher.join.accounting.instance_energy import drawn_by_rows
from enricher.join.accounting.instances import own_readings
from enricher.join.accounting.shares import split_busy, split_memory
from gpuledger.activity import counters_of
from gpuledger.records import Account, Entry, GpuBooks, GpuReading, Method, NodeSample
from gpuledger.twins import twin_of

# Built for each account of each tick: the twins are what makes that cheap.
_Entry: Final = twin_of(Entry)
_GpuBooks: Final = twin_of(GpuBooks)
_Column = list[float] | list[None]
_HOST: Final = Account.HOST
_EXCLUSIVE: Final = Method.EXCLUSIVE
# The lines of each column below the claims': what the driver reserved, what nobody claims, and,
# last and of no claim, what nobody used.
_BELOW: Final = (Claim(Account.HOST), Claim(Account.UNATTRIBUTED))
_LINES_BELOW: Final = 3


def book_tick(sample: NodeSample) -> list[GpuBooks]:
    """Give the books of each GPU of the tick, in the tick's order.

    Raises `IndexError` where a process points to a GPU or a container that the tick has not.
    """
    seconds = sample.interval_ns / 1e9
    claims = gather_claims(sample)
    own = own_readings(sample.gpus, claims)
    energy = drawn_by_rows(sample.gpus, seconds)
    holders = find_holders(sample)
    return [
        _GpuBooks(
            reading=reading,
            entries=book_gpu(its_own, on_it, seconds, drawn=its_energy, holders=held_by),
        )
        for reading, its_own, its_energy, on_it, held_by in zip(
            sample.gpus, own, energy, claims, holders, strict=True
        )
    ]


def book_gpu(
    reading: GpuReading,
    claims: list[Claim],
    seconds: float,
    *,
    drawn: Drawn | None,
    holders: Parts = (),
) -> list[Entry]:
    """Give the entries of one GPU: one a claim, the host, what nobody claims, and idle.

    Busy seconds sum to `seconds`, memory byte-seconds to total memory times `seconds`, joules to
    the energy drawn; a quantity that the driver does not give is absent from all entries. Idle has
    an entry for each container that holds a part of the GPU, and one for what nobody holds.
    """
    busy, worked, method = _busy_column(reading, claims, seconds)
    memory = _memory_column(reading, claims, seconds)
    joules = split_joules(drawn, busy, worked, seconds)
    entries = [
        _Entry(
            account=claim.account,
            container=claim.container,
            busy_seconds=time,
            memory_byte_seconds=size,
            joules=energy,
            method=method,
        )
        for claim, time, size, energy in zip([*claims, *_BELOW], busy, memory, joules, strict=False)
    ]
    if not (busy[-2] or memory[-2] or joules[-2] or _is_nobodys(reading, busy)):
        entries.pop()
    if not memory[-3]:
        del entries[len(claims)]
    entries += idle_entries((busy[-1], memory[-1], joules[-1]), holders, method)
    return entries


def _is_nobodys(reading: GpuReading, busy: _Column) -> bool:
    """Tell whether the chip was active and nobody was seen to be busy."""
    return not any(busy[:-1]) and any(counters_of(reading))


def _busy_column(
    reading: GpuReading, claims: Sequence[Claim], seconds: float
) -> tuple[_Column, float, Method]:
    """Give the column, the sum of all that was busy, and how it was split."""
    split = split_busy(reading.utilization_ratio, claims, seconds)
    if split is None:
        return _nothing(claims), 0.0, _EXCLUSIVE
    shares, unclaimed, worked, method = split
    return [*shares, 0.0, unclaimed, seconds - worked], worked, method


def _memory_column(reading: GpuReading, claims: Sequence[Claim], seconds: float) -> _Column:
    """Book what processes hold on them, and what the driver reserved on the host."""
    total = reading.memory_total_bytes
    if total is None:
        return _nothing(claims)
    reserved = min(reading.memory_reserved_bytes or 0, total)
    column = split_memory(reading.memory_used_bytes, claims, seconds, total - reserved)
    if reserved:
        column[_place_of_host(claims)] += reserved * seconds
    return column


def _place_of_host(claims: Sequence[Claim]) -> int:
    """Give the host's line: its claim's, or the one for what the driver reserved."""
    for place, claim in enumerate(claims):
        if claim.account is _HOST:
            return place
    return -3


def _nothing(claims: Sequence[Claim]) -> list[None]:
    return [None] * (len(claims) + _LINES_BELOW)
