"""How much of the chip each account worked: the chip's counters are of a device as a whole.

Pure. A device's active seconds are apportioned by busy seconds: nothing is measured of a process,
and a busy second of one counts as much as one of another. It follows from what an event says, so no
event repeats it; whoever writes rows or series asks here.
"""

from collections.abc import Sequence
from typing import Final

from gpuledger.records import Account, Entry, GpuBooks, GpuReading

# Of multiprocessors, tensor pipes and memory interface, in seconds; each absent where not known.
Activity = tuple[float | None, float | None, float | None]
_UNKNOWN: Final[Activity] = (None, None, None)
_IDLE: Final = Account.IDLE


def split_activity(books: GpuBooks, seconds: float) -> list[Activity]:
    """Return the active seconds of each entry of a GPU in a tick of `seconds`, in their order.

    They sum to the device's ratios times `seconds`. Idle has none. Where nobody was busy, or that
    is not known, they are nobody's: on the unattributed entry, or the last one where there is none.
    """
    counters = counters_of(books.reading)
    if counters == _UNKNOWN or not books.entries:
        return [_UNKNOWN] * len(books.entries)
    rates = tuple(None if ratio is None else ratio * seconds for ratio in counters)
    return [
        _UNKNOWN if weight is None else _times(weight, rates) for weight in _weights(books.entries)
    ]


def counters_of(reading: GpuReading) -> Activity:
    """Return the ratios that are a row's own: those of a cut GPU count its instances' once more."""
    if reading.mig_enabled:
        return _UNKNOWN
    return reading.sm_active_ratio, reading.tensor_active_ratio, reading.dram_active_ratio


def _weights(entries: Sequence[Entry]) -> list[float | None]:
    """Return each entry's part of what was busy; `None` on idle."""
    busy = [None if one.account is _IDLE else one.busy_seconds or 0.0 for one in entries]
    worked = sum(time for time in busy if time)
    if worked:
        return [None if time is None else time / worked for time in busy]
    busy[_place_of_nobody(entries)] = 1.0
    return busy


def _place_of_nobody(entries: Sequence[Entry]) -> int:
    for place, entry in enumerate(entries):
        if entry.account is Account.UNATTRIBUTED:
            return place
    return -1


def _times(weight: float, rates: Sequence[float | None]) -> Activity:
    sm, tensor, dram = (None if rate is None else weight * rate for rate in rates)
    return sm, tensor, dram
