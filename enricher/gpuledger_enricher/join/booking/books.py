"""Makes the books of a tick: divides the reading of each row into entries. Pure functions.

Theory of operation. A tick has one row per GPU, followed by one row per instance if MIG partitions
the GPU. The rows of such a GPU overlap: the GPU's own row contains the memory and energy of the
whole board, and each compute instance of a GPU instance reports all memory of the GPU instance. So
before the rows are booked (`shares`), each quantity is assigned to a single row:

- memory (`exclusive_readings`): among compute instances that share memory, the first row that
  reports the memory keeps it, minus the memory of processes on the other rows. The GPU's own row
  keeps the memory that belongs to no instance;
- busy time: the rows of the instances keep it. The GPU's own row has none, because busy time would
  count twice;
- energy (`energy_by_row`): drivers report energy only for the board. Its idle draw is divided in
  proportion to the instances' memory, the rest in proportion to their busy compute slices. Each
  instance gets whole millijoules, which are then divided among its entries.

Each step reads every row a bounded number of times, because a tick may have very many rows.
`gpuledger_enricher.join.pods` adds the names and labels of pods, which do not affect the books.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache
from math import lcm
from typing import Final

from gpuledger.ledger.allocated_parts import find_allocated_parts
from gpuledger.ledger.division import divide, parts_per_million
from gpuledger.ledger.entries import UNKNOWN_SLICES, DeviceSlices
from gpuledger.records import GpuBooks, GpuReading, NodeSample
from gpuledger_enricher.join.booking.shares import (
    Claim,
    Energy,
    book_gpu,
    energy_of,
    gather_claims,
)

_PROFILE: Final = re.compile(r"(?:(?P<compute>\d+)c\.)?(?P<gpu>\d+)g\.")


def book_tick(sample: NodeSample) -> list[GpuBooks]:
    """Return the books of each row (GPU or MIG instance) of the tick, in the tick's order.

    Raise `IndexError` if a process refers to a GPU or a container that the tick does not have, and
    `RepeatedContainerError` if the tick lists a container twice.
    """
    interval_ns = sample.interval_ns
    claims = gather_claims(sample)
    own = exclusive_readings(sample.gpus, claims)
    energy = energy_by_row(sample.gpus, interval_ns)
    allocated = find_allocated_parts(sample)
    slices = slices_by_row(sample.gpus)
    return [
        book_gpu(
            reading, own[row], claims[row], interval_ns, energy[row], allocated[row], slices[row]
        )
        for row, reading in enumerate(sample.gpus)
    ]


def has_instances(readings: Sequence[GpuReading]) -> bool:
    """Return whether any row is a MIG instance."""
    for reading in readings:  # noqa: SIM110 - any() costs three times as much, for each tick
        if reading.parent_uuid is not None:
            return True
    return False


def slices_by_row(readings: Sequence[GpuReading]) -> list[DeviceSlices]:
    """Return the slices of each row; a GPU with instances keeps the slices that no instance has.

    The slices of a GPU without MIG are returned as unknown, because its reading represents the
    whole GPU.
    """
    if not has_instances(readings):
        return [
            _own_slices(reading) if reading.mig_enabled else UNKNOWN_SLICES for reading in readings
        ]
    physical_gpus = {reading.uuid: reading for reading in readings if reading.parent_uuid is None}
    # Remaining slices of each board; unknown if the slices of one of its instances are unknown.
    left = {
        uuid: (physical_gpu.compute_slices, physical_gpu.memory_slices)
        for uuid, physical_gpu in physical_gpus.items()
    }
    keepers: set[tuple[str, int]] = set()
    memory_slices: list[int | None] = []
    for reading in readings:
        gpu, number, own = reading.parent_uuid, reading.gpu_instance, reading.memory_slices
        if gpu is not None and number is not None and own is not None:
            if (gpu, number) in keepers:
                own = 0
            keepers.add((gpu, number))
        memory_slices.append(own)
        if gpu in left:
            compute, memory = left[gpu]
            left[gpu] = _less(compute, reading.compute_slices), _less(memory, own)
    cut = {reading.parent_uuid for reading in readings}
    found = []
    for row, reading in enumerate(readings):
        if reading.parent_uuid is None and reading.uuid not in cut and not reading.mig_enabled:
            found.append(UNKNOWN_SLICES)
            continue
        physical_gpu = physical_gpus.get(reading.parent_uuid or reading.uuid)
        compute, memory = (
            (reading.compute_slices, memory_slices[row])
            if reading.parent_uuid is not None
            else left[reading.uuid]
        )
        gpu_compute = None if physical_gpu is None else physical_gpu.compute_slices
        gpu_memory = None if physical_gpu is None else physical_gpu.memory_slices
        found.append(DeviceSlices(compute, memory, gpu_compute, gpu_memory))
    return found


def _own_slices(physical_gpu: GpuReading) -> DeviceSlices:
    """Return the slices of a GPU without instances, which are all slices of the board."""
    compute, memory = physical_gpu.compute_slices, physical_gpu.memory_slices
    return DeviceSlices(compute, memory, compute, memory)


def _less(number: int | None, part: int | None) -> int | None:
    return None if number is None or part is None else max(0, number - part)


class _Memory:
    """The summed memory of some rows; unknown memory counts as zero."""

    __slots__ = ("reserved", "total", "used")

    def __init__(self) -> None:
        self.total = self.used = self.reserved = 0

    def add(self, row: GpuReading, *, times: int = 1) -> None:
        """Add the memory of a row; with `times=-1`, subtract it."""
        self.total += times * (row.memory_total_bytes or 0)
        self.used += times * (row.memory_used_bytes or 0)
        self.reserved += times * (row.memory_reserved_bytes or 0)


def exclusive_readings(
    readings: Sequence[GpuReading], claims: Sequence[Sequence[Claim]]
) -> Sequence[GpuReading]:
    """Return a reading for each row, with only the row's own memory and busy time.

    Without instances, the readings are returned unchanged.
    """
    if not has_instances(readings):
        return readings
    own = list(readings)
    _leave_shared_memory_to_one(own, claims)
    parts_of: defaultdict[str, _Memory] = defaultdict(_Memory)
    for reading in own:
        if reading.parent_uuid is not None:
            parts_of[reading.parent_uuid].add(reading)
    for row, reading in enumerate(readings):
        parts = parts_of.get(reading.uuid)
        if parts is None:
            continue
        total, used = reading.memory_total_bytes, reading.memory_used_bytes
        reserved = reading.memory_reserved_bytes
        left = _with_memory(
            reading,
            # At least zero: rows are read one after the other, so their values may not match.
            total=None if total is None else max(0, total - parts.total),
            used=None if used is None else max(0, used - parts.used),
            reserved=None if reserved is None else max(0, reserved - parts.reserved),
            busy_ratio=None,
        )
        if reading.parent_uuid is not None:
            # An instance that has instances itself, although no driver reports this: count only its
            # remainder for its parent.
            parts_of[reading.parent_uuid].add(own[row], times=-1)
            parts_of[reading.parent_uuid].add(left)
        own[row] = left
    return own


def _leave_shared_memory_to_one(own: list[GpuReading], claims: Sequence[Sequence[Claim]]) -> None:
    """Keep the memory that compute instances share on the first row that reports this memory.

    Each other row of the same GPU instance gets only the memory of its own processes, so that this
    memory is booked there. `own` has the readings of the rows, and is changed in place.
    """
    gpu_instances: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for row, reading in enumerate(own):
        if reading.parent_uuid is not None and reading.gpu_instance is not None:
            gpu_instances[reading.parent_uuid, reading.gpu_instance].append(row)
    for rows in gpu_instances.values():
        keeper = next((row for row in rows if own[row].memory_total_bytes is not None), None)
        if keeper is None or len(rows) == 1:
            continue
        first = own[keeper]
        total, used = first.memory_total_bytes or 0, first.memory_used_bytes
        for row in rows:
            if row == keeper:
                continue
            # At most the remainder: the processes of several rows may report more than the total.
            used_bytes = min(total, sum(claim.memory_bytes or 0 for claim in claims[row]))
            total -= used_bytes
            used = None if used is None else max(0, used - used_bytes)
            busy_ratio = own[row].utilization_ratio
            own[row] = _with_memory(
                own[row], total=used_bytes, used=used_bytes, reserved=0, busy_ratio=busy_ratio
            )
        own[keeper] = _with_memory(
            first,
            total=total,
            used=used,
            reserved=first.memory_reserved_bytes,
            busy_ratio=first.utilization_ratio,
        )


def _with_memory(
    reading: GpuReading,
    *,
    total: int | None,
    used: int | None,
    reserved: int | None,
    busy_ratio: float | None,
) -> GpuReading:
    """Return a reading of the same row with these values; all other measured values are absent."""
    return GpuReading(
        uuid=reading.uuid,
        index=reading.index,
        parent_uuid=reading.parent_uuid,
        gpu_instance=reading.gpu_instance,
        utilization_ratio=busy_ratio,
        memory_total_bytes=total,
        memory_used_bytes=used,
        memory_reserved_bytes=reserved,
    )


def energy_by_row(readings: Sequence[GpuReading], interval_ns: int) -> list[Energy | None]:
    """Return the energy of each row; the energy of a GPU with instances is divided among its rows.

    If the memory or the busy time of an instance is unknown, the GPU's row keeps all energy. The
    energy of a GPU that does not report energy is `None`.
    """
    if not has_instances(readings):
        return [energy_of(reading, interval_ns) for reading in readings]
    gpus = {
        reading.uuid: row for row, reading in enumerate(readings) if reading.parent_uuid is None
    }
    instances: dict[int, list[int]] = {}
    for row, reading in enumerate(readings):
        gpu = gpus.get(reading.parent_uuid or "")
        if gpu is None:
            # A GPU, or an instance whose GPU is not in the tick: it keeps its own energy.
            instances.setdefault(row, [])
        else:
            instances.setdefault(gpu, []).append(row)
    found: list[Energy | None] = [None] * len(readings)
    for gpu, rows in instances.items():
        found[gpu] = physical_gpu = energy_of(readings[gpu], interval_ns)
        if physical_gpu is None or not rows:
            continue
        # Sorted by UUID, so that the order of the rows never decides ties.
        rows.sort(key=lambda row: readings[row].uuid)
        shared = _share_energy(
            physical_gpu, readings[gpu], [readings[row] for row in rows], interval_ns=interval_ns
        )
        for row, energy in zip([gpu, *rows], shared or [], strict=False):
            found[row] = energy
    return found


def _share_energy(
    physical_gpu: Energy, gpu: GpuReading, instances: Sequence[GpuReading], *, interval_ns: int
) -> list[Energy] | None:
    """Return the idle energy for the GPU's own row, then the energy of each instance.

    Return `None` if the memory or the busy time of an instance is unknown.
    """
    sizes = _memory_sizes(gpu, instances)
    if sizes is None:
        return None
    memory, of_instances = sizes
    worked = []
    slices = list(map(_compute_slices_of, instances))
    # If the slices of an instance are unknown, memory is the next best measure of its size.
    weights = of_instances if None in slices else slices
    for instance, weight in zip(instances, weights, strict=True):
        if instance.utilization_ratio is None:
            return None
        worked.append(parts_per_million(instance.utilization_ratio) * (weight or 0))
    # All values have one denominator, so that the division is exact.
    denominator = physical_gpu.floor_denominator
    floor, drawn = (
        physical_gpu.floor_numerator * interval_ns,
        physical_gpu.millijoules * denominator,
    )
    total = sum(worked)
    if not total:
        # No instance was busy: all energy is idle draw, and the divisor only has to be non-zero.
        floor, total = drawn, 1
    exact = [(memory - sum(of_instances)) * total * floor]
    exact += [
        size * total * floor + work * memory * (drawn - floor)
        for size, work in zip(of_instances, worked, strict=True)
    ]
    rest, *parts = divide(physical_gpu.millijoules, exact, 1, denominator * memory * total)
    return [
        Energy(
            0,
            0,
            1,
            physical_gpu.method,
            physical_gpu.idle_draw_milliwatts,
            physical_gpu.idle_draw_source,
            idle_millijoules=rest,
        ),
        *(
            # Because of rounding down, an instance may have a little less than its idle draw.
            Energy(part, part, interval_ns, physical_gpu.method)
            if size * floor > part * memory * denominator
            else Energy(part, size * floor, memory * denominator * interval_ns, physical_gpu.method)
            for part, size in zip(parts, of_instances, strict=True)
        ),
    ]


def _memory_sizes(gpu: GpuReading, instances: Sequence[GpuReading]) -> tuple[int, list[int]] | None:
    """Return the memory of the GPU and of each instance, in a unit that makes them whole numbers.

    Compute instances share the memory of their GPU instance equally. Return `None` if the memory of
    the GPU or of an instance is unknown.
    """
    totals = [instance.memory_total_bytes for instance in instances]
    if gpu.memory_total_bytes is None or None in totals:
        return None
    homes = [
        instance.uuid if instance.gpu_instance is None else instance.gpu_instance
        for instance in instances
    ]
    rows_of = Counter(homes)
    unit = lcm(*rows_of.values())
    own = [
        (total or 0) * (unit // rows_of[home]) for total, home in zip(totals, homes, strict=True)
    ]
    # At least 1, because the memory is a divisor. If all sizes are 0, every instance gets 0 of 1.
    return max(gpu.memory_total_bytes * unit, sum(own), 1), own


def _compute_slices_of(instance: GpuReading) -> int | None:
    """Return an instance's compute slices from its reading, otherwise from its MIG profile.

    Agents that do not read the slices yet report only the profile. Return `None` if both are
    unknown.
    """
    if instance.compute_slices is not None:
        return instance.compute_slices
    return compute_slices_of_profile(instance.mig_profile)


@lru_cache(maxsize=256)
def compute_slices_of_profile(profile: str | None) -> int | None:
    """Return the compute slices of a MIG profile such as `1c.3g.40gb`; `None` if unknown."""
    match = _PROFILE.match(profile or "")
    return int(match["compute"] or match["gpu"]) if match else None
