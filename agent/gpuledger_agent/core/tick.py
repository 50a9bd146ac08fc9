"""A tick: its rows (each GPU, and behind it its MIG instances), its clocks, and what it says.

Behind the rows of the GPUs that answered stand those of the known ones that did not, without
anything measured: who holds them holds them on.

Beside a tick stands the record of what was read and is not booked, in the same order.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec.structs import replace

from gpuledger.clock import NS_PER_MS, NS_PER_US
from gpuledger.records import GpuDetails, GpuReading, NodeReadings, NodeSample, ProcessRecord
from gpuledger_agent.core.normalize.driver_clock import LAG_WINDOWS
from gpuledger_agent.core.normalize.gpu import GpuTick
from gpuledger_agent.core.normalize.windows import LONGEST_WINDOW_US
from gpuledger_agent.core.raw import ClockReading, RawGpuSample

_SAME_LAG_RATIO: Final = 0.1


@dataclass(frozen=True, kw_only=True)
class NodeTick:
    """All that a node reports of one tick."""

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


class TickClock:
    """The intervals of one node's ticks: each begins where the one before it ended."""

    def __init__(self) -> None:
        self._before: ClockReading | None = None
        self._seq = 0
        self._has_begun = False
        self._due_lag_ns = 0
        self._lag_ns = 0

    @property
    def lag_ns(self) -> int:
        """How far an interval lies back, so that the driver has sampled all of it."""
        return self._lag_ns

    def follow(self, at: ClockReading) -> int | None:
        """Return the length of the interval that ends now; `None` where a first one opens."""
        before, self._before = self._before, at
        return None if before is None else max(1, at.monotonic_ns - before.monotonic_ns)

    def learn_lag(self, windows_us: Collection[float]) -> None:
        """Take over the lengths of the drivers' windows, of those that have shown."""
        if not windows_us:
            return
        due_ns = round(LAG_WINDOWS * min(max(windows_us), LONGEST_WINDOW_US) * NS_PER_US)
        # Lengths are measured: one that hardly differs is the same.
        if abs(due_ns - self._due_lag_ns) > _SAME_LAG_RATIO * self._due_lag_ns:
            self._due_lag_ns = due_ns
        if not self._has_begun:
            self._lag_ns = self._due_lag_ns

    def interval(self, at: ClockReading, length_ns: int) -> TickInterval:
        """Return the next tick's interval, which lies back so far that all of it is sampled.

        Where the lag changes intervals still meet: some are shorter then, or longer.
        """
        # Milliseconds since boot, but never the same twice, whatever a clock does.
        self._seq = max(at.boottime_ns // NS_PER_MS, self._seq + 1)
        self._has_begun = True
        step_ns = self._due_lag_ns - self._lag_ns
        step_ns = max(-(length_ns // 2), min(step_ns, length_ns // 2))
        self._lag_ns += step_ns
        length_ns -= step_ns
        end_ns = at.boottime_ns - self._lag_ns
        return TickInterval(
            seq=self._seq,
            begin_ns=end_ns - length_ns,
            end_ns=end_ns,
            time_ns=at.time_ns - self._lag_ns,
        )


def flatten(raw: Iterable[RawGpuSample]) -> list[RawGpuSample]:
    """Return the answers in the order of the tick's rows."""
    rows: list[RawGpuSample] = []
    for gpu in sorted(raw, key=lambda gpu: gpu.index):
        rows.append(gpu)
        # What the chip's counters measured of an instance came with the GPU's own.
        activity, profiling = gpu.instance_activity, gpu.instance_profiling
        rows += (
            replace(
                instance,
                **activity.get(instance.uuid, {}),
                **profiling.get(instance.uuid, {}),
            )
            for instance in gpu.instances
        )
    return rows


class NodeLayout:
    """The MIG instances of each GPU, as they were when it last answered."""

    def __init__(self) -> None:
        self._instances: Mapping[str, frozenset[str]] = {}
        """UUIDs of a GPU's instances, by the GPU's."""
        self._gpu_instances: Mapping[str, int] = {}
        """The driver's id of the GPU instance in which an instance is, by the instance's UUID."""
        self._relayouted: list[str] = []

    def update(self, raw: Sequence[RawGpuSample]) -> set[str]:
        """Take over what GPUs answered; return the instances that are gone from them, by UUID.

        Of a GPU that did not answer its instances stay: whether it was cut anew is unknown.
        """
        before = self._instances
        now = {gpu.uuid: frozenset(instance.uuid for instance in gpu.instances) for gpu in raw}
        self._relayouted += [gpu for gpu, found in now.items() if before.get(gpu, found) != found]
        self._instances = {**before, **now}
        gone = {uuid for gpu, found in now.items() for uuid in before.get(gpu, frozenset()) - found}
        kept = {uuid: id_ for uuid, id_ in self._gpu_instances.items() if uuid not in gone}
        self._gpu_instances = kept | {
            instance.uuid: instance.instance.gpu_instance
            for gpu in raw
            for instance in gpu.instances
            if instance.instance and instance.instance.gpu_instance is not None
        }
        return gone

    def devices_of(self, gpu_uuid: str, gpu_instance: int | None) -> Collection[str]:
        """Return the UUIDs of one GPU instance's devices; of all of the GPU's where none is known.

        `gpu_instance` is the driver's id of it on the GPU, `None` for the whole GPU.
        """
        instances = self._instances.get(gpu_uuid, frozenset())
        meant = {uuid for uuid in instances if self._gpu_instances.get(uuid, -1) == gpu_instance}
        return meant or {gpu_uuid, *instances}

    def drain_relayouted(self) -> list[str]:
        """Return the GPUs whose instances have changed since the last call, by UUID."""
        relayouted, self._relayouted = self._relayouted, []
        return relayouted


class LastRows:
    """The rows of each GPU in the last tick in which it answered: its own, then its instances'."""

    def __init__(self) -> None:
        self._rows: Mapping[str, Sequence[GpuReading]] = {}

    def update(self, readings: Iterable[GpuReading], *, known: Collection[str]) -> list[GpuReading]:
        """Take over the rows of a tick; return rows of the `known` GPUs that did not answer.

        Nothing is measured in these: they say which devices there are. GPUs that are neither known
        nor among the readings are forgotten.
        """
        answered: dict[str, list[GpuReading]] = {}
        for reading in readings:
            answered.setdefault(reading.parent_uuid or reading.uuid, []).append(reading)
        remembered = {uuid: rows for uuid, rows in self._rows.items() if uuid in known}
        self._rows = {**remembered, **answered}
        return [
            _without_measurements(row)
            for uuid, rows in remembered.items()
            if uuid not in answered
            for row in rows
        ]


def _without_measurements(reading: GpuReading) -> GpuReading:
    """Return the row of a device that did not answer: what identifies it, and no measurement."""
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
