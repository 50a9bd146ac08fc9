"""The incident monitor: turns detections from all sources into incidents and reports them at once.

Detections come from the driver's events (in their own thread), from the kernel log, from the
readings, and from the agent, which detects lost GPUs and restarts of the driver. Each detection
that is not a duplicate becomes an incident, with the processes on the GPU at that time and the
containers to which the GPU is allocated. Each incident is logged, but equal ones only once a
minute.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

import structlog

from gpuledger.clock import NS_PER_SECOND, Clock
from gpuledger.keys import NodeId
from gpuledger.records import DeviceAllocation, GpuDetails, Incident, IncidentProcess, Severity
from gpuledger.runtime import Backoff, Check
from gpuledger.runtime.logs import Repeats
from gpuledger_agent.core.health_changes import HealthChange, HealthWatch, RecentEvents
from gpuledger_agent.core.incidents import WINDOW_NS, Deduplicator, Detection, make_incident
from gpuledger_agent.gpu.event_thread import EventThread
from gpuledger_agent.gpu.protocol import GpuIdentity, GpuSource
from gpuledger_agent.host.kmsg import Kmsg, KmsgReader
from gpuledger_agent.metrics import (
    EVENT_SET_FAILURES,
    INCIDENTS,
    INCIDENTS_DROPPED,
    INCIDENTS_DUPLICATE,
)

_LEVELS: Final = {
    Severity.INFO: logging.INFO,
    Severity.WARNING: logging.WARNING,
    Severity.CRITICAL: logging.ERROR,
}
_log = structlog.get_logger(__name__)


SOURCE: Final = "agent"
# A failing GPU can write thousands of XIDs, and each becomes an incident with its pods.
_MAX_WAITING: Final = 4096
_AT_ONCE: Final = 100
_PAUSE_SECONDS: Final = 0.05
"""Pause after each batch of incidents, so that the publisher can keep up."""
# Maximum number of hanging threads: each keeps a driver handle until the process ends.
_MAX_HANGING: Final = 4
SLOWDOWN_SECONDS: Final = 60.0
"""How long the hardware must slow the clocks down before the monitor reports an incident."""
# The driver reports a new layout at once, but the agent sees it only at the next tick.
_WINDOWS_NS: Final = {"xid": WINDOW_NS, "mig_changed": 10 * NS_PER_SECOND}


def _describe(change: HealthChange) -> str | None:
    words = [change.detail] if change.detail else []
    if change.ended_kinds:
        words.append(", ".join(change.ended_kinds))
    if change.is_at_start:
        so = "" if change.ended_kinds else "already the case "
        words.append(f"{so}at the agent's first reading")
    return "; ".join(words) or None


class IncidentLog:
    """Logs one node's incidents; equal incidents are logged once a minute."""

    def __init__(self, repeats: Repeats | None = None) -> None:
        self._repeats = repeats or Repeats()

    def record(self, incident: Incident) -> None:
        """Log an incident at its severity; `count` includes equal incidents that were not logged.

        An incident that only reports which states were absent at the agent's start is not logged.
        """
        if incident.present_at_start and incident.ended_kinds:
            return
        count = self._repeats.count((incident.gpu_uuid, incident.kind, incident.xid))
        if not count:
            return
        # Pods by name if the GPU is allocated to them, otherwise the UIDs of pods that use it.
        pods = {
            f"{allocation.namespace}/{allocation.pod}" for allocation in incident.allocations or ()
        } or {process.pod_uid for process in incident.processes if process.pod_uid}
        jobs = {process.job_id for process in incident.processes if process.job_id}
        facts = {
            "kind": incident.kind,
            "gpu": incident.gpu_uuid,
            "gpu_index": incident.gpu_index,
            "xid": incident.xid,
            "action": incident.action,
            "pods": sorted(pods) or None,
            "jobs": sorted(jobs) or None,
            "source": incident.source,
            "detail": incident.message,
            "count": count,
        }
        known = {key: value for key, value in facts.items() if value is not None}
        _log.log(_LEVELS[incident.severity], "incident_seen", **known)


ProcessesOn = Callable[[str, int | None], Sequence[IncidentProcess]]
"""Takes a GPU's UUID and the driver's id of a GPU instance (`None` for the whole GPU), and returns
the processes on it."""
AllocationsOn = Callable[[str, int | None], Sequence[DeviceAllocation]]
"""Takes the same arguments, and returns the allocations of the GPU or instance."""


class IncidentMonitor:
    """Watches one node's GPUs; listens to the driver's events while the source is open."""

    closing_seconds = 1.0
    """How long to wait for the event thread to end; a thread that hangs longer is left running."""

    def __init__(
        self,
        *,
        node: NodeId,
        boot_id: str,
        source: GpuSource,
        clock: Clock,
        publish: Callable[[Incident], None],
        processes_on: ProcessesOn = lambda *_: (),
        allocations_on: AllocationsOn = lambda *_: (),
        open_kmsg: Callable[[], Kmsg] | None = None,
        kmsg_check: Check | None = None,
        slowdown_seconds: float = SLOWDOWN_SECONDS,
    ) -> None:
        """Create the monitor, which calls `publish` with each incident, in the event loop.

        `processes_on` returns the processes that are on a GPU now, and `allocations_on` the
        allocations of the GPU. If the hardware slows the clocks down for `slowdown_seconds`, the
        monitor reports an incident.
        """
        self._node = node
        self._boot_id = boot_id
        self._source = source
        self._clock = clock
        self._publish = publish
        self._processes_on = processes_on
        self._allocations_on = allocations_on
        self._buses: Mapping[str, str] = {}
        self._indices: Mapping[str, int] = {}
        self._open_kmsg = open_kmsg
        self._kmsg_check = kmsg_check or Check()
        self._deduplicator = Deduplicator()
        self._incident_log = IncidentLog()
        self._slowdown_ns = round(slowdown_seconds * NS_PER_SECOND)
        self._watches: dict[str, HealthWatch] = {}
        self._recent_events: dict[str, RecentEvents] = {}
        """The latest events by GPU, so that many events of one GPU do not displace those of
        another."""
        self._waiting: deque[Detection] = deque()
        self._filled = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._events: EventThread | None = None
        self._hanging: list[EventThread] = []

    def opened(self, gpus: Sequence[GpuIdentity]) -> None:
        """Start to wait for events of these GPUs, in a new thread; may be called in any thread."""
        # The driver may have been reloaded without a call of `closing`.
        self.closing()
        # Update the indices now, because the inventory comes with a later tick. A lost GPU keeps
        # its index, because a reopened library does not list it.
        self._indices = {**self._indices, **{gpu.uuid: gpu.index for gpu in gpus}}
        if self._open_kmsg:
            self._buses = {**self._buses, **self._source.pci_buses(gpus)}
        self._hanging = [thread for thread in self._hanging if thread.is_alive]
        if len(self._hanging) >= _MAX_HANGING:
            EVENT_SET_FAILURES.labels(reason="hang").inc()
            return
        if not gpus:
            return  # an event set without GPUs cannot be waited for; `opened` is called again
        self._events = EventThread(
            self._source,
            gpus,
            clock=self._clock,
            on_detection=self.hand_over,
            backoff=Backoff(first_seconds=1, max_seconds=300),
        )

    def closing(self) -> None:
        """Release the driver's events; may be called in any thread.

        If the event thread does not end within `closing_seconds`, it is left running.
        """
        events, self._events = self._events, None
        if events and not events.end(self.closing_seconds):
            self._hanging.append(events)
            _log.warning("event_wait_hung", detail="the driver does not return from the wait")

    async def run(self) -> None:
        """Report incidents until cancelled."""
        self._loop = asyncio.get_running_loop()
        # The event threads start before the loop, and may have queued detections already.
        if self._waiting:
            self._filled.set()
        if self._open_kmsg is None:
            await self._handle_waiting()
            return
        reader = KmsgReader(
            open_log=self._open_kmsg,
            clock=self._clock,
            buses=lambda: self._buses,
            on_detection=self.hand_over,
            check=self._kmsg_check,
            backoff=Backoff(first_seconds=1, max_seconds=300),
        )
        async with asyncio.TaskGroup() as both:
            both.create_task(reader.run(), name="kmsg")
            both.create_task(self._handle_waiting(), name="incidents")

    def report(self, kind: str, gpu_uuid: str, message: str) -> None:
        """Report an incident that the agent itself has just detected.

        Call it only in the event loop.
        """
        self.handle(
            Detection(
                kind=kind,
                gpu_uuid=gpu_uuid,
                time_ns=self._clock.time_ns(),
                source=SOURCE,
                detail=message,
            )
        )

    def evaluate_health(self, gpu: GpuDetails, *, time_ns: int) -> None:
        """Report the changes of a GPU's health that no event of the driver has reported.

        `gpu` has the tick's readings, which are compared with earlier ones. Call it only in the
        event loop.
        """
        watch = self._watches.get(gpu.uuid)
        if watch is None:
            # A MIG instance has no health of its own, and a new GPU's health may not be read yet.
            if gpu.health is None:
                return
            watch = self._watches[gpu.uuid] = HealthWatch(slowdown_ns=self._slowdown_ns)
        recent = self._recent_events.get(gpu.uuid, RecentEvents())
        for change in watch.update(gpu, now_ns=self._clock.monotonic_ns()):
            # An event has more details than a reading and usually comes first.
            if not recent.cover(change, time_ns=time_ns):
                self.handle(
                    Detection(
                        kind=change.kind,
                        gpu_uuid=gpu.uuid,
                        time_ns=time_ns,
                        source=SOURCE,
                        action=change.action,
                        detail=_describe(change),
                        is_at_start=change.is_at_start,
                        ended_kinds=change.ended_kinds,
                    )
                )

    def handle(self, detection: Detection) -> None:
        """Publish the incident of a detection, unless another source has already reported it.

        Call it only in the event loop.
        """
        what = detection.kind if detection.xid is None else detection.xid
        window_ns = _WINDOWS_NS.get(detection.kind)
        # Only kinds that several sources detect can be duplicates.
        if window_ns is not None and not self._deduplicator.is_new(
            (detection.gpu_uuid, what),
            source=detection.source,
            time_ns=detection.time_ns,
            window_ns=window_ns,
        ):
            INCIDENTS_DUPLICATE.labels(source=detection.source).inc()
            return
        processes = list(self._processes_on(detection.gpu_uuid, detection.gpu_instance))
        if detection.pid is not None and all(process.pid != detection.pid for process in processes):
            # The source names a process that is no longer on the GPU.
            processes.append(IncidentProcess(pid=detection.pid, command=detection.command))
        incident = make_incident(
            kind=detection.kind,
            node=self._node,
            boot_id=self._boot_id,
            gpu_uuid=detection.gpu_uuid,
            time_ns=detection.time_ns,
            source=detection.source,
            xid=detection.xid,
            gpu_index=self._indices.get(detection.gpu_uuid),
            gpu_instance=detection.gpu_instance,
            compute_instance=detection.compute_instance,
            action=detection.action,
            severity=detection.severity,
            detail=detection.detail,
            processes=processes,
            allocations=self._allocations_on(detection.gpu_uuid, detection.gpu_instance),
            is_at_start=detection.is_at_start,
            ended_kinds=detection.ended_kinds,
        )
        # Record only events: a change of health can repeat an event, but not an earlier reading.
        if incident.source != SOURCE:
            self._recent_events.setdefault(incident.gpu_uuid, RecentEvents()).record(incident)
        INCIDENTS.labels(kind=incident.kind, source=incident.source).inc()
        self._incident_log.record(incident)
        self._publish(incident)

    def hand_over(self, detection: Detection) -> None:
        """Queue a detection for the event loop, from any thread; drop it if the queue is full."""
        if len(self._waiting) >= _MAX_WAITING:
            INCIDENTS_DROPPED.inc()
            return
        self._waiting.append(detection)
        # A loop that has not started yet checks the queue at its start. A loop that has ended
        # raises `RuntimeError`.
        with suppress(RuntimeError):
            if self._loop:
                self._loop.call_soon_threadsafe(self._filled.set)

    async def _handle_waiting(self) -> None:
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._waiting:
                for _ in range(min(_AT_ONCE, len(self._waiting))):
                    self.handle(self._waiting.popleft())
                # Pause, so that many incidents do not delay ticks or fill the send queue at once.
                if self._waiting:
                    await self._clock.sleep(_PAUSE_SECONDS)
