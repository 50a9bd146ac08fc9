"""A tick: its rows (each GPU, and behind it its MIG instances), its clocks, and what it says.

Behind the rows of the GPUs that answered stand those of the known ones that did not, without
anything measured: who holds them holds them on.

Beside a tick stands the record of what was read and is not booked, in the same order.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from agent.core.normalize.gpu import GpuTick
from agent.core.raw import RawGpuSample
from gpuledger.records import GpuDetails, GpuReading, NodeReadings, NodeSample, ProcessRecord


@dataclass(frozen=True, kw_only=True)
class NodeTick:
    """What a node says of one tick."""

    sample: NodeSample
    """The readings from which it is booked, and what runs."""
    readings: NodeReadings
    """All other readings."""
    processes: list[ProcessRecord]
    """What happened to the processes."""
    relayouted: Sequence[str] = ()
    """The GPUs whose MIG instances are not those of the tick before, by UUID."""


class TickInterval(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The time that one tick covers."""

    seq: int
    """The tick's number."""
    begin_ns: int
    """Where it begins, since boot."""
    end_ns: int
    """Where it ends, since boot."""
    time_ns: int
    """Where it ends, since the epoch."""

    @property
    def from_time_ns(self) -> int:
        """Where it begins, since the epoch."""
        return self.time_ns - (self.end_ns - self.begin_ns)

    @property
    def length_ns(self) -> int:
        """How long it is."""
        return self.end_ns - self.begin_ns


class Clocks(Protocol):
    """The clocks of a machine; one that can also wait is no part of the core."""

    def time_ns(self) -> int:
        """Nanoseconds since the epoch."""

    def monotonic_ns(self) -> int:
        """Nanoseconds of a clock that is never set."""

    def boottime_ns(self) -> int:
        """Nanoseconds since boot."""


@dataclass(frozen=True, kw_only=True)
class ClockReading:
    """The clocks at one instant."""

    time_ns: int
    """Since the epoch."""
    monotonic_ns: int
    """Of the clock that is never set."""
    boottime_ns: int
    """Since boot."""

    @classmethod
    def read(cls, clock: Clocks) -> "ClockReading":
        """Read all clocks."""
        return cls(
            time_ns=clock.time_ns(),
            monotonic_ns=clock.monotonic_ns(),
            boottime_ns=clock.boottime_ns(),
        )


Layout = Mapping[str, frozenset[str]]
"""The UUIDs of each GPU's instances."""


def flatten(raw: Iterable[RawGpuSample]) -> list[RawGpuSample]:
    """Return the answers in the order of the tick's rows."""
    rows: list[RawGpuSample] = []
    for gpu in sorted(raw, key=lambda gpu: gpu.index):
        rows.append(gpu)
        # What the chip's counters measured of an instance came with the GPU's own.
        measured = gpu.instance_profiling
        rows += (replace(instance, **measured.get(instance.uuid, {})) for instance in gpu.instances)
    return rows


def layout_of(raw: Iterable[RawGpuSample]) -> Layout:
    """Return which instances there are."""
    return {gpu.uuid: frozenset(instance.uuid for instance in gpu.instances) for gpu in raw}


def gpu_instances_of(raw: Iterable[RawGpuSample]) -> dict[str, int]:
    """Return the driver's id of the GPU instance in which each instance is, where it is known."""
    return {
        instance.uuid: instance.instance.gpu_instance
        for gpu in raw
        for instance in gpu.instances
        if instance.instance and instance.instance.gpu_instance is not None
    }


def find_vanished(before: Layout, raw: Iterable[RawGpuSample]) -> set[str]:
    """Return the instances that are gone from GPUs that answered: nothing runs in them any more."""
    # Only of those that answered: of a silent GPU nobody knows whether it was cut anew.
    now = layout_of(raw)
    return {uuid for gpu, found in now.items() for uuid in before.get(gpu, frozenset()) - found}


def find_relayouted(before: Layout, raw: Iterable[RawGpuSample]) -> list[str]:
    """Return the GPUs whose instances are not those that they were."""
    now = layout_of(raw)
    return [gpu for gpu, found in now.items() if before.get(gpu, found) != found]


def by_board(readings: Iterable[GpuReading]) -> Mapping[str, Sequence[GpuReading]]:
    """Return the readings of each GPU, its own first, by its UUID."""
    found: dict[str, list[GpuReading]] = {}
    for reading in readings:
        found.setdefault(reading.parent_uuid or reading.uuid, []).append(reading)
    return found


def silence(reading: GpuReading) -> GpuReading:
    """Return the row of a device that does not answer: which one it is, and nothing measured."""
    return GpuReading(
        uuid=reading.uuid,
        index=reading.index,
        model=reading.model,
        parent_uuid=reading.parent_uuid,
        gpu_instance=reading.gpu_instance,
        compute_instance=reading.compute_instance,
        mig_profile=reading.mig_profile,
        mig_enabled=reading.mig_enabled,
        compute_slices=reading.compute_slices,
        memory_slices=reading.memory_slices,
        silent=True,
    )


def read_details(sample: NodeSample, ticks: Sequence[GpuTick]) -> NodeReadings:
    """Return the other readings under the identity of the sample; a GPU without any is left out."""
    details = [tick.details for tick in ticks]
    return NodeReadings(
        cluster=sample.cluster,
        node=sample.node,
        boot_id=sample.boot_id,
        seq=sample.seq,
        time_ns=sample.time_ns,
        interval_ns=sample.interval_ns,
        gpus=[gpu for gpu in details if gpu != GpuDetails(uuid=gpu.uuid)],
    )
