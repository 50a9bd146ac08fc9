"""The latest values of a node's GPUs for the page `/metrics`, without outdated values.

Each tick updates the values. If a GPU does not answer for several ticks, its readings are no longer
shown. Values that are not queried in each tick are kept until their next reading, but only for a
limited time. A MIG instance is removed as soon as its GPU answers without it. Events are kept
longer than readings: a GPU that is in the inventory, or that the driver has lost, is still shown as
an unresponsive device.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from msgspec.structs import fields, replace

from gpuledger.clock import NS_PER_SECOND, Clock
from gpuledger.records import (
    GpuDetails,
    GpuFacts,
    GpuProfiling,
    GpuReading,
    Incident,
    Inventory,
    NodeReadings,
    NodeSample,
    ProcessChange,
    ProcessRecord,
)
from gpuledger_agent.exposition.device import GpuEventHistory, NvlinkRates, ShownDevice
from gpuledger_agent.exposition.pod_lookup import NO_PODS, PodLookup, TickContainers
from gpuledger_agent.metrics import PROCESS_SERIES_DROPPED
from gpuledger_agent.settings import ExpositionSettings

_PACED_PARTS: Final = ("traffic", "throttling")
_SLOW_PARTS: Final = ("health", "limits")
_OWN: Final = tuple(
    each.name
    for each in fields(GpuDetails)
    if each.name not in ("uuid", "resets", "profiling", *_PACED_PARTS, *_SLOW_PARTS)
)
"""The fields of `GpuDetails` that are not nested records."""
_MEASURED: Final = tuple(each.name for each in fields(GpuProfiling))
_MIN_TICKS: Final = 3
_MAX_GPUS: Final = 256


@dataclass(slots=True)
class DeviceState:
    """One device's newest readings, each with the monotonic time at which it was read."""

    reading: GpuReading
    seen_ns: int
    parts: dict[str, tuple[int, Any]] = field(default_factory=dict)
    own: dict[str, tuple[int, Any]] = field(default_factory=dict)
    """The fields of `GpuDetails` that are not nested records, each with the time of its reading."""
    measured: dict[str, tuple[int, Any]] = field(default_factory=dict)
    """The fields of `GpuProfiling`, each with the time of its reading, because not all are read in
    each tick."""
    rates: NvlinkRates = field(default_factory=NvlinkRates)

    def update(self, reading: GpuReading, details: GpuDetails | None, now_ns: int) -> None:
        """Record a tick's values; keep earlier values that the tick does not contain."""
        self.reading, self.seen_ns = reading, now_ns
        if details is None:
            return
        for name in (*_PACED_PARTS, *_SLOW_PARTS):
            part = getattr(details, name)
            if part is not None:
                self.parts[name] = (now_ns, part)
        _record(self.own, details, _OWN, now_ns)
        if details.profiling:
            _record(self.measured, details.profiling, _MEASURED, now_ns)
        self.rates.update(details.traffic, details.health, at_ns=now_ns)

    def fresh_parts(self, *, paced_ns: int, slow_ns: int) -> dict[str, Any]:
        """Return the parts of `ShownDevice` that are not outdated, by name.

        Health and limits are returned if they were read since `slow_ns`, and all other parts if
        they were read since `paced_ns`. Both are times on the monotonic clock. The part `details`
        contains the fields of `GpuDetails` that are not nested records.
        """
        found = {
            name: part
            for name, (read_ns, part) in self.parts.items()
            if read_ns >= (slow_ns if name in _SLOW_PARTS else paced_ns)
        }
        if measured := _fresh(self.measured, paced_ns):
            found["profiling"] = GpuProfiling(**measured)
        if own := _fresh(self.own, paced_ns):
            found["details"] = GpuDetails(uuid=self.reading.uuid, **own)
        return found


def _record(
    known: dict[str, tuple[int, Any]], record: msgspec.Struct, names: Iterable[str], now_ns: int
) -> None:
    for name in names:
        value = getattr(record, name)
        if value is not None:
            known[name] = (now_ns, value)


def _fresh(known: Mapping[str, tuple[int, Any]], since_ns: int) -> dict[str, Any]:
    return {name: value for name, (read_ns, value) in known.items() if read_ns >= since_ns}


def position(reading: GpuReading) -> tuple[int, int, int]:
    """Return a device's sort key: GPUs by index, each followed by its MIG instances."""
    if reading.parent_uuid is None:
        return reading.index, -1, -1
    return reading.index, reading.gpu_instance or 0, reading.compute_instance or 0


def make_node_state(
    settings: ExpositionSettings,
    *,
    clock: Clock,
    sampling_interval_seconds: float,
    readings_seconds: float = 0.0,
    pods: PodLookup = NO_PODS,
) -> "NodeState":
    """Return a node state without values, created from the settings."""
    stale_seconds = max(settings.stale_seconds, _MIN_TICKS * sampling_interval_seconds)
    return NodeState(
        clock=clock,
        stale_seconds=stale_seconds,
        paced_stale_seconds=max(stale_seconds, _MIN_TICKS * readings_seconds),
        slow_stale_seconds=max(settings.slow_stale_seconds, _MIN_TICKS * sampling_interval_seconds),
        event_window_seconds=settings.event_window_seconds,
        max_processes=settings.max_process_series if settings.process_series else None,
        pods=pods,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The values of one node to show on the page at one instant."""

    sample: NodeSample
    """The newest tick; without processes and allocations if it is too old."""
    devices: list[ShownDevice]
    """The devices in the order of `position`, including unresponsive GPUs."""
    tick_containers: TickContainers
    """The newest tick's containers, and the allocations of its devices."""
    commands: Mapping[int, str]
    """The kernel's names of the processes' programs, by pid."""
    events: Mapping[str, tuple[str, GpuEventHistory]]
    """Index and events of each GPU, by UUID, including unresponsive GPUs."""
    since_ns: int
    """Start of the time window in which recent events are counted, on the monotonic clock."""


class NodeState:
    """The newest values of one node's GPUs; `snapshot` returns those that are not too old."""

    def __init__(
        self,
        *,
        clock: Clock,
        stale_seconds: float,
        paced_stale_seconds: float | None = None,
        slow_stale_seconds: float,
        event_window_seconds: float = 300.0,
        max_processes: int | None = None,
        pods: PodLookup = NO_PODS,
    ) -> None:
        """Create an empty state.

        A value is shown for a limited time after it was read: values of each tick for
        `stale_seconds`, values read every few seconds for `paced_stale_seconds` (by default
        `stale_seconds`), health and limits for `slow_stale_seconds`. `max_processes` is the maximum
        number of processes shown; `None` means that no processes are shown.
        """
        self._clock = clock
        self._max_processes = max_processes
        self._stale_ns = round(stale_seconds * NS_PER_SECOND)
        paced_seconds = stale_seconds if paced_stale_seconds is None else paced_stale_seconds
        self._paced_stale_ns = round(paced_seconds * NS_PER_SECOND)
        self._slow_stale_ns = round(slow_stale_seconds * NS_PER_SECOND)
        self._window_ns = round(event_window_seconds * NS_PER_SECOND)
        self._sample: NodeSample | None = None
        self._shown_ns = 0
        self._device_states: dict[str, DeviceState] = {}
        self._events: dict[str, GpuEventHistory] = {}
        self._commands: dict[int, str] = {}
        self._inventory: Inventory | None = None
        self._facts: dict[str, GpuFacts] = {}
        self._lost: dict[str, None] = {}
        self._pods = pods
        self.version = 0
        """A number that increases with each change of the state."""

    def update(
        self,
        sample: NodeSample,
        readings: NodeReadings | None = None,
        *,
        processes: Iterable[ProcessRecord] = (),
    ) -> None:
        """Record a tick: its sample, its other readings and the changes of its processes."""
        now_ns = self._clock.monotonic_ns()
        self.version += 1
        self._sample, self._shown_ns = sample, now_ns
        details = {gpu.uuid: gpu for gpu in readings.gpus} if readings else {}
        answered = [reading for reading in sample.gpus if not reading.unresponsive]
        for reading in answered:
            self._update_device(reading, details.get(reading.uuid), now_ns)
        # After all updates, because an instance is gone only if its GPU answered without it.
        self._forget({reading.uuid for reading in answered}, now_ns)
        for record in processes:
            if record.change is ProcessChange.ENDED:
                self._commands.pop(record.pid, None)
            elif record.command:
                self._commands[record.pid] = record.command
        if self._max_processes is not None:
            running = sum(not process.ended for process in sample.processes)
            PROCESS_SERIES_DROPPED.inc(max(0, running - self._max_processes))

    def set_inventory(self, inventory: Inventory) -> None:
        """Replace the node's inventory."""
        self.version += 1
        self._inventory = inventory
        # A reopened library does not list lost GPUs, so keep their facts.
        lost = {uuid: self._facts[uuid] for uuid in self._lost if uuid in self._facts}
        self._facts = lost | {gpu.uuid: gpu for gpu in inventory.gpus}

    def record_incident(self, incident: Incident) -> None:
        """Count an incident; if a GPU is lost or has recovered, record that too."""
        self.version += 1
        if incident.kind == "gpu_lost" and len(self._lost) < _MAX_GPUS:
            self._lost[incident.gpu_uuid] = None
        elif incident.kind == "gpu_recovered":
            self._lost.pop(incident.gpu_uuid, None)
        events = self._events_of(incident.gpu_uuid)
        if events:
            events.record_incident(incident, at_ns=self._clock.monotonic_ns())

    def snapshot(self) -> Snapshot | None:
        """Return the values that are not too old; `None` before the first tick."""
        if self._sample is None:
            return None
        now_ns = self._clock.monotonic_ns()
        sample = self._sample
        if self._shown_ns < now_ns - self._stale_ns:
            # The sample is too old to show which processes use the GPUs now.
            sample = replace(
                sample, containers=[], processes=[], allocations=[], job_allocations=None
            )
        known = {uuid: gpu.index for uuid, gpu in self._facts.items()}
        known |= {uuid: state.reading.index for uuid, state in self._device_states.items()}
        return Snapshot(
            sample=sample,
            devices=self._devices(now_ns),
            tick_containers=TickContainers(sample, self._pods),
            commands=self._commands,
            # A GPU that was never sampled or listed has an empty index.
            events={
                uuid: (str(known.get(uuid, "")), events) for uuid, events in self._events.items()
            },
            since_ns=now_ns - self._window_ns,
        )

    def _devices(self, now_ns: int) -> list[ShownDevice]:
        """Return the devices that answer and the known GPUs that do not, sorted by position."""
        paced_ns, slow_ns = now_ns - self._paced_stale_ns, now_ns - self._slow_stale_ns
        answering = [
            ShownDevice(
                reading=state.reading,
                facts=self._facts.get(state.reading.parent_uuid or state.reading.uuid),
                node=self._inventory,
                # Events are shown only for the GPU, not for its instances.
                events=self._events_of(state.reading.uuid)
                if state.reading.parent_uuid is None
                else None,
                rates=state.rates,
                is_lost=state.reading.uuid in self._lost,
                **state.fresh_parts(paced_ns=paced_ns, slow_ns=slow_ns),
            )
            for state in self._device_states.values()
            if state.seen_ns >= now_ns - self._stale_ns
        ]
        uuids = {device.reading.uuid for device in answering}
        unresponsive = [
            ShownDevice(
                reading=GpuReading(uuid=facts.uuid, index=facts.index, model=facts.model),
                facts=facts,
                node=self._inventory,
                events=self._events_of(facts.uuid),
                is_unresponsive=True,
                is_lost=facts.uuid in self._lost,
            )
            for facts in self._facts.values()
            if facts.uuid not in uuids
        ]
        return sorted([*answering, *unresponsive], key=lambda device: position(device.reading))

    def _update_device(self, reading: GpuReading, details: GpuDetails | None, now_ns: int) -> None:
        state = self._device_states.get(reading.uuid)
        if state is None:
            state = self._device_states[reading.uuid] = DeviceState(reading, now_ns)
        state.update(reading, details, now_ns)
        throttling = details and details.throttling
        if throttling and throttling.reasons is not None:
            events = self._events_of(reading.uuid)
            if events:
                events.record_reasons(throttling.reasons, at_ns=now_ns)

    def _forget(self, present: Collection[str], now_ns: int) -> None:
        """Forget devices that have not answered for too long, and instances that are gone."""
        self._device_states = {
            uuid: state
            for uuid, state in self._device_states.items()
            if uuid in present
            # An instance is forgotten at once if its GPU answers without it.
            or (
                state.reading.parent_uuid not in present
                and state.seen_ns >= now_ns - self._stale_ns
            )
        }

    def _events_of(self, uuid: str) -> GpuEventHistory | None:
        # Limited in number, because incidents may name any UUID.
        if uuid not in self._events and len(self._events) < _MAX_GPUS:
            self._events[uuid] = GpuEventHistory()
        return self._events.get(uuid)
