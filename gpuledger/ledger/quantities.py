"""The quantities of the books: what each is, what its entries sum to, and how it is split.

One table, `QUANTITIES`. The columns of the flat row and of the store, the series of remote-write,
and the check that books balance are made from it. To add a quantity is one row here and
its split:

- A quantity that only the device as a whole is measured for, as the chip's counters are, names the
  field of the reading that has its share of the time (`apportioned_from`). It is apportioned by
  busy time: nothing is measured of a process, and a busy second of one counts as much as one of
  another. This follows from what an event says, so no event repeats it; whoever writes rows or
  series calls `apportion`.
- Any other quantity is booked: a field of `Entry`, split in `gpuledger_enricher.join.booking`.

Nothing here knows a sink.

All amounts are whole numbers, in the unit that the name ends in.

**Conservation**, the law that the join keeps: the books of a tick sum to what the devices read.

The entries of a device sum, for each quantity, to what the device read: they are equal, not near.
Memory and energy are measured of a board, so the entries of a GPU's row and of its MIG instances'
rows count together; time and the chip's counters are each row's own. Held time sums to the interval
on every row, a GPU's that is cut, or that does not answer, included. Pure, and computed from the
readings alone: nothing here asks how the entries were made.
"""

from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, NamedTuple

from gpuledger.ledger.division import PPM, divide, part_of, parts_per_million
from gpuledger.records import Category, Entry, GpuBooks, GpuReading


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One quantity of the books."""

    name: str
    """Its name, with the unit at the end: of an entry's field, and of the row's column."""
    unit: str
    """Its unit in UCUM."""
    meaning: str
    """What a row's column says."""
    total: Callable[[Sequence[GpuReading], int], int | None]
    """What the entries sum to, of these readings in a tick of so many nanoseconds; `None` where the
    driver does not say."""
    sums_over_physical_gpu: bool = False
    """Whether the entries of a GPU's row and of its MIG instances' rows sum to the total together:
    the driver measures it of the board. Otherwise those of each row sum to the row's total."""
    apportioned_from: str | None = None
    """The reading's field that has its share of the time, where it is apportioned; else it is
    booked."""
    units_per_base: int
    """How many of its unit are one of the base unit (second, byte, joule) in which series are."""
    is_of_allocations: bool = False
    """Whether idle's entries alone have it, of every row: it says who holds the device, not who
    uses it, and is known where the device does not answer."""
    is_gauge: bool = False
    """Whether it is held over the tick, as memory is, and is no sum over time: its average is the
    amount itself, and what it comes to over time is the amount times the interval."""
    average: str
    """What its average over the tick is called, in base units: the end of its series' name."""
    pod_help: str
    """What its series says of a container, as a sentence."""
    category_help: str
    """What its series says of a category that is no pod's, as a sentence."""
    total_name: str = ""
    """What its counter is called, where it is booked: the end of its series' name."""
    total_help: str = ""
    """What its counter says, as a sentence."""

    def divisor(self, interval_ns: int) -> float:
        """Return by what an amount is divided for its average over a tick that has a length.

        The average is in base units, a second's worth. One division of floats, whose digits suffice
        to have the whole number back; one of whole numbers takes several times as long.
        """
        if self.is_gauge:
            return float(self.units_per_base)
        return self.units_per_base * interval_ns / 1_000_000_000


def _memory_bytes(readings: Sequence[GpuReading], _: int) -> int | None:
    """Return a board's memory: the board's own, or its instances' if they have more.

    Compute instances of one GPU instance tell of the same memory; it counts once.
    """
    by_instance: dict[int | str, int] = {}
    for reading in readings:
        if reading.parent_uuid is not None and reading.memory_total_bytes is not None:
            key = reading.uuid if reading.gpu_instance is None else reading.gpu_instance
            by_instance.setdefault(key, reading.memory_total_bytes)
    # Where the board did not answer, its instances stand for it.
    physical_gpu = readings[0].memory_total_bytes if readings[0].parent_uuid is None else None
    if physical_gpu is None and not by_instance:
        return None
    return max(physical_gpu or 0, sum(by_instance.values()))


def _active_ns(part: str, what: str, meaning: str) -> Quantity:
    """Return the quantity of one of the chip's counters."""
    field = f"{part}_active_ratio"

    def total(readings: Sequence[GpuReading], interval_ns: int) -> int | None:
        ratio: float | None = getattr(readings[0], field)
        # The counters of a GPU that is cut count its instances' work once more.
        if ratio is None or readings[0].mig_enabled:
            return None
        return part_of(interval_ns, parts_per_million(ratio), PPM)

    def help_of(whom: str) -> str:
        return (
            f"Share of the tick in which the GPU's {what} worked, as far as it is booked on {whom}:"
            " apportioned by busy time, where the chip has counters."
        )

    return Quantity(
        name=f"{part}_active_ns",
        unit="ns",
        meaning=meaning,
        total=total,
        apportioned_from=field,
        units_per_base=10**9,
        average=field,
        pod_help=help_of("the container"),
        category_help=help_of("the category"),
    )


BUSY_NS: Final = Quantity(
    name="busy_ns",
    unit="ns",
    meaning="Time in which its kernels ran; on `idle`: in which none ran; absent without a reading."
    " Below zero on `unattributed` with method `accounting`: what a category had of it after all.",
    total=lambda _, interval_ns: interval_ns,
    units_per_base=10**9,
    average="busy_ratio",
    pod_help="Share of the tick in which the container's kernels ran on the GPU.",
    category_help="Share of the tick booked on no pod: on a job, on the host, on nobody that could"
    " be seen (unattributed), or on idle, where it is the share in which no kernel ran.",
    total_name="busy_seconds_total",
    total_help="Time in which the category's kernels ran on the GPU; on idle: in which none ran.",
)
ALLOCATED_NS: Final = Quantity(
    name="allocated_ns",
    unit="ns",
    meaning="On `idle`: how much of the device is allocated to the container or job, or to"
    " nobody, used or not, as time; over a device it sums to the interval, also where the"
    " device does not answer.",
    total=lambda _, interval_ns: interval_ns,
    is_of_allocations=True,
    units_per_base=10**9,
    average="ratio",
    pod_help="",
    category_help="Share of the GPU or MIG instance that is allocated to the pod, or to nobody,"
    " used or not. Sums to 1 over each device, also while it does not respond.",
    total_name="allocated_seconds_total",
    total_help="Time for which the GPU was allocated to the container or the job, whatever it used"
    " of it; on idle, to nobody. Half of a GPU counts half of the time.",
)
QUANTITIES: Final = (
    BUSY_NS,
    Quantity(
        name="memory_bytes",
        unit="By",
        meaning="Memory in use over the tick; on `idle`: free memory; absent without a reading.",
        total=_memory_bytes,
        sums_over_physical_gpu=True,
        units_per_base=1,
        is_gauge=True,
        average="memory_bytes",
        pod_help="Device memory that the container's processes used at the tick.",
        category_help="Device memory booked on no pod, as it was at the tick; on idle, free"
        " memory.",
        total_name="memory_byte_seconds_total",
        total_help="Device memory that the category used, times the time for which it did; on idle:"
        " that was free.",
    ),
    Quantity(
        name="energy_millijoules",
        unit="mJ",
        meaning="Energy; absent on a GPU that gives neither energy nor power.",
        total=lambda readings, _: readings[0].energy_millijoules,
        sums_over_physical_gpu=True,
        units_per_base=1000,
        average="power_watts",
        pod_help="Power booked on the container, averaged over the tick.",
        category_help="Power booked on no pod, averaged over the tick.",
        total_name="energy_joules_total",
        total_help="Energy booked on the category.",
    ),
    ALLOCATED_NS,
    _active_ns(
        "sm",
        "multiprocessors",
        "The GPU's time with work on its multiprocessors, apportioned by busy time; absent on"
        " `idle` and without the chip's counters, as the next two.",
    ),
    _active_ns("tensor", "tensor pipes", "The same of the tensor pipes."),
    _active_ns("dram", "memory interface", "The same of the memory interface."),
)
BOOKED: Final = tuple(quantity for quantity in QUANTITIES if quantity.apportioned_from is None)
"""The quantities that are fields of an entry."""
APPORTIONED: Final = tuple(
    quantity for quantity in QUANTITIES if quantity.apportioned_from is not None
)
"""The quantities that are apportioned by busy time."""

Amounts = tuple[int | None, ...]
"""Amounts in the order of a table of quantities, as `APPORTIONED`; each absent where unknown."""
_AmountsByName: Final[Any] = namedtuple("Amounts", [quantity.name for quantity in APPORTIONED])  # type: ignore[misc]  # noqa: PYI024  # fields are the table's
_make_amounts: Final[Callable[[Iterable[int | None]], Amounts]] = _AmountsByName._make
UNKNOWN: Final[Amounts] = _make_amounts([None] * len(APPORTIONED))
_rates: Final[Callable[[GpuReading], tuple[float | None, ...]]] = attrgetter(
    *(quantity.apportioned_from or "" for quantity in APPORTIONED)
)
_NO_RATES: Final = (None,) * len(APPORTIONED)
_IDLE: Final = Category.IDLE
_UNATTRIBUTED: Final = Category.UNATTRIBUTED


def rates_of(reading: GpuReading) -> tuple[float | None, ...]:
    """Return the share of the time that each has: a cut GPU counts its instances' once more."""
    # Its instances have rows of their own, with counters of their own.
    return _NO_RATES if reading.mig_enabled else _rates(reading)


def apportion(books: GpuBooks, interval_ns: int) -> list[Amounts]:
    """Return what each entry of a device has in a tick, in the entries' order.

    The amounts sum to the device's. Idle has none. Where nobody was busy, or that is not known,
    they are nobody's: on the unattributed entry, or the last one where there is none.
    """
    rates, entries = rates_of(books.reading), books.entries
    if rates == _NO_RATES or not entries:
        return [UNKNOWN] * len(entries)
    indices = [index for index, entry in enumerate(entries) if entry.category is not _IDLE]
    # Below zero in no tick's books; but whoever wrote the event may be anybody.
    weights = [max(entries[index].busy_ns or 0, 0) for index in indices]
    worked = sum(weights)
    if not worked:
        accounts = [entry.category for entry in entries]
        unattributed = (
            accounts.index(_UNATTRIBUTED) if _UNATTRIBUTED in accounts else len(entries) - 1
        )
        indices = sorted({*indices, unattributed})
        weights, worked = [int(index == unattributed) for index in indices], 1
    columns: list[list[int | None]] = []
    for rate in rates:
        if rate is None:
            columns.append([None] * len(indices))
            continue
        ppm = parts_per_million(rate)
        total = part_of(interval_ns, ppm, PPM)
        # Ties go by the order of the entries, which follows from whose they are.
        columns.append([*divide(total, weights, ppm * interval_ns, PPM * worked)])
    found = [UNKNOWN] * len(entries)
    for index, *amounts in zip(indices, *columns, strict=True):
        found[index] = _make_amounts(amounts)
    return found


class Imbalance(NamedTuple):
    """A quantity whose entries do not sum to what a device read."""

    gpu_uuid: str
    """The device, or the board."""
    quantity: str
    """The quantity's name."""
    total: int
    """What the device read."""
    booked: int
    """What its entries sum to."""

    @property
    def ratio(self) -> float:
        """The difference, over what the device read."""
        return abs(self.booked - self.total) / max(self.total, 1)


def imbalances(books: Sequence[GpuBooks], interval_ns: int) -> Iterator[Imbalance]:
    """Yield where the books of a tick do not sum to what was read; nothing where they balance.

    Costs as much as the booking.
    """
    # A GPU's own row, behind it those of its instances; these also where its own is missing.
    physical_gpus = {row.reading.uuid: [row] for row in books if row.reading.parent_uuid is None}
    for row in books:
        if row.reading.parent_uuid is not None:
            physical_gpus.setdefault(row.reading.parent_uuid, []).append(row)
    for rows in physical_gpus.values():
        # A GPU that is cut has no time of its own: that is its instances'.
        is_cut = len(rows) > 1 and rows[0].reading.parent_uuid is None
        own = rows[1:] if is_cut else rows
        amounts = {id(row): _amounts(row, interval_ns) for row in rows}
        for quantity in QUANTITIES:
            alone = rows if quantity.is_of_allocations else own
            for summed in [rows] if quantity.sums_over_physical_gpu else [[row] for row in alone]:
                booked = [
                    amount
                    for row in summed
                    for amount in amounts[id(row)][quantity.name]
                    if amount is not None
                ]
                # Of a GPU without a reading of its use nobody's time is known, idle's neither.
                if quantity is BUSY_NS and not booked:
                    continue
                total = quantity.total([row.reading for row in summed], interval_ns)
                # What the driver does not say is booked on nobody.
                if sum(booked) != (total or 0):
                    yield Imbalance(summed[0].reading.uuid, quantity.name, total or 0, sum(booked))


def _amounts(books: GpuBooks, interval_ns: int) -> dict[str, list[int | None]]:
    """Return the amounts of the entries by the quantity's name."""
    entries: Sequence[Entry] = books.entries
    apportioned = apportion(books, interval_ns)
    columns = {
        quantity.name: [getattr(entry, quantity.name) for entry in entries] for quantity in BOOKED
    }
    for index, quantity in enumerate(APPORTIONED):
        columns[quantity.name] = [amounts[index] for amounts in apportioned]
    return columns
