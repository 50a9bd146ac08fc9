"""Books one tick: for each GPU the entries that sum to it.

Here the split quantities become entries, and idle becomes what is left. Names and labels of pods
are the description's business (`describe`), not the books'.
"""

from typing import Final

from enricher.join.booking.claims import Claim, gather_claims
from enricher.join.booking.energy import Drawn, JoulesSplit, split_joules
from enricher.join.booking.holders import Parts, find_holders
from enricher.join.booking.idle import idle_entries
from enricher.join.booking.instance_energy import drawn_by_rows
from enricher.join.booking.instances import exclusive_readings
from enricher.join.booking.shares import BusySplit, MemorySplit, split_busy, split_memory
from gpuledger.activity import counters_of
from gpuledger.records import Account, Entry, GpuBooks, GpuReading, Method, NodeSample

_Splits = tuple[BusySplit | None, MemorySplit | None, JoulesSplit | None]
_HOST: Final = Account.HOST
_UNATTRIBUTED: Final = Account.UNATTRIBUTED
# Where a quantity is not known, and nothing of it is booked.
_NO_BUSY: Final[BusySplit] = ((), 0.0, 0.0, 0.0, Method.EXCLUSIVE)
_NO_MEMORY: Final[MemorySplit] = ((), 0.0, 0.0, 0.0)
_NO_JOULES: Final[JoulesSplit] = (0.0, 0.0, 0.0)


def book_tick(sample: NodeSample) -> list[GpuBooks]:
    """Return the books of each GPU of the tick, in the tick's order.

    Raises `IndexError` where a process points to a GPU or a container that the tick has not.
    """
    seconds = sample.interval_ns / 1e9
    claims = gather_claims(sample)
    own = exclusive_readings(sample.gpus, claims)
    energy = drawn_by_rows(sample.gpus, seconds)
    holders = find_holders(sample)
    return [
        GpuBooks(
            reading=reading,
            entries=book_gpu(own[place], claims[place], seconds, energy[place], holders[place]),
        )
        for place, reading in enumerate(sample.gpus)
    ]


def book_gpu(
    reading: GpuReading,
    claims: list[Claim],
    seconds: float,
    drawn: Drawn | None,
    holders: Parts = (),
) -> list[Entry]:
    """Return the entries of one GPU: one a claim, the host, what nobody claims, and idle.

    Busy seconds sum to `seconds`, memory byte-seconds to total memory times `seconds`, joules to
    the energy drawn; a quantity that the driver does not give is absent from all entries. Idle has
    an entry for each container that holds a part of the GPU, and one for what nobody holds.
    """
    busy = split_busy(reading.utilization_ratio, claims, seconds)
    _, _, _, worked, method = busy or _NO_BUSY
    reserved = min(reading.memory_reserved_bytes or 0, reading.memory_total_bytes or 0)
    memory = _split_memory(reading, claims, seconds, reserved)
    _, _, _, free = memory or _NO_MEMORY
    joules = split_joules(drawn, worked if busy else None, seconds)
    _, _, of_idle = joules or _NO_JOULES
    splits = busy, memory, joules
    entries = _book_claims(claims, splits, reserved * seconds)
    _book_nobody(entries, claims, splits, reading)
    idle = (
        seconds - worked if busy else None,
        free if memory else None,
        of_idle if joules else None,
    )
    entries += idle_entries(idle, holders, method)
    return entries


def _split_memory(
    reading: GpuReading, claims: list[Claim], seconds: float, reserved: int
) -> MemorySplit | None:
    total = reading.memory_total_bytes
    if total is None:
        return None
    return split_memory(reading.memory_used_bytes, claims, seconds, total - reserved)


def _book_claims(claims: list[Claim], splits: _Splits, reserved: float) -> list[Entry]:
    """Book what is claimed; what the driver reserved, in byte-seconds, is the host's."""
    busy, memory, joules = splits
    weights, rate, of_ended, _, method = busy or _NO_BUSY
    sizes, seconds, _, _ = memory or _NO_MEMORY
    watts, _, _ = joules or _NO_JOULES
    time, size = 0.0, 0.0
    entries = []
    for place, claim in enumerate(claims):
        if busy is not None:
            time = weights[place] * rate
            if claim.has_ended:
                time += of_ended
        if memory is not None:
            size = sizes[place] * seconds
        if claim.account is _HOST:
            size, reserved = size + reserved, 0.0
        entries.append(
            Entry(
                account=claim.account,
                method=method,
                container=claim.container,
                busy_seconds=None if busy is None else time,
                memory_byte_seconds=None if memory is None else size,
                joules=None if joules is None else time * watts,
            )
        )
    if reserved:
        entries.append(
            Entry(
                account=_HOST,
                method=method,
                busy_seconds=None if busy is None else 0.0,
                memory_byte_seconds=reserved,
                joules=None if joules is None else 0.0,
            )
        )
    return entries


def _book_nobody(
    entries: list[Entry], claims: list[Claim], splits: _Splits, reading: GpuReading
) -> None:
    """Book what nobody claims; activity during which nobody was seen to be busy is nobody's too."""
    busy, memory, joules = splits
    _, _, _, worked, method = busy or _NO_BUSY
    watts, drawn, _ = joules or _NO_JOULES
    _, _, size, _ = memory or _NO_MEMORY
    time = 0.0 if claims else worked
    energy = time * watts + drawn
    if time or size or energy or (not worked and any(counters_of(reading))):
        entries.append(
            Entry(
                account=_UNATTRIBUTED,
                method=method,
                busy_seconds=None if busy is None else time,
                memory_byte_seconds=None if memory is None else size,
                joules=None if joules is None else energy,
            )
        )
