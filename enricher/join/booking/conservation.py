"""How far the books of a tick are from what the devices read: the law that the join keeps.

Pure, and told from the readings alone: nothing here asks how the entries were made.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from gpuledger.activity import counters_of, split_activity
from gpuledger.records import Entry, GpuBooks, GpuReading, NodeSample

# Below this, two amounts are the same whatever their ratio.
_MIN: Final = 1e-9
_Column = list[float | None]


def conservation_error(books: Sequence[GpuBooks], sample: NodeSample) -> float:
    """Return the largest relative error over quantities and devices: 0 where entries sum to each.

    Costs as much as the booking: for some ticks of many.
    """
    seconds = sample.interval_ns / 1e9
    errors = [0.0]
    for rows in _devices(books):
        errors += _errors(rows, seconds)
    return max(errors)


def _devices(books: Sequence[GpuBooks]) -> Iterable[list[GpuBooks]]:
    """Return the rows of each device: a GPU's own row, behind it those of its instances."""
    gpus = {one.reading.uuid: [one] for one in books if one.reading.parent_uuid is None}
    for one in books:
        if one.reading.parent_uuid is not None:
            gpus.setdefault(one.reading.parent_uuid, []).append(one)
    return gpus.values()


def _errors(rows: list[GpuBooks], seconds: float) -> Iterator[float]:
    readings = [one.reading for one in rows]
    columns = [_columns(row, seconds) for row in rows]
    memory = sum([_sum(column[1]) for column in columns])
    joules = sum([_sum(column[2]) for column in columns])
    yield _error(_memory_bytes(readings) * seconds, memory)
    yield _error(_joules(readings[0], seconds), joules)
    is_cut = len(rows) > 1 and readings[0].parent_uuid is None
    for reading, (busy, _, _, *active) in zip(readings, columns, strict=True):
        if is_cut and reading.parent_uuid is None:
            continue
        if any(each is not None for each in busy):
            yield _error(seconds, _sum(busy))
        for ratio, column in zip(counters_of(reading), active, strict=True):
            yield _error((ratio or 0.0) * seconds, _sum(column))


def _columns(books: GpuBooks, seconds: float) -> list[_Column]:
    """Return the quantities of the entries, one column each."""
    entries: Sequence[Entry] = books.entries
    sm, tensor, dram = zip(*split_activity(books, seconds), strict=True)
    return [
        [one.busy_seconds for one in entries],
        [one.memory_byte_seconds for one in entries],
        [one.joules for one in entries],
        list(sm),
        list(tensor),
        list(dram),
    ]


def _sum(column: _Column) -> float:
    return sum([each for each in column if each])


def _error(expected: float, booked: float) -> float:
    difference = abs(booked - expected)
    return difference / max(expected, _MIN) if difference > _MIN * _MIN else 0.0


def _memory_bytes(readings: Sequence[GpuReading]) -> int:
    """Return a device's memory: its board's, or that of its instances where they have more.

    Compute instances of one GPU instance tell of the same memory; it counts once.
    """
    parts: dict[int | str, int] = {}
    for one in readings:
        if one.parent_uuid is not None and one.memory_total_bytes is not None:
            home = one.uuid if one.gpu_instance is None else one.gpu_instance
            parts.setdefault(home, one.memory_total_bytes)
    board = readings[0].memory_total_bytes if readings[0].parent_uuid is None else None
    return max(board or 0, sum(parts.values()))


def _joules(reading: GpuReading, seconds: float) -> float:
    if reading.energy_joules is not None:
        return reading.energy_joules
    return (reading.power_watts or 0.0) * seconds
