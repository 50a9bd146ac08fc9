"""Sums of events by minute: the rows of the table `usage`. Pure, and on the sink's hot path.

`MinuteSums` adds up events and has a row for each minute, device, category, and user or allocatee.
A tick that spans several minutes is divided by time. The part of a minute is the amount up to the
minute's end minus the amount up to its beginning, each rounded down. The parts therefore sum
exactly to the tick's amount, even if it is negative as in late adjustments, and no floats are
needed.

An event is counted completely or not at all, because it is validated before any sum changes. The
number of rows of an event is limited, because an event may claim an interval of any length.

Compiled (ADR 019), because an event has about thirty entries.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from gpuledger.clock import NS_PER_DAY, NS_PER_MINUTE
from gpuledger.ledger.entries import RecordPosition, energy_method_of, gpu_of, slices_of
from gpuledger.ledger.quantities import UNKNOWN, apportion, rates_of
from gpuledger.records import (
    BusyMethod,
    Category,
    EnergyMethod,
    Entry,
    GpuBooks,
    GpuEvent,
    LateAdjustment,
    MemoryMethod,
    PodState,
)
from gpuledger.records.base import OpenEnum

# Plain strings instead of enum members, because the enum class is written in Python and hashes
# slowly.
MEASURED_BUSY: Final = frozenset(
    each.value
    for each in (BusyMethod.EXCLUSIVE, BusyMethod.PROCESS_UTILIZATION, BusyMethod.ACCOUNTING)
)
"""The methods that measure busy time per category; other methods apportion it."""
MEASURED_MEMORY: Final = frozenset(
    each.value for each in (MemoryMethod.MEASURED, MemoryMethod.UNIFIED)
)
MEASURED_ENERGY: Final = frozenset({EnergyMethod.COUNTER.value})
MAX_EVENT_ROWS: Final = 200_000
"""Maximum number of rows of one event: eight GPUs with forty usage records each, for ten hours."""
MINUTES_A_DAY: Final = 1440
_US_PER_MINUTE: Final = 60_000_000
_INT64_MAX: Final = 2**63 - 1
_DIGITS_MAX: Final = 10**38 - 1
_BYTE_TIMES: Final = (2, 3)
_JOB: Final = Category.JOB.value
_IDLE: Final = Category.IDLE.value
Row = tuple[Any, ...]
Part = tuple[int, int, int]
"""A minute, counted from 1970, and the begin and end of its part of the interval, in nanoseconds
from the interval's begin."""


class TooManyRowsError(ValueError):
    """An event has more rows than allowed."""


def minute_parts(end_ns: int, interval_ns: int) -> list[Part]:
    """Return the minutes of an interval in order, each with its part of the interval.

    An interval of length 0 belongs to the minute that contains it.
    """
    first, last = minutes_between(end_ns, interval_ns)
    if first == last:
        return [(first, 0, interval_ns)]
    begin_ns = end_ns - interval_ns
    parts = []
    for minute in range(first, last + 1):
        from_ns = max(0, minute * NS_PER_MINUTE - begin_ns)
        parts.append((minute, from_ns, min(interval_ns, (minute + 1) * NS_PER_MINUTE - begin_ns)))
    return parts


def minutes_between(end_ns: int, interval_ns: int) -> tuple[int, int]:
    """Return the first and the last minute of an interval, counted from 1970."""
    first = (end_ns - interval_ns) // NS_PER_MINUTE
    # An interval that ends exactly at the end of a minute does not include the next minute.
    return first, max(first, (end_ns - 1) // NS_PER_MINUTE)


class Sums:
    """The sums of a row; a quantity that no entry had is `None`."""

    __slots__ = (
        "allocated_ns",
        "busy_ns",
        "dram_active_ns",
        "energy_millijoules",
        "first_offset",
        "ingested_time_ns",
        "last_offset",
        "measured_busy_ns",
        "measured_energy_millijoules",
        "measured_memory_byte_ns",
        "memory_byte_ns",
        "sample_count",
        "scaled_allocated_ns",
        "sm_active_ns",
        "tensor_active_ns",
        "unresponsive_ns",
    )

    def __init__(self, offset: int) -> None:
        self.busy_ns: int | None = None
        self.measured_busy_ns = 0
        self.memory_byte_ns: int | None = None
        self.measured_memory_byte_ns = 0
        self.energy_millijoules: int | None = None
        self.measured_energy_millijoules = 0
        self.allocated_ns: int | None = None
        self.unresponsive_ns = self.scaled_allocated_ns = 0
        self.sm_active_ns: int | None = None
        self.tensor_active_ns: int | None = None
        self.dram_active_ns: int | None = None
        self.sample_count = 0
        self.first_offset = self.last_offset = offset
        self.ingested_time_ns = 0

    def add(
        self,
        booking: "Booking",
        busy_ns: int | None,
        memory_byte_ns: int | None,
        energy_millijoules: int | None,
        allocated_ns: int | None,
    ) -> None:
        """Add the amounts of one entry; `booking` shows which of them were measured."""
        if busy_ns is not None:
            self.busy_ns = plus(self.busy_ns, busy_ns)
            if booking.measures_busy:
                self.measured_busy_ns += busy_ns
        if memory_byte_ns is not None:
            self.memory_byte_ns = plus(self.memory_byte_ns, memory_byte_ns)
            if booking.measures_memory:
                self.measured_memory_byte_ns += memory_byte_ns
        if energy_millijoules is not None:
            self.energy_millijoules = plus(self.energy_millijoules, energy_millijoules)
            if booking.measures_energy:
                self.measured_energy_millijoules += energy_millijoules
        if allocated_ns is not None:
            self.allocated_ns = plus(self.allocated_ns, allocated_ns)
            if booking.is_unresponsive:
                self.unresponsive_ns += allocated_ns
            if booking.is_scaled:
                self.scaled_allocated_ns += allocated_ns

    def add_active(self, amounts: Sequence[int | None]) -> None:
        """Add an entry's amounts from hardware counters, in the order of `APPORTIONED`."""
        sm_active_ns, tensor_active_ns, dram_active_ns = amounts
        if sm_active_ns is not None:
            self.sm_active_ns = plus(self.sm_active_ns, sm_active_ns)
        if tensor_active_ns is not None:
            self.tensor_active_ns = plus(self.tensor_active_ns, tensor_active_ns)
        if dram_active_ns is not None:
            self.dram_active_ns = plus(self.dram_active_ns, dram_active_ns)


def plus(former: int | None, amount: int) -> int:
    """Return a sum increased by an amount; `None` means no amount yet."""
    return amount if former is None else former + amount


class EventOwners:
    """The owners of an event's entries, in the form used in a row's key."""

    __slots__ = ("_allocatees", "_event", "_users")

    def __init__(self, event: GpuEvent) -> None:
        self._event = event
        self._users: list[Any] = [None] * len(event.containers)
        self._allocatees: list[Any] = [None] * len(event.allocations)

    def of(self, entry: Entry) -> tuple[Any, ...]:
        """Return an entry's category, its pod with the container, its allocatee, and its job.

        Raises ValueError if the entry refers to a position that does not exist in the event.
        """
        user = allocatee = None
        position = entry.container
        if position is not None:
            if position >= len(self._users):
                raise _unlisted("container", position, len(self._users))
            user = self._users[position]
            if user is None:
                user = self._users[position] = self._user_at(position)
        position = entry.allocation
        if position is not None:
            if position >= len(self._allocatees):
                raise _unlisted("allocation", position, len(self._allocatees))
            allocatee = self._allocatees[position]
            if allocatee is None:
                allocatee = self._allocatees[position] = self._allocatee_at(position)
        elif entry.allocation_unknown and entry.job_id is None:
            allocatee = _ALLOCATION_UNKNOWN
        return (entry.category._value_, user, allocatee, entry.job_id)

    def _user_at(self, position: int) -> tuple[Any, ...]:
        container = self._event.containers[position]
        name = container.name
        # The id only if the name is unknown: after restarts, several ids have the same name.
        container_id = container.container_id if name is None else None
        if container.pod is None:
            return (None, None, None, None, name, container_id)
        pod = self._pod_at(container.pod)
        return (pod.uid, pod.state._value_, pod.namespace, pod.name, name, container_id)

    def _allocatee_at(self, position: int) -> tuple[Any, ...]:
        allocatee = self._event.allocations[position]
        pod = self._pod_at(allocatee.pod)
        # A pod on another node has no name here, and its container is hidden as well, because the
        # writer of the event is untrusted.
        container = None if pod.name is None else allocatee.container
        return (pod.state._value_, pod.uid, pod.namespace, pod.name, container)

    def _pod_at(self, position: int) -> Any:  # noqa: ANN401  # a record's fields, compiled
        if position >= len(self._event.pods):
            raise _unlisted("pod", position, len(self._event.pods))
        return self._event.pods[position]


def _unlisted(name: str, position: int, count: int) -> ValueError:
    return ValueError(f"{name}: position {position} is not one of the event's {count} {name}s")


class Booking:
    """The entries of a device over an interval, and their common properties."""

    __slots__ = (
        "active",
        "device",
        "end_ns",
        "entries",
        "interval_ns",
        "is_scaled",
        "is_tick",
        "is_unresponsive",
        "measures_busy",
        "measures_energy",
        "measures_memory",
        "owners",
    )

    def __init__(
        self, books: GpuBooks, entries: Sequence[Entry], *, end_ns: int, interval_ns: int
    ) -> None:
        reading = books.reading
        self.device: tuple[Any, ...] = (
            reading.uuid,
            reading.index,
            reading.model,
            reading.parent_uuid,
            reading.mig_profile,
            *slices_of(books),
        )
        self.entries = entries
        self.owners: list[Any] = []
        """The owner of each entry."""
        self.active: Sequence[Any] = ()
        """Each entry's amounts from the GPU's hardware counters; empty if there are none."""
        self.end_ns, self.interval_ns = end_ns, interval_ns
        self.is_tick = self.is_unresponsive = self.is_scaled = False
        self.measures_busy = self.measures_memory = self.measures_energy = False


def bookings_of(event: GpuEvent) -> list[Booking]:
    """Return an event's bookings: one for each device of the tick and for each late adjustment.

    Raises ValueError if an entry or a late adjustment refers to an object that the event does not
    list, and TooManyRowsError if the event has more than `MAX_EVENT_ROWS` rows.
    """
    found = [_of_tick(books, event) for books in event.gpus]
    found += [_of_late_adjustment(adjustment, event) for adjustment in event.late_adjustments or ()]
    owners = EventOwners(event)
    # Counted before any part is made, because an interval may claim to last for decades.
    row_count = 0
    for booking in found:
        booking.owners = [owners.of(entry) for entry in booking.entries]
        first, last = minutes_between(booking.end_ns, booking.interval_ns)
        row_count += len(booking.owners) * (last - first + 1)
        if row_count > MAX_EVENT_ROWS:
            raise TooManyRowsError(f"event has more than {MAX_EVENT_ROWS} rows of the table usage")
    return found


def _of_tick(books: GpuBooks, event: GpuEvent) -> Booking:
    booking = Booking(books, books.entries, end_ns=event.time_ns, interval_ns=event.interval_ns)
    booking.is_tick, booking.is_unresponsive = True, books.gap_ns is not None
    booking.is_scaled = books.allocated_method is not None
    booking.measures_busy = is_one_of(books.busy_method, MEASURED_BUSY)
    booking.measures_memory = is_one_of(books.memory_method, MEASURED_MEMORY)
    booking.measures_energy = is_one_of(energy_method_of(books), MEASURED_ENERGY)
    if any(rate is not None for rate in rates_of(books.reading)):
        booking.active = apportion(books, event.interval_ns)
    return booking


def _of_late_adjustment(adjustment: LateAdjustment, event: GpuEvent) -> Booking:
    # The end may come from an untrusted writer.
    interval_ns = max(0, adjustment.until_time_ns - adjustment.from_time_ns)
    booking = Booking(
        gpu_of(adjustment, event),
        adjustment.entries,
        end_ns=adjustment.until_time_ns,
        interval_ns=interval_ns,
    )
    booking.measures_busy = is_one_of(adjustment.busy_method, MEASURED_BUSY)
    return booking


def is_one_of(method: OpenEnum | None, measured: frozenset[str]) -> bool:
    """Return whether a method is present and in `measured`."""
    return method is not None and method._value_ in measured


def bookings_days(bookings: Sequence[Booking]) -> set[int]:
    """Return the first and the last day of an event's rows, counted from 1970."""
    if not bookings:
        return set()
    first_ns = min([booking.end_ns - booking.interval_ns for booking in bookings])
    last_ns = max([booking.end_ns for booking in bookings])
    # A tick that ends exactly at the end of a day does not include the next day.
    return {first_ns // NS_PER_DAY, max(first_ns, last_ns - 1) // NS_PER_DAY}


class MinuteSums:
    """The rows of the table `usage` for all events that were added."""

    def __init__(self) -> None:
        self._nodes: dict[Any, dict[int, dict[Any, dict[Any, Sums]]]] = {}
        """Nested mappings: by partition and node, then minute, device and owner."""
        self.row_count = 0
        """The number of rows."""
        self.minutes: set[int] = set()
        """The minutes with rows, counted from 1970."""

    def add(
        self,
        event: GpuEvent,
        bookings: Sequence[Booking],
        position: RecordPosition,
        *,
        ingested_time_ns: int,
    ) -> None:
        """Add an event's bookings, as returned by `bookings_of`."""
        offset = position.offset
        node = (position.partition, event.cluster, event.node)
        by_minute = self._nodes.get(node)
        if by_minute is None:
            by_minute = self._nodes[node] = {}
        for booking in bookings:
            # Nearly always one part, because a tick lasts only seconds.
            parts = minute_parts(booking.end_ns, booking.interval_ns)
            # A tick is counted only in the minute in which it ends.
            last = parts[-1]
            for part in parts:
                rows = self._rows_of(by_minute, part[0], booking.device)
                sample_count = 1 if booking.is_tick and part is last else 0
                for index, entry in enumerate(booking.entries):
                    owner = booking.owners[index]
                    # Most ticks of a minute find their row, and only add to it.
                    sums = rows.get(owner)
                    if sums is None:
                        sums = rows[owner] = Sums(offset)
                        self.row_count += 1
                    # Offsets ascend as a partition is read, except for redelivered events.
                    sums.first_offset = min(sums.first_offset, offset)
                    sums.last_offset = max(sums.last_offset, offset)
                    sums.ingested_time_ns = ingested_time_ns
                    sums.sample_count += sample_count
                    add_part(sums, booking, index, entry, part)

    def _rows_of(
        self,
        by_minute: dict[int, dict[Any, dict[Any, Sums]]],
        minute: int,
        device: tuple[Any, ...],
    ) -> dict[Any, Sums]:
        by_device = by_minute.get(minute)
        if by_device is None:
            by_device = by_minute[minute] = {}
            self.minutes.add(minute)
        rows = by_device.get(device)
        if rows is None:
            rows = by_device[device] = {}
        return rows

    def rows(self) -> Iterator[Row]:
        """Yield the rows, with values in the order of the table's columns."""
        for (partition, cluster, node), by_minute in self._nodes.items():
            for minute, by_device in by_minute.items():
                for device, rows in by_device.items():
                    key = (minute // MINUTES_A_DAY, cluster, node, minute * _US_PER_MINUTE, *device)
                    for owner, sums in rows.items():
                        yield from _rows_of(key, owner, sums, partition)


def add_part(sums: Sums, booking: Booking, index: int, entry: Entry, part: Part) -> None:
    """Add to a minute's row the share of an entry that belongs to this minute."""
    from_ns, to_ns, interval_ns = part[1], part[2], booking.interval_ns
    busy_ns, energy, allocated_ns = entry.busy_ns, entry.energy_millijoules, entry.allocated_ns
    active: Any = booking.active[index] if booking.active else UNKNOWN
    if to_ns - from_ns != interval_ns:
        busy_ns, energy, allocated_ns = [
            portion(amount, from_ns, to_ns, interval_ns)
            for amount in (busy_ns, energy, allocated_ns)
        ]
        if active is not UNKNOWN:
            active = [portion(amount, from_ns, to_ns, interval_ns) for amount in active]
    # Memory is constant over the interval, so its part is exact.
    memory = entry.memory_bytes
    memory_byte_ns = None if memory is None else memory * (to_ns - from_ns)
    sums.add(booking, busy_ns, memory_byte_ns, energy, allocated_ns)
    if active is not UNKNOWN:
        sums.add_active(active)


def portion(amount: int | None, from_ns: int, to_ns: int, interval_ns: int) -> int | None:
    """Return the share of an amount for the part of an interval from `from_ns` to `to_ns`.

    Rounded as described in the module docstring; `None` if the amount is `None`.
    """
    if amount is None:
        return None
    return amount * to_ns // interval_ns - amount * from_ns // interval_ns


_NO_USER: Final = (None,) * 6
_NOT_ALLOCATED: Final = (None,) * 5
_ALLOCATION_UNKNOWN: Final = (PodState.UNKNOWN.value, None, None, None, None)


def _rows_of(key: tuple[Any, ...], owner: Any, sums: Sums, partition: int) -> list[Row]:  # noqa: ANN401  # a key of `MinuteSums`
    category, user, allocatee, job_id = owner
    owner_columns = (
        category,
        *(user or _NO_USER),
        job_id if category == _JOB else None,
        *(allocatee or _NOT_ALLOCATED),
        job_id if category == _IDLE and allocatee is None else None,
    )
    busy_ns, energy, allocated_ns = sums.busy_ns, sums.energy_millijoules, sums.allocated_ns
    amounts = (
        busy_ns,
        None if busy_ns is None else sums.measured_busy_ns,
        sums.memory_byte_ns,
        None if sums.memory_byte_ns is None else sums.measured_memory_byte_ns,
        energy,
        None if energy is None else sums.measured_energy_millijoules,
        allocated_ns,
        None if allocated_ns is None else sums.unresponsive_ns,
        None if allocated_ns is None else sums.scaled_allocated_ns,
        sums.sm_active_ns,
        sums.tensor_active_ns,
        sums.dram_active_ns,
        sums.sample_count,
    )
    read = (partition, sums.first_offset, sums.last_offset, sums.ingested_time_ns)
    return [(*key, *owner_columns, *stored, *read) for stored in _storable(amounts)]


def _storable(amounts: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return the sums as one row, or as several if a sum exceeds its column."""
    if not any(amount is not None and abs(amount) > _INT64_MAX for amount in amounts):
        return [amounts]
    found = []
    # Only invented amounts are this large. Each row gets as much as its columns can store.
    left = list(amounts)
    while any(left):
        taken = []
        for index, amount in enumerate(left):
            bound = _DIGITS_MAX if index in _BYTE_TIMES else _INT64_MAX
            taken.append(None if amount is None else max(-bound, min(bound, amount)))
        left = [
            None if amount is None else amount - part
            for amount, part in zip(left, taken, strict=True)
        ]
        found.append(tuple(taken))
    return found
