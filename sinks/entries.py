"""What an event books, line by line: each entry with its time, its GPU, and whose it is.

Here lives the walk over an event, for sinks that write one row an entry; how a row looks is theirs.
Pure.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from gpuledger.activity import Activity, split_activity
from gpuledger.records import Entry, GpuEvent, GpuReading
from sinks.entry_owner import DeviceHolder, EntryOwner, EntryOwners, gpu_of, holder_of

# The chip's counters of the ticks that are settled were split by what was known then.
_NO_ACTIVITY: Final[Activity] = (None, None, None)


class BookedEntry(NamedTuple):
    """One entry, with all that the event says of it."""

    entry: Entry
    """The entry."""
    time_ns: int
    """End of the time that it is about, nanoseconds since the epoch."""
    interval_ns: int
    """Length of that time: the tick's, or of all ticks that are settled."""
    gpu: GpuReading
    """The GPU's readings in the event's tick."""
    debtor: EntryOwner
    """On whom it is booked."""
    holder: DeviceHolder | None
    """On idle: who held it unused."""
    active: Activity
    """How much of the chip worked, in seconds."""


def lines_of(event: GpuEvent) -> Iterator[BookedEntry]:
    """Yield the entries of each GPU of the event, then those of each settlement.

    Raises ValueError where an entry names a container or a holder that the event does not list, or
    a settlement a GPU.
    """
    debtors = EntryOwners(event)
    for entry, time_ns, interval_ns, gpu, active in _entries(event):
        holder = holder_of(entry, event)
        yield BookedEntry(entry, time_ns, interval_ns, gpu, debtors.of(entry), holder, active)


def _entries(event: GpuEvent) -> Iterator[tuple[Entry, int, int, GpuReading, Activity]]:
    for books in event.gpus:
        activities = split_activity(books, event.interval_ns / 1e9)
        for entry, active in zip(books.entries, activities, strict=True):
            yield entry, event.time_ns, event.interval_ns, books.reading, active
    for one in event.settlements or ():
        length_ns = max(0, one.until_time_ns - one.from_time_ns)
        for entry in one.entries:
            yield entry, one.until_time_ns, length_ns, gpu_of(one, event).reading, _NO_ACTIVITY
