"""What the node knows now, for its page: each tick replaces it, and what is too old goes.

Here readings age. Of a GPU that has been silent for some ticks no reading is shown any more, a slow
reading is kept until its next one but not for ever, and an instance goes with its layout. What
happened to a GPU outlives its readings: one that is in the inventory, or that the driver has lost,
stays as a silent device.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from agent.exposition.device_state import DeviceState, place
from agent.exposition.devices import ShownDevice
from agent.exposition.events import GpuEvents
from agent.exposition.holders import ContainerLookup, NamedContainer
from agent.exposition.settings import ExpositionSettings
from agent.metrics import PROCESS_SERIES_DROPPED
from gpuledger.clock import Clock
from gpuledger.records import (
    GpuDetails,
    GpuFacts,
    GpuReading,
    Incident,
    Inventory,
    NodeReadings,
    NodeSample,
    ProcessChange,
    ProcessRecord,
)

_MIN_TICKS: Final = 3
_MAX_GPUS: Final = 256


def make_view(
    settings: ExpositionSettings,
    *,
    clock: Clock,
    tick_seconds: float,
    names: ContainerLookup | None = None,
) -> "NodeState":
    """Make the view that the settings ask for."""
    return NodeState(
        clock=clock,
        stale_seconds=max(settings.stale_seconds, _MIN_TICKS * tick_seconds),
        slow_stale_seconds=max(settings.slow_stale_seconds, _MIN_TICKS * tick_seconds),
        event_window_seconds=settings.event_window_seconds,
        max_processes=settings.max_process_series if settings.process_series else None,
        names=names,
    )


class NoNames:
    """Knows no container."""

    def name_of(self, container_id: str) -> NamedContainer | None:  # noqa: ARG002  # it knows none
        """Return `None`."""
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """What the page says at one instant."""

    sample: NodeSample
    """The newest tick."""
    devices: list[ShownDevice]
    """What is known of each device; of a silent one what happened to it."""
    names: ContainerLookup
    """Who knows the tick's containers."""
    commands: Mapping[int, str]
    """The kernel's name of each process, by pid."""
    events: Mapping[str, tuple[str, GpuEvents]]
    """What happened to each GPU, with its index, by UUID: also of those that are silent."""
    since_ns: int
    """Where the window of recent events begins, by the clock that never goes back."""


class NodeState:
    """The newest of everything, as far as it is not too old."""

    def __init__(
        self,
        *,
        clock: Clock,
        stale_seconds: float,
        slow_stale_seconds: float,
        event_window_seconds: float = 300.0,
        max_processes: int | None = None,
        names: ContainerLookup | None = None,
    ) -> None:
        """Take for how long readings are shown, and how many processes (`None`: none are)."""
        self._clock = clock
        self._max_processes = max_processes
        self._stale_ns = round(stale_seconds * 1e9)
        self._slow_stale_ns = round(slow_stale_seconds * 1e9)
        self._window_ns = round(event_window_seconds * 1e9)
        self._sample: NodeSample | None = None
        self._shown_ns = 0
        self._kept: dict[str, DeviceState] = {}
        self._events: dict[str, GpuEvents] = {}
        self._commands: dict[int, str] = {}
        self._inventory: Inventory | None = None
        self._facts: dict[str, GpuFacts] = {}
        self._lost: dict[str, None] = {}
        self._names = names or NoNames()
        self.version = 0
        """Rises with whatever is shown."""

    def show(
        self,
        sample: NodeSample,
        readings: NodeReadings | None = None,
        *,
        inventory: Inventory | None = None,
        incidents: Iterable[Incident] = (),
        names: ContainerLookup | None = None,
        processes: Iterable[ProcessRecord] = (),
    ) -> None:
        """Take a tick with what else is known then; `inventory` and `names` stay until new ones."""
        now_ns = self._clock.monotonic_ns()
        self.version += 1
        self._sample, self._shown_ns = sample, now_ns
        self._names = names or self._names
        if inventory is not None and inventory is not self._inventory:
            self.equip(inventory)
        details = {one.uuid: one for one in readings.gpus} if readings else {}
        for reading in sample.gpus:
            self._take(reading, details.get(reading.uuid), now_ns)
        self._forget(sample, now_ns)
        for incident in incidents:
            self.tell(incident)
        for record in processes:
            self._know(record)
        self._count_left_out(sample)

    def equip(self, inventory: Inventory) -> None:
        """Take what the node is built of, until the next time."""
        self.version += 1
        self._inventory = inventory
        # The library does not list a lost GPU when it is opened again, so what it was is kept.
        lost = {uuid: self._facts[uuid] for uuid in self._lost if uuid in self._facts}
        self._facts = lost | {gpu.uuid: gpu for gpu in inventory.gpus}

    def tell(self, incident: Incident) -> None:
        """Count an incident."""
        self.version += 1
        if incident.kind == "gpu_lost" and len(self._lost) < _MAX_GPUS:
            self._lost[incident.gpu_uuid] = None
        elif incident.kind == "gpu_recovered":
            self._lost.pop(incident.gpu_uuid, None)
        events = self._events_of(incident.gpu_uuid)
        if events:
            events.note_incident(incident, at_ns=self._clock.monotonic_ns())

    def snapshot(self) -> Snapshot | None:
        """Return what is not too old now; `None` before the first tick."""
        if self._sample is None:
            return None
        now_ns = self._clock.monotonic_ns()
        kept = [one for one in self._kept.values() if one.seen_ns >= now_ns - self._stale_ns]
        sample = self._sample
        if self._shown_ns < now_ns - self._stale_ns:
            # Nobody knows who is on the GPUs by now.
            sample = replace(sample, containers=[], processes=[], allocations=[])
        return Snapshot(
            sample=sample,
            devices=self._devices(kept, now_ns),
            names=self._names,
            commands=self._commands,
            events={uuid: (self._index_of(uuid), one) for uuid, one in self._events.items()},
            since_ns=now_ns - self._window_ns,
        )

    def _devices(self, kept: Iterable[DeviceState], now_ns: int) -> list[ShownDevice]:
        """Return the devices that answer, and the GPUs that are known and do not, by index."""
        answering = [self._device(one, now_ns) for one in kept]
        uuids = {device.reading.uuid for device in answering}
        silent = [self._silent(gpu) for gpu in self._facts.values() if gpu.uuid not in uuids]
        return sorted([*answering, *silent], key=lambda device: place(device.reading))

    def _silent(self, facts: GpuFacts) -> ShownDevice:
        return ShownDevice(
            reading=GpuReading(uuid=facts.uuid, index=facts.index, model=facts.model),
            facts=facts,
            node=self._inventory,
            events=self._events_of(facts.uuid),
            is_silent=True,
            is_lost=facts.uuid in self._lost,
        )

    def _index_of(self, uuid: str) -> str:
        """Return the last known index of a GPU; empty where none is known."""
        known = self._kept.get(uuid)
        facts = known.reading if known else self._facts.get(uuid)
        return str(facts.index) if facts else ""

    def _take(self, reading: GpuReading, details: GpuDetails | None, now_ns: int) -> None:
        kept = self._kept.get(reading.uuid)
        if kept is None:
            kept = self._kept[reading.uuid] = DeviceState(reading, details, now_ns)
        kept.take(reading, details, now_ns)
        throttling = details and details.throttling
        if throttling and throttling.reasons is not None:
            events = self._events_of(reading.uuid)
            if events:
                events.note_reasons(throttling.reasons, at_ns=now_ns)

    def _forget(self, sample: NodeSample, now_ns: int) -> None:
        """Drop what is silent for too long, and instances that their GPU has no more."""
        present = {reading.uuid for reading in sample.gpus}
        self._kept = {
            uuid: one
            for uuid, one in self._kept.items()
            if uuid in present
            or (one.reading.parent_uuid not in present and one.seen_ns >= now_ns - self._stale_ns)
        }

    def _events_of(self, uuid: str) -> GpuEvents | None:
        if uuid not in self._events and len(self._events) < _MAX_GPUS:
            self._events[uuid] = GpuEvents()
        return self._events.get(uuid)

    def _know(self, record: ProcessRecord) -> None:
        if record.change is ProcessChange.ENDED:
            self._commands.pop(record.pid, None)
        elif record.command:
            self._commands[record.pid] = record.command

    def _count_left_out(self, sample: NodeSample) -> None:
        if self._max_processes is not None:
            running = sum(not process.ended for process in sample.processes)
            PROCESS_SERIES_DROPPED.inc(max(0, running - self._max_processes))

    def _device(self, kept: DeviceState, now_ns: int) -> ShownDevice:
        reading = kept.reading
        is_gpu = reading.parent_uuid is None
        return ShownDevice(
            reading=reading,
            details=kept.details,
            facts=self._facts.get(reading.parent_uuid or reading.uuid),
            node=self._inventory,
            events=self._events_of(reading.uuid) if is_gpu else None,
            rates=kept.rates,
            is_lost=reading.uuid in self._lost,
            **kept.fresh_parts(
                fast_ns=now_ns - self._stale_ns, slow_ns=now_ns - self._slow_stale_ns
            ),
        )
