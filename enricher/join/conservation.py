"""How far the books of a tick are from what the devices read: the law that the join keeps.

Pure, and told from the readings alone: nothing here asks how the entries were made.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from enricher.join.activity import read_ratios
from gpuledger.records import GpuBooks, GpuReading, NodeSample

_ACTIVE: Final = ("sm_active", "tensor_active", "dram_active")
# Below this, two amounts are the same whatever their ratio.
_LEAST: Final = 1e-9


def conservation_error(books: Sequence[GpuBooks], sample: NodeSample) -> float:
    """Give the largest relative error over quantities and devices: 0 where entries sum to each.

    Costs about as much as the booking itself. Raises `ValueError` where the counters of a reading
    are none.
    """
    seconds = sample.interval_ns / 1e9
    errors = [0.0]
    for rows in _devices(books):
        errors += _errors(rows, seconds)
    return max(errors)


def _devices(books: Sequence[GpuBooks]) -> Iterable[list[GpuBooks]]:
    """Give the rows of each device: a GPU's own row, behind it those of its instances."""
    gpus = {one.reading.uuid: [one] for one in books if one.reading.parent_uuid is None}
    for one in books:
        if one.reading.parent_uuid is not None:
            gpus.setdefault(one.reading.parent_uuid, []).append(one)
    return gpus.values()


def _errors(rows: list[GpuBooks], seconds: float) -> Iterator[float]:
    readings = [one.reading for one in rows]
    yield _error(_memory_bytes(readings) * seconds, _sum(rows, "memory_byte_seconds"))
    yield _error(_joules(readings[0], seconds), _sum(rows, "joules"))
    is_cut = len(rows) > 1 and readings[0].parent_uuid is None
    for row in rows[1:] if is_cut else rows:
        if any(entry.busy_seconds is not None for entry in row.entries):
            yield _error(seconds, _sum([row], "busy_seconds"))
        ratios = row.reading.profiling and read_ratios(row.reading.profiling)
        for name in _ACTIVE if ratios else ():
            expected = (getattr(ratios, f"{name}_ratio") or 0.0) * seconds
            yield _error(expected, _sum([row], f"{name}_seconds"))


def _error(expected: float, booked: float) -> float:
    difference = abs(booked - expected)
    return difference / max(expected, _LEAST) if difference > _LEAST * _LEAST else 0.0


def _sum(rows: Iterable[GpuBooks], quantity: str) -> float:
    return sum(getattr(entry, quantity) or 0.0 for row in rows for entry in row.entries)


def _memory_bytes(readings: Sequence[GpuReading]) -> int:
    """Give a device's memory: the board's, or that of its instances where they say they have more.

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
