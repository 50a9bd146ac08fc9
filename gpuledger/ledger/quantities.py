"""The quantities of the books: what each is, what its entries sum to, and how it is split.

One table, `QUANTITIES`. The columns of the flat row and of the store, the series of remote-write
and OTLP, and the check that books balance are made from it. To add a quantity is one row here and
its split:

- A quantity that only the device as a whole is measured for, as the chip's counters are, names the
  field of the reading that has it per second (`apportioned_from`). It is apportioned by busy
  seconds: nothing is measured of a process, and a busy second of one counts as much as one of
  another. This follows from what an event says, so no event repeats it; whoever writes rows or
  series calls `apportion`.
- Any other quantity is booked: a field of `Entry`, whose split stands in `enricher.join.booking`.

Nothing here knows a sink.

**Conservation**, the law that the join keeps: the books of a tick sum to what the devices read.

The entries of a device sum, for each quantity, to what the device read. Memory and energy are
measured of a board, so the entries of a GPU's row and of its MIG instances' rows count together;
time and the chip's counters are each row's own. Pure, and computed from the readings alone: nothing
here asks how the entries were made.
"""

from collections import namedtuple
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

from gpuledger.records import Account, Entry, GpuBooks, GpuReading


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One quantity of the books."""

    name: str
    """Its name, with the unit at the end: of an entry's field, and of the row's column."""
    unit: str
    """Its unit in UCUM."""
    meaning: str
    """What a row's column says."""
    total: Callable[[Sequence[GpuReading], float], float | None]
    """What the entries sum to, of these readings in a tick of so many seconds; `None` where the
    driver does not say."""
    sums_over_board: bool = False
    """Whether the entries of a GPU's row and of its MIG instances' rows sum to the total together:
    the driver measures it of the board. Otherwise those of each row sum to the row's total."""
    apportioned_from: str | None = None
    """The reading's field that has it per second, where it is apportioned; else it is booked."""
    added: int = 0
    """With which version of the store's table (`TABLE_VERSION` in `gpuledger.ledger.rows`) its
    column came; older tables get it at their end."""
    average: str
    """What it is called per second of the tick: the end of the name of its series."""
    pod_help: str
    """What its series says of a container, as a sentence."""
    account_help: str
    """What its series says of an account that is no pod's, as a sentence."""


def _memory_byte_seconds(readings: Sequence[GpuReading], seconds: float) -> float | None:
    """Return a board's memory times the time: the board's own, or its instances' if they have more.

    Compute instances of one GPU instance tell of the same memory; it counts once.
    """
    by_instance: dict[int | str, int] = {}
    for reading in readings:
        if reading.parent_uuid is not None and reading.memory_total_bytes is not None:
            key = reading.uuid if reading.gpu_instance is None else reading.gpu_instance
            by_instance.setdefault(key, reading.memory_total_bytes)
    # Where the board did not answer, its instances stand for it.
    board = readings[0].memory_total_bytes if readings[0].parent_uuid is None else None
    if board is None and not by_instance:
        return None
    return max(board or 0, sum(by_instance.values())) * seconds


def _joules(readings: Sequence[GpuReading], seconds: float) -> float | None:
    """Return what a board drew: by its energy counter, else by its power."""
    board = readings[0]
    # A counter misses nothing between two ticks; power is one look at it.
    if board.energy_joules is not None:
        return board.energy_joules
    return None if board.power_watts is None else board.power_watts * seconds


def _active_seconds(part: str, what: str, meaning: str) -> Quantity:
    """Return the quantity of one of the chip's counters."""
    field = f"{part}_active_ratio"

    def total(readings: Sequence[GpuReading], seconds: float) -> float | None:
        ratio: float | None = getattr(readings[0], field)
        # The counters of a GPU that is cut count its instances' work once more.
        return None if ratio is None or readings[0].mig_enabled else ratio * seconds

    def help_of(whom: str) -> str:
        return (
            f"Share of the tick in which the GPU's {what} worked, as far as it is booked on {whom}:"
            " apportioned by busy time, where the chip has counters."
        )

    return Quantity(
        name=f"{part}_active_seconds",
        unit="s",
        meaning=meaning,
        total=total,
        apportioned_from=field,
        added=2,
        average=field,
        pod_help=help_of("the container"),
        account_help=help_of("the account"),
    )


BUSY_SECONDS: Final = Quantity(
    name="busy_seconds",
    unit="s",
    meaning="Time in which its kernels ran; on `idle`: in which none ran; absent without a reading."
    " Below zero on `unattributed` with method `accounting`: what an account had of it after all.",
    total=lambda _, seconds: seconds,
    average="busy_ratio",
    pod_help="Share of the tick in which the container's kernels ran on the GPU.",
    account_help="Share of the tick booked on no pod: on the host, on nobody that could be seen "
    "(unattributed), or on idle, where it is the share in which no kernel ran.",
)
QUANTITIES: Final = (
    BUSY_SECONDS,
    Quantity(
        name="memory_byte_seconds",
        unit="By.s",
        meaning="Memory held times the time it was held; on `idle`: free memory; absent without a"
        " reading.",
        total=_memory_byte_seconds,
        sums_over_board=True,
        average="memory_bytes",
        pod_help="Device memory that the container's processes held at the tick.",
        account_help="Device memory booked on no pod, as it was at the tick; on idle, free memory.",
    ),
    Quantity(
        name="joules",
        unit="J",
        meaning="Energy; absent on a GPU that gives neither energy nor power.",
        total=_joules,
        sums_over_board=True,
        average="power_watts",
        pod_help="Power booked on the container, averaged over the tick.",
        account_help="Power booked on no pod, averaged over the tick.",
    ),
    _active_seconds(
        "sm",
        "multiprocessors",
        "The GPU's time with work on its multiprocessors, apportioned by busy seconds; absent on"
        " `idle` and without the chip's counters, as the next two.",
    ),
    _active_seconds("tensor", "tensor pipes", "The same of the tensor pipes."),
    _active_seconds("dram", "memory interface", "The same of the memory interface."),
)
BOOKED: Final = tuple(one for one in QUANTITIES if one.apportioned_from is None)
"""The quantities that are fields of an entry."""
APPORTIONED: Final = tuple(one for one in QUANTITIES if one.apportioned_from is not None)
"""The quantities that are apportioned by busy seconds."""

Amounts = tuple[float | None, ...]
"""An amount of each of `APPORTIONED`, by its name; each absent where it is not known."""
_AmountsByName: Final[Any] = namedtuple("Amounts", [one.name for one in APPORTIONED])  # type: ignore[misc]  # noqa: PYI024  # fields are the table's
_make_amounts: Final[Callable[[Iterable[float | None]], Amounts]] = _AmountsByName._make
UNKNOWN: Final[Amounts] = _make_amounts([None] * len(APPORTIONED))
_rates: Final[Callable[[GpuReading], Amounts]] = attrgetter(
    *(one.apportioned_from or "" for one in APPORTIONED)
)
_IDLE: Final = Account.IDLE


def rates_of(reading: GpuReading) -> Amounts:
    """Return what the device has of each per second: a cut GPU counts its instances' once more."""
    # Its instances have rows of their own, with counters of their own.
    return UNKNOWN if reading.mig_enabled else _rates(reading)


def apportion(books: GpuBooks, seconds: float) -> list[Amounts]:
    """Return what each entry of a device has in a tick of `seconds`, in the entries' order.

    The amounts sum to the device's rates times `seconds`. Idle has none. Where nobody was busy, or
    that is not known, they are nobody's: on the unattributed entry, or the last one where there is
    none.
    """
    rates = rates_of(books.reading)
    if rates == UNKNOWN or not books.entries:
        return [UNKNOWN] * len(books.entries)
    totals = [None if rate is None else rate * seconds for rate in rates]
    return [
        UNKNOWN
        if weight is None
        else _make_amounts([None if total is None else weight * total for total in totals])
        for weight in _weights(books.entries)
    ]


def _weights(entries: Sequence[Entry]) -> list[float | None]:
    """Return each entry's part of what was busy; `None` on idle."""
    busy = [None if entry.account is _IDLE else entry.busy_seconds or 0.0 for entry in entries]
    worked = sum(time for time in busy if time)
    # In proportion to what each worked, of what all of them did.
    if worked:
        return [None if time is None else time / worked for time in busy]
    accounts = [entry.account for entry in entries]
    unattributed = Account.UNATTRIBUTED
    busy[accounts.index(unattributed) if unattributed in accounts else -1] = 1.0
    return busy


# Below this, two amounts are the same whatever their ratio.
_MIN: Final = 1e-9


def conservation_error(books: Sequence[GpuBooks], seconds: float) -> float:
    """Return the largest relative error over quantities and devices: 0 where entries sum to each.

    Costs as much as the booking: for some ticks of many.
    """
    # A GPU's own row, behind it those of its instances; these also where its own is missing.
    boards = {row.reading.uuid: [row] for row in books if row.reading.parent_uuid is None}
    for row in books:
        if row.reading.parent_uuid is not None:
            boards.setdefault(row.reading.parent_uuid, []).append(row)
    errors = [0.0]
    for rows in boards.values():
        for total, booked in _sums(rows, seconds):
            difference = abs(booked - total)
            if difference > _MIN * _MIN:
                errors.append(difference / max(total, _MIN))
    return max(errors)


def _sums(rows: Sequence[GpuBooks], seconds: float) -> Iterable[tuple[float, float]]:
    """Yield what the device read and what is booked of it, for each quantity."""
    # A GPU that is cut has no time of its own: that is its instances'.
    is_cut = len(rows) > 1 and rows[0].reading.parent_uuid is None
    own = rows[1:] if is_cut else rows
    amounts = {id(row): _amounts(row, seconds) for row in rows}
    for quantity in QUANTITIES:
        for summed in [rows] if quantity.sums_over_board else [[row] for row in own]:
            booked = [
                amount
                for row in summed
                for amount in amounts[id(row)][quantity.name]
                if amount is not None
            ]
            # Of a GPU without a reading of its use nobody's time is known, idle's neither.
            if quantity is BUSY_SECONDS and not booked:
                continue
            total = quantity.total([row.reading for row in summed], seconds)
            # What the driver does not say is booked on nobody.
            yield total or 0.0, sum(booked)


def _amounts(books: GpuBooks, seconds: float) -> dict[str, list[float | None]]:
    """Return the amounts of the entries by the quantity's name."""
    entries: Sequence[Entry] = books.entries
    apportioned = apportion(books, seconds)
    columns = {
        quantity.name: [getattr(entry, quantity.name) for entry in entries] for quantity in BOOKED
    }
    for index, quantity in enumerate(APPORTIONED):
        columns[quantity.name] = [amounts[index] for amounts in apportioned]
    return columns
