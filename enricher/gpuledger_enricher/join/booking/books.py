"""The books of a tick: for each row the entries that sum to it. Pure.

How it works. A tick has a row for each GPU, and on a GPU that is cut by MIG one for each instance
behind it. The rows of such a GPU overlap: its own row has the whole board's memory and energy, and
compute instances of one GPU instance all have the memory of that. So before a row is booked
(`shares`), everything is left to one row alone:

- memory (`exclusive_readings`): of compute instances that share it, the first one that has it keeps
  it, less what processes hold on the others; the GPU's own row keeps what no instance has;
- busy time: the instances'; the GPU's own row has none, as it would count twice;
- energy (`energy_by_row`): a driver gives the board's alone. What the board would draw idle goes by
  the memory of each instance, what it drew beyond that by the compute slices that were busy; each
  instance has a whole number of it, of which its own entries are made.

Each step reads every row a bounded number of times, as a tick may have very many.
Names and labels of pods are `gpuledger_enricher.join.pods`' subject, and change nothing here.
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
    """Return the books of each GPU of the tick, in the tick's order.

    Raises `IndexError` where a process points to a GPU or a container that the tick has not, and
    `RepeatedContainerError` where a container stands in it twice.
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
    """Return whether one of the rows is of a MIG instance."""
    for reading in readings:  # noqa: SIM110 - any() costs three times as much, for each tick
        if reading.parent_uuid is not None:
            return True
    return False


def slices_by_row(readings: Sequence[GpuReading]) -> list[DeviceSlices]:
    """Return how much of its board each row is; a cut GPU's own row is what no instance has.

    Of a GPU that is not cut its reading says it all: nothing is said again.
    """
    if not has_instances(readings):
        return [
            _own_slices(reading) if reading.mig_enabled else UNKNOWN_SLICES for reading in readings
        ]
    physical_gpus = {reading.uuid: reading for reading in readings if reading.parent_uuid is None}
    # What is left of each board; unknown where that of one of its instances is.
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
    """Return the slices of a GPU without instances: all of its board's."""
    compute, memory = physical_gpu.compute_slices, physical_gpu.memory_slices
    return DeviceSlices(compute, memory, compute, memory)


def _less(number: int | None, part: int | None) -> int | None:
    return None if number is None or part is None else max(0, number - part)


class _Memory:
    """The memory of some rows, summed up; what is not known counts as none."""

    __slots__ = ("reserved", "total", "used")

    def __init__(self) -> None:
        self.total = self.used = self.reserved = 0

    def add(self, row: GpuReading, *, times: int = 1) -> None:
        """Add what a row has; -1 times to take it out again."""
        self.total += times * (row.memory_total_bytes or 0)
        self.used += times * (row.memory_used_bytes or 0)
        self.reserved += times * (row.memory_reserved_bytes or 0)


def exclusive_readings(
    readings: Sequence[GpuReading], claims: Sequence[Sequence[Claim]]
) -> Sequence[GpuReading]:
    """Return, for each row, a reading of only what is its own: memory and busy time.

    On a GPU without instances that is the reading itself.
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
            # Never below nothing: the rows are read one after the other, and need not agree.
            total=None if total is None else max(0, total - parts.total),
            used=None if used is None else max(0, used - parts.used),
            reserved=None if reserved is None else max(0, reserved - parts.reserved),
            busy_ratio=None,
        )
        if reading.parent_uuid is not None:
            # A part that has parts, as no driver says: whose part it is must count what is left.
            parts_of[reading.parent_uuid].add(own[row], times=-1)
            parts_of[reading.parent_uuid].add(left)
        own[row] = left
    return own


def _leave_shared_memory_to_one(own: list[GpuReading], claims: Sequence[Sequence[Claim]]) -> None:
    """Leave the memory that compute instances share to the first row that has it.

    The others have what processes hold there, so that these are booked where they run.
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
            # Never more than is left: the processes of several rows may claim more than there is.
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
    """Return what is booked of a row; readings that are the board's are left out."""
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
    """Return the energy of each row, that of a GPU divided among the rows of its instances.

    Where the memory or the busy time of one of them is not known, the GPU's row keeps it all.
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
            # A GPU, or an instance whose GPU is not in the tick: it stands for itself.
            instances.setdefault(row, [])
        else:
            instances.setdefault(gpu, []).append(row)
    found: list[Energy | None] = [None] * len(readings)
    for gpu, rows in instances.items():
        found[gpu] = physical_gpu = energy_of(readings[gpu], interval_ns)
        if physical_gpu is None or not rows:
            continue
        # Ties go by what the rows are, never by their order.
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
    """Return what stays with the GPU's own row, as idle's, and behind it what each instance has."""
    sizes = _memory_sizes(gpu, instances)
    if sizes is None:
        return None
    memory, of_instances = sizes
    worked = []
    slices = list(map(_compute_slices_of, instances))
    # Without the slices of all of them, memory is the next best measure of an instance's size.
    weights = of_instances if None in slices else slices
    for instance, weight in zip(instances, weights, strict=True):
        if instance.utilization_ratio is None:
            return None
        worked.append(parts_per_million(instance.utilization_ratio) * (weight or 0))
    # All of it over one denominator, so that what is divided is exact.
    denominator = physical_gpu.floor_denominator
    floor, drawn = (
        physical_gpu.floor_numerator * interval_ns,
        physical_gpu.millijoules * denominator,
    )
    total = sum(worked)
    if not total:
        # Nobody worked: all that was drawn is the floor, and the divisor only has to be one.
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
            # Rounded down, an instance may have a little less than its part of the floor.
            Energy(part, part, interval_ns, physical_gpu.method)
            if size * floor > part * memory * denominator
            else Energy(part, size * floor, memory * denominator * interval_ns, physical_gpu.method)
            for part, size in zip(parts, of_instances, strict=True)
        ),
    ]


def _memory_sizes(gpu: GpuReading, instances: Sequence[GpuReading]) -> tuple[int, list[int]] | None:
    """Return the memory of all and of each instance, in a unit that makes whole numbers of it.

    Compute instances share that of their GPU instance equally.
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
    # Nothing at all is a whole of which all have none.
    return max(gpu.memory_total_bytes * unit, sum(own), 1), own


def _compute_slices_of(instance: GpuReading) -> int | None:
    """Return an instance's compute slices: by the driver, as its held time; else by its profile.

    An agent that does not read them yet says the profile alone.
    """
    if instance.compute_slices is not None:
        return instance.compute_slices
    return compute_slices_of_profile(instance.mig_profile)


@lru_cache(maxsize=256)
def compute_slices_of_profile(profile: str | None) -> int | None:
    """Return the compute slices of a profile such as `1g.10gb` or `1c.3g.40gb`; None of another."""
    match = _PROFILE.match(profile or "")
    return int(match["compute"] or match["gpu"]) if match else None
