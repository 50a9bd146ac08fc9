"""GPUs cut by MIG: what each row of a tick has that no other row has.

A GPU's own row tells of the whole board, its instances' rows of parts of it, and compute instances
of one GPU instance tell of the same memory. Here everything is left to one row each, so that the
entries of all rows of a GPU sum to the GPU. How a row is booked is `books`' business.
"""

from collections.abc import Sequence

from enricher.join.booking.claims import Claim
from gpuledger.records import GpuReading


def has_instances(readings: Sequence[GpuReading]) -> bool:
    """Return whether one of the rows is of a MIG instance."""
    for reading in readings:  # noqa: SIM110 - any() costs three times as much, for each tick
        if reading.parent_uuid is not None:
            return True
    return False


def exclusive_readings(
    readings: Sequence[GpuReading], claims: Sequence[Sequence[Claim]]
) -> Sequence[GpuReading]:
    """Return, for each row, a reading of only what is its own: memory and busy time.

    On a GPU without instances that is the reading itself. A GPU with instances keeps the memory
    that no instance has, and no busy time: that is the instances'. How its energy
    is shared out is `instance_energy`'s business.
    """
    if not has_instances(readings):
        return readings
    own = list(readings)
    for rows in _compute_instances(readings):
        _share_memory(own, rows, claims)
    parts_of = _sum_parts(own)
    for place, reading in enumerate(readings):
        parts = parts_of.get(reading.uuid)
        if parts is not None:
            left = _what_is_left(reading, parts)
            if reading.parent_uuid is not None:  # a part that has parts: of no GPU that there is
                parts_of[reading.parent_uuid].replace(own[place], left)
            own[place] = left
    return own


class _Parts:
    """The memory of all rows that are parts of one: a sum, as a tick may have very many rows."""

    __slots__ = ("reserved", "total", "used")

    def __init__(self) -> None:
        self.total = self.used = self.reserved = 0

    def add(self, part: GpuReading) -> None:
        """Add what a row has."""
        self.total += part.memory_total_bytes or 0
        self.used += part.memory_used_bytes or 0
        self.reserved += part.memory_reserved_bytes or 0

    def replace(self, part: GpuReading, left: GpuReading) -> None:
        """Count what is left of a row in place of what it had."""
        self.total -= part.memory_total_bytes or 0
        self.used -= part.memory_used_bytes or 0
        self.reserved -= part.memory_reserved_bytes or 0
        self.add(left)


def _sum_parts(rows: Sequence[GpuReading]) -> dict[str, _Parts]:
    """Return the sum of the parts of each row that has some, by its UUID."""
    found: dict[str, _Parts] = {}
    for row in rows:
        if row.parent_uuid is not None:
            parts = found.get(row.parent_uuid)
            if parts is None:
                found[row.parent_uuid] = parts = _Parts()
            parts.add(row)
    return found


def _compute_instances(readings: Sequence[GpuReading]) -> list[list[int]]:
    """Return the rows of each GPU instance that is cut into several compute instances."""
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


def _what_is_left(reading: GpuReading, parts: _Parts) -> GpuReading:
    return _row(
        reading,
        total=_less(reading.memory_total_bytes, parts.total),
        used=_less(reading.memory_used_bytes, parts.used),
        reserved=_less(reading.memory_reserved_bytes, parts.reserved),
        is_busy_known=False,
    )


def _less(whole: int | None, parts: int) -> int | None:
    return None if whole is None else max(0, whole - parts)


def _row(
    reading: GpuReading,
    *,
    total: int | None,
    used: int | None,
    reserved: int | None,
    is_busy_known: bool = True,
) -> GpuReading:
    """Return what is booked of a row, with the memory that is its own."""
    return GpuReading(
        uuid=reading.uuid,
        index=reading.index,
        parent_uuid=reading.parent_uuid,
        gpu_instance=reading.gpu_instance,
        utilization_ratio=reading.utilization_ratio if is_busy_known else None,
        memory_total_bytes=total,
        memory_used_bytes=used,
        memory_reserved_bytes=reserved,
    )
