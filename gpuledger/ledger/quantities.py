"""The quantities that are accounted for: their units, their totals, and how they are split.

The columns of the flat row and of the store, the series of remote-write, and the check that entries
add up are all made from one table, `QUANTITIES`. To add a quantity, add one row here and define how
it is split:

- Some quantities, such as the chip's counters, are measured only for the device as a whole. Such a
  quantity names, in `apportioned_from`, the reading's field that contains its share of the time. It
  is divided among the entries by busy time, because a busy second counts the same for every
  process. The parts can be computed from an event, so events do not store them; code that writes
  rows or series calls `apportion`.
- Every other quantity is stored in a field of `Entry`, and is split in
  `gpuledger_enricher.join.booking`.

This module does not depend on any sink. All amounts are whole numbers in the unit at the end of
their name.

**Conservation** is the rule that the join must keep: for each quantity, the entries of a device add
up exactly to the device's reading, without any tolerance.

Memory and energy are measured for a physical GPU, so the entries of a GPU's row and of its MIG
instances' rows count together; time and the chip's counters add up for each row. Allocated time
adds up to the interval on every row, including a partitioned GPU's and an unresponsive one's. The
check (`imbalances`) uses only the readings and the sums, not the way in which entries were made.
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
    """A quantity that is accounted for, such as energy: its unit, total, and how it is split."""

    name: str
    """Name with the unit at the end; used for the entry's field and the row's column."""
    unit: str
    """Unit in UCUM."""
    meaning: str
    """Description of the row's column."""
    total: Callable[[Sequence[GpuReading], int], int | None]
    """Computes the total to which the entries must add up, from the device's readings and the
    tick's length in nanoseconds; `None` if the driver does not report the quantity."""
    sums_over_physical_gpu: bool = False
    """Whether the driver measures the quantity for the physical GPU, so that the entries of a GPU's
    row and of its MIG instances' rows add up together. Otherwise, each row adds up separately."""
    apportioned_from: str | None = None
    """The reading's field that contains the quantity's share of the time, if the quantity is
    apportioned by busy time; `None` if `Entry` has a field for it."""
    units_per_base: int
    """How many of its units make one base unit (second, byte, joule) of the series."""
    is_of_allocations: bool = False
    """Whether only idle entries have it, on every row. Such a quantity shows to whom the device is
    allocated, not who uses it, and is known even if the device does not answer."""
    is_gauge: bool = False
    """Whether the quantity is a level during the tick, such as memory, and not a sum over time. Its
    average is then the amount itself, and its total over time is the amount times the interval."""
    average: str
    """Name of its average over the tick, in base units: the end of its series' name."""
    pod_help: str
    """Help of its series for containers, one sentence."""
    category_help: str
    """Help of its series for categories other than `pod`, one sentence."""
    total_name: str = ""
    """Name of its counter, if it is booked: the end of its series' name."""
    total_help: str = ""
    """Help of its counter, one sentence."""

    def divisor(self, interval_ns: int) -> float:
        """Return the divisor that turns a tick's amount into its average.

        The interval must not be 0. The average is in base units, per second unless the quantity is
        a gauge. One float division is precise enough to recover the whole number; integer
        division takes several times as long.
        """
        if self.is_gauge:
            return float(self.units_per_base)
        return self.units_per_base * interval_ns / 1_000_000_000


def _memory_bytes(readings: Sequence[GpuReading], _: int) -> int | None:
    """Return a physical GPU's memory in bytes, or the sum of its instances if that is larger.

    Compute instances of one GPU instance report the same memory, which counts once.
    """
    by_instance: dict[int | str, int] = {}
    for reading in readings:
        if reading.parent_uuid is not None and reading.memory_total_bytes is not None:
            key = reading.uuid if reading.gpu_instance is None else reading.gpu_instance
            by_instance.setdefault(key, reading.memory_total_bytes)
    # If the physical GPU did not answer, its instances are used instead.
    physical_gpu = readings[0].memory_total_bytes if readings[0].parent_uuid is None else None
    if physical_gpu is None and not by_instance:
        return None
    return max(physical_gpu or 0, sum(by_instance.values()))


def _active_ns(part: str, what: str, meaning: str) -> Quantity:
    """Return the quantity for one of the chip's counters: the time for which a part was active.

    `part` is the beginning of the names of field and column, `what` the part's name in help texts.
    """
    field = f"{part}_active_ratio"

    def total(readings: Sequence[GpuReading], interval_ns: int) -> int | None:
        ratio: float | None = getattr(readings[0], field)
        # The counters of a partitioned GPU include the work of its instances, which is counted in
        # their own rows.
        if ratio is None or readings[0].mig_enabled:
            return None
        return part_of(interval_ns, parts_per_million(ratio), PPM)

    def help_of(whom: str) -> str:
        return (
            f"Fraction of the sampling interval in which the GPU's {what} worked for {whom},"
            " apportioned by busy time, if the chip has counters."
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
    meaning="Time in which its kernels ran; for `idle`, in which none ran; absent without a"
    " reading. Negative for `unattributed` with method `accounting`: time moved to another"
    " category.",
    total=lambda _, interval_ns: interval_ns,
    units_per_base=10**9,
    average="busy_ratio",
    pod_help="Fraction of the sampling interval in which the container's kernels ran on the GPU.",
    category_help="Fraction of the sampling interval booked on a category other than pod: job,"
    " host, unattributed (user unknown), or idle (no kernel ran).",
    total_name="busy_seconds_total",
    total_help="Total time in which the category's kernels ran on the GPU; for idle, time in which"
    " none ran. A MIG instance counts as its part of the physical GPU.",
)
ALLOCATED_NS: Final = Quantity(
    name="allocated_ns",
    unit="ns",
    meaning="For `idle`: how much of the device is allocated, or not allocated, as time, used or"
    " not; adds up to the interval for each device, also if it does not answer.",
    total=lambda _, interval_ns: interval_ns,
    is_of_allocations=True,
    units_per_base=10**9,
    average="ratio",
    pod_help="",
    category_help="Share of the GPU or MIG instance that is allocated to the pod, or not allocated,"
    " used or not. Sums to 1 over each device, also while it does not respond.",
    total_name="allocated_seconds_total",
    total_help="Total time for which the GPU was allocated to the container or job, used or not;"
    " for `idle`, time that was not allocated; for `unknown`, time whose allocation is unknown. A"
    " share or a MIG instance counts as its part of the physical GPU.",
)
QUANTITIES: Final = (
    BUSY_NS,
    Quantity(
        name="memory_bytes",
        unit="By",
        meaning="Device memory in use over the interval; for `idle`, free memory; absent without a"
        " reading.",
        total=_memory_bytes,
        sums_over_physical_gpu=True,
        units_per_base=1,
        is_gauge=True,
        average="memory_bytes",
        pod_help="Device memory in use by the container's processes.",
        category_help="Device memory booked on a category other than pod; for idle, free memory.",
        total_name="memory_byte_seconds_total",
        total_help="Total of the category's device memory, multiplied by time; for idle, of free"
        " memory.",
    ),
    Quantity(
        name="energy_millijoules",
        unit="mJ",
        meaning="Energy used; absent if the GPU reports neither energy nor power.",
        total=lambda readings, _: readings[0].energy_millijoules,
        sums_over_physical_gpu=True,
        units_per_base=1000,
        average="power_watts",
        pod_help="Power booked on the container, averaged over the sampling interval.",
        category_help="Power booked on a category other than pod, averaged over the sampling"
        " interval.",
        total_name="energy_joules_total",
        total_help="Total energy booked on the category.",
    ),
    ALLOCATED_NS,
    _active_ns(
        "sm",
        "multiprocessors",
        "Time with work on the GPU's multiprocessors, apportioned by busy time. Like the next two,"
        " absent for `idle` and without the chip's counters.",
    ),
    _active_ns("tensor", "tensor pipes", "Time with work on the tensor pipes, in the same way."),
    _active_ns(
        "dram", "memory interface", "Time with work on the memory interface, in the same way."
    ),
)
BOOKED: Final = tuple(quantity for quantity in QUANTITIES if quantity.apportioned_from is None)
"""The quantities with a field in `Entry`."""
APPORTIONED: Final = tuple(
    quantity for quantity in QUANTITIES if quantity.apportioned_from is not None
)
"""The quantities that are apportioned by busy time."""

Amounts = tuple[int | None, ...]
"""Amounts in the order of a table of quantities, such as `APPORTIONED`; `None` if unknown."""
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
    """Return the fraction of the tick in which each part of the chip was active.

    The fractions have the order of `APPORTIONED`; `None` if unknown. For a partitioned GPU all are
    `None`, because its instances have their own counters.
    """
    return _NO_RATES if reading.mig_enabled else _rates(reading)


def apportion(books: GpuBooks, interval_ns: int) -> list[Amounts]:
    """Return each entry's part of the apportioned quantities in a tick, in the entries' order.

    The amounts add up to the device's amounts. Idle entries have none. If all busy times are 0 or
    unknown, the amounts go to the unattributed entry, or without such an entry to the last one.
    """
    rates, entries = rates_of(books.reading), books.entries
    if rates == _NO_RATES or not entries:
        return [UNKNOWN] * len(entries)
    indices = [index for index, entry in enumerate(entries) if entry.category is not _IDLE]
    # The entries of a tick are never negative, but anybody may have written the event.
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
        # Ties are resolved by the order of the entries, which depends only on their owners.
        columns.append([*divide(total, weights, ppm * interval_ns, PPM * worked)])
    found = [UNKNOWN] * len(entries)
    for index, *amounts in zip(indices, *columns, strict=True):
        found[index] = _make_amounts(amounts)
    return found


class Imbalance(NamedTuple):
    """A quantity whose entries do not add up to the device's reading."""

    gpu_uuid: str
    """UUID of the device or physical GPU."""
    quantity: str
    """The quantity's name."""
    total: int
    """The device's reading."""
    booked: int
    """Sum of its entries."""

    @property
    def ratio(self) -> float:
        """Return the absolute difference from the device's reading, relative to that reading."""
        return abs(self.booked - self.total) / max(self.total, 1)


def imbalances(books: Sequence[GpuBooks], interval_ns: int) -> Iterator[Imbalance]:
    """Yield each quantity whose amounts in a tick's entries do not add up to the readings.

    This check takes as long as making the tick's entries.
    """
    # By physical GPU: its own row, if there is one, followed by its instances' rows.
    physical_gpus = {row.reading.uuid: [row] for row in books if row.reading.parent_uuid is None}
    for row in books:
        if row.reading.parent_uuid is not None:
            physical_gpus.setdefault(row.reading.parent_uuid, []).append(row)
    for rows in physical_gpus.values():
        # A partitioned GPU has no time of its own; only its instances have time.
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
                # Without a reading of the GPU's use, no category has a time, not even idle.
                if quantity is BUSY_NS and not booked:
                    continue
                total = quantity.total([row.reading for row in summed], interval_ns)
                # If the driver does not report a total, the entries' sum must be 0 or absent.
                if sum(booked) != (total or 0):
                    yield Imbalance(summed[0].reading.uuid, quantity.name, total or 0, sum(booked))


def _amounts(books: GpuBooks, interval_ns: int) -> dict[str, list[int | None]]:
    """Return for each quantity, by name, the amounts of all entries."""
    entries: Sequence[Entry] = books.entries
    apportioned = apportion(books, interval_ns)
    columns = {
        quantity.name: [getattr(entry, quantity.name) for entry in entries] for quantity in BOOKED
    }
    for index, quantity in enumerate(APPORTIONED):
        columns[quantity.name] = [amounts[index] for amounts in apportioned]
    return columns
