"""Idle's entries: what nobody used of a GPU, by who holds it.

Who holds it is `holders`' business, how much is idle `books`'.
"""

from typing import Final

from enricher.join.booking.holders import Parts
from enricher.join.booking.shares import add_up
from gpuledger.records import Account, Entry, Method

_IDLE: Final = Account.IDLE
# What is left of a whole after all parts of it, by rounding alone.
_NOTHING_RATIO: Final = 1e-12

# Busy seconds, memory byte-seconds and joules; each absent where it is not known.
Quantities = tuple[float | None, float | None, float | None]


def idle_entries(idle: Quantities, holders: Parts, method: Method) -> list[Entry]:
    """Split idle by what each holds; what nobody holds has an entry without an allocation."""
    if not holders:
        return [_entry(idle, method)]
    if holders[0][1] == 1.0:
        return [_entry(idle, method, holders[0][0])]
    entries = [_entry(_part_of(idle, ratio), method, allocation) for allocation, ratio in holders]
    left = 1.0 - add_up([ratio for _, ratio in holders])
    if left > _NOTHING_RATIO:
        entries.append(_entry(_part_of(idle, left), method))
    return entries


def _part_of(idle: Quantities, ratio: float) -> Quantities:
    time, size, energy = idle
    return (
        None if time is None else time * ratio,
        None if size is None else size * ratio,
        None if energy is None else energy * ratio,
    )


def _entry(idle: Quantities, method: Method, allocation: int | None = None) -> Entry:
    time, size, energy = idle
    return Entry(
        account=_IDLE,
        busy_seconds=time,
        memory_byte_seconds=size,
        joules=energy,
        allocation=allocation,
        method=method,
    )
