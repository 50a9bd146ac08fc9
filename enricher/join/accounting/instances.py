"""GPUs cut by MIG: what each row of a tick has that no other row has.

A GPU's own row tells of the whole board, its instances' rows of parts of it, and compute instances
of one GPU instance tell of the same memory. Here everything is left to one row each, so that the
entries of all rows of a GPU sum to the GPU. How a row is booked is `books`' business.
"""

from collections.abc import Sequence
from typing import Final

from enricher.join.accounting.claims import Claim
from gpuledger.records import GpuReading
from gpuledger.twins import twin_of

_GpuReading: Final = twin_of(GpuReading)


def has_instances(readings: Sequence[GpuReading]) -> bool:
    """Say whether one of the rows is of a MIG instance."""
    for reading in readings:  # noqa: SIM110 - any() costs three times as much, for each tick
        if reading.parent_uuid is not None:
            return True
    return False


def own_readings(
    readings: Sequence[GpuReading], claims: Sequence[Sequence[Claim]]
) -> Sequence[GpuReading]:
    """Give, for each row, a reading of only what is its own: memory and busy time.

    On a GPU without instances that is the reading itself. A GPU with instances keeps the memory
    that no instance has, and no busy time: that is the instances'. How its energy
    is shared out is `instance_energy`'s business.
    """
    if not has_instances(readings):
        return readings
    own = list(readings)
    for rows in _compute_instances(readings):
        _share_memory(own, rows, claims)
    for place, reading in enumerate(readings):
        parts = [part for part in own if part.parent_uuid == reading.uuid]
        if parts:
            own[place] = _what_is_left(reading, parts)
    return own


def _compute_instances(readings: Sequence[GpuReading]) -> list[list[int]]:
    """Give the rows of each GPU instance that is cut into several compute instances."""
    found: dict[tuple[str, int], list[int]] = {}
    for place, reading in enumerate(readings):
        if reading.parent_uuid is not None and reading.gpu_instance is not None:
            found.setdefault((reading.parent_uuid, reading.gpu_instance), []).append(place)
    return [rows for rows in found.values() if len(rows) > 1]


def _share_memory(
    own: list[GpuReading], rows: Sequence[int], claims: Sequence[Sequence[Claim]]
) -> None:
    """Leave the memory to the first row that tells it; the others have what processes hold."""
    known = [place for place in rows if own[place].memory_total_bytes is not None]
    if not known:
        return
    keeper = known[0]
    first = own[keeper]
    total, used = first.memory_total_bytes or 0, first.memory_used_bytes
    for place in rows:
        if place == keeper:
            continue
        held = min(total, sum(claim.memory_bytes or 0 for claim in claims[place]))
        total -= held
        used = None if used is None else max(0, used - held)
        own[place] = _row(own[place], total=held, used=held, reserved=0)
    own[keeper] = _row(first, total=total, used=used, reserved=first.memory_reserved_bytes)


def _what_is_left(reading: GpuReading, parts: Sequence[GpuReading]) -> GpuReading:
    return _row(
        reading,
        total=_less(reading.memory_total_bytes, [part.memory_total_bytes for part in parts]),
        used=_less(reading.memory_used_bytes, [part.memory_used_bytes for part in parts]),
        reserved=_less(
            reading.memory_reserved_bytes, [part.memory_reserved_bytes for part in parts]
        ),
        is_busy_known=False,
    )


def _less(whole: int | None, parts: Sequence[int | None]) -> int | None:
    return None if whole is None else max(0, whole - sum(part or 0 for part in parts))


def _row(
    reading: GpuReading,
    *,
    total: int | None,
    used: int | None,
    reserved: int | None,
    is_busy_known: bool = True,
) -> GpuReading:
    """Give what is booked of a row, with the memory that is its own."""
    return _GpuReading(
        uuid=reading.uuid,
        index=reading.index,
        parent_uuid=reading.parent_uuid,
        gpu_instance=reading.gpu_instance,
        utilization_ratio=reading.utilization_ratio if is_busy_known else None,
        memory_total_bytes=total,
        memory_used_bytes=used,
        memory_reserved_bytes=reserved,
    )
