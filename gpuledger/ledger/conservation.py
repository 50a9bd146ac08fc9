"""How far the books of a tick are from what the devices read: the law that the join keeps.

The entries of a device sum, for each quantity, to what the device read. Memory and energy are
measured of a board, so the entries of a GPU's row and of its MIG instances' rows count together;
time and the chip's counters are each row's own. Pure, and computed from the readings alone: nothing
here asks how the entries were made.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from gpuledger.ledger.quantities import APPORTIONED, BOOKED, BUSY_SECONDS, QUANTITIES, apportion
from gpuledger.records import Entry, GpuBooks

# Below this, two amounts are the same whatever their ratio.
_MIN: Final = 1e-9


def conservation_error(books: Sequence[GpuBooks], seconds: float) -> float:
    """Return the largest relative error over quantities and devices: 0 where entries sum to each.

    Costs as much as the booking: for some ticks of many.
    """
    errors = [0.0]
    for rows in _boards(books):
        errors += [_error(total, booked) for total, booked in _sums(rows, seconds)]
    return max(errors)


def _boards(books: Iterable[GpuBooks]) -> Iterable[list[GpuBooks]]:
    """Return the rows of each board: a GPU's own row, behind it those of its instances."""
    boards = {row.reading.uuid: [row] for row in books if row.reading.parent_uuid is None}
    for row in books:
        if row.reading.parent_uuid is not None:
            boards.setdefault(row.reading.parent_uuid, []).append(row)
    return boards.values()


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


def _error(total: float, booked: float) -> float:
    difference = abs(booked - total)
    return difference / max(total, _MIN) if difference > _MIN * _MIN else 0.0
