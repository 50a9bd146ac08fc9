"""The energy of a GPU that is cut by MIG, shared out among its instances.

Pure. A driver tells the board's energy alone. What the board would draw idle goes by the memory of
each instance, what it drew beyond that by the compute slices that were busy.
"""

import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from enricher.join.booking.energy import Drawn, energy_of
from enricher.join.booking.instances import has_instances
from enricher.join.booking.shares import add_up
from gpuledger.records import GpuReading

_PROFILE: Final = re.compile(r"(?:(?P<compute>\d+)c\.)?(?P<gpu>\d+)g\.")
_MIN_RATIO: Final = 1e-9


def drawn_by_rows(readings: Sequence[GpuReading], seconds: float) -> list[Drawn | None]:
    """Return the energy of each row, that of a GPU shared out among the rows of its instances.

    Where the memory or the busy time of one of them is not known, the GPU's row keeps it all.
    """
    if not has_instances(readings):
        return [energy_of(reading, seconds) for reading in readings]
    drawn: list[Drawn | None] = [None] * len(readings)
    for place, parts in _rows_by_gpu(readings).items():
        whole = energy_of(readings[place], seconds)
        shared = whole and _share_out(whole, readings[place], [readings[part] for part in parts])
        drawn[place], of_parts = shared or (whole, [None] * len(parts))
        for part, its_own in zip(parts, of_parts, strict=True):
            drawn[part] = its_own
    return drawn


def _rows_by_gpu(readings: Sequence[GpuReading]) -> dict[int, list[int]]:
    """Return the rows of its instances for the row of each GPU, or of an instance without a GPU."""
    gpus = {one.uuid: place for place, one in enumerate(readings) if one.parent_uuid is None}
    found: dict[int, list[int]] = {}
    for place, reading in enumerate(readings):
        gpu = gpus.get(reading.parent_uuid or "")
        if gpu is None:
            found.setdefault(place, [])
        else:
            found.setdefault(gpu, []).append(place)
    return found


def _share_out(
    whole: Drawn, board: GpuReading, parts: Sequence[GpuReading]
) -> tuple[Drawn, Sequence[Drawn | None]] | None:
    """Return what stays with the GPU's own row, as idle's, and what each instance has."""
    if not parts:
        return whole, []
    ratios = _memory_ratios(board, parts)
    busy = [part.utilization_ratio for part in parts]
    if ratios is None or None in busy:
        return None
    worked = [
        (ratio or 0.0) * slices
        for ratio, slices in zip(busy, _slices(parts) or ratios, strict=True)
    ]
    joules, floor, _ = whole
    total = add_up(worked)
    if total <= _MIN_RATIO:
        floor, total = joules, 1.0
    floors = [floor * ratio for ratio in ratios]
    watts = (joules - floor) / total
    return (0.0, 0.0, max(0.0, floor - add_up(floors))), [
        (idle + work * watts, idle, 0.0) for idle, work in zip(floors, worked, strict=True)
    ]


def _memory_ratios(board: GpuReading, parts: Sequence[GpuReading]) -> list[float] | None:
    """Return each instance's part of the memory; compute instances share that of theirs equally."""
    totals = [part.memory_total_bytes for part in parts]
    if board.memory_total_bytes is None or None in totals:
        return None
    homes = [part.uuid if part.gpu_instance is None else part.gpu_instance for part in parts]
    rows_of = Counter(homes)
    own = [(total or 0) / rows_of[home] for total, home in zip(totals, homes, strict=True)]
    whole = max(board.memory_total_bytes, add_up(own))
    return [part / whole if whole else 0.0 for part in own]


def _slices(parts: Sequence[GpuReading]) -> list[int] | None:
    found = [compute_slices(part.mig_profile) for part in parts]
    return None if None in found else [one for one in found if one is not None]


@lru_cache(maxsize=256)
def compute_slices(profile: str | None) -> int | None:
    """Return the compute slices of a profile such as `1g.10gb` or `1c.3g.40gb`; None of another."""
    match = _PROFILE.match(profile or "")
    return int(match["compute"] or match["gpu"]) if match else None
