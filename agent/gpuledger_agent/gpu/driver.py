"""Polls a node's GPUs from asyncio: opens their source, queries it in each tick, and reopens it.

A driver's calls can block for seconds or forever, and a blocked thread cannot be ended. So every
call runs in a thread, and the event loop never waits longer than the tick's deadline:

    Driver ── SourceLifecycle   opens and closes the source, in one thread
       ├───── GpuPool           the GPUs of the open source, each with a GpuWorker and a thread
       ├───── FastPoller        polls GPUs between two ticks, in one thread
       ├───── LostGpuProbe      finds out whether lost GPUs answer again, in one thread
       └───── GpuAvailability   tracks lost GPUs and reports changes

If a GPU hangs, its readings are missing, but the tick of the other GPUs is not delayed. Reopening
the source helps if no GPU answers, and may bring back a lost GPU. Until the source is open again,
however, all GPUs are missing from the ticks, and the call that opens the source can hang. The
source is therefore reopened at increasing intervals, and for a lost GPU only while no call hangs.
If a lost GPU answers by its PCI address, the source is reopened within 30 seconds; if it is lost
again, at increasing intervals.

The source is always in one `SourceState`. Each state except OPEN has a reason. In these states, the
driver starts to open the source as soon as the backoff has passed; opening may take many ticks:

    from      to       when
    OPENING   OPEN     the source was opened, even if it has no GPU
    OPEN      OPENING  the source has to be reopened: a GPU was bound or is lost, or all GPUs are
                       unresponsive. No further GPU counts as lost because of this
    OPEN      LOST     the source raised an error: it is lost as a whole
    OPEN      UNBOUND  the driver is being unbound: the source is closed at once, because the
                       driver waits for that
    OPENING   LOST     the source could not be opened, although a GPU has answered before
    LOST      OPEN     the source was opened: a driver reload is reported for each GPU
    UNBOUND   OPEN     as from LOST; while UNBOUND, it is normal that no driver is loaded

If the source cannot be opened in any other state, only the reason changes.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from enum import Enum
from operator import attrgetter
from typing import Final, NamedTuple

import structlog
from msgspec.structs import replace

from gpuledger.clock import Clock
from gpuledger.records import Capability
from gpuledger.runtime import Backoff, Check, RetryTimer
from gpuledger_agent.core.raw import ClockReading, FastPoll, NodeFacts, RawGpuSample, SampleCursor
from gpuledger_agent.gpu.breaker import slow_backoff
from gpuledger_agent.gpu.fast_poller import FastPoller
from gpuledger_agent.gpu.lifecycle import SourceLifecycle, SourceListener
from gpuledger_agent.gpu.lost_gpus import LostGpuProbe
from gpuledger_agent.gpu.pool import GpuAvailability, GpuPool, Report, report_nowhere
from gpuledger_agent.gpu.protocol import (
    DriverEvent,
    DriverNotLoadedError,
    Gpu,
    GpuSource,
    SourceLostError,
)
from gpuledger_agent.gpu.threads import CpuWait, read_cpu_wait, wait_at_most
from gpuledger_agent.metrics import DRIVER_UP

_log = structlog.get_logger(__name__)
# Time for an unbinding to finish before the source is reopened.
_UNBINDING_SECONDS: Final = 5.0
# How long a source must stay open before its backoff starts again from the shortest interval.
_CALM_SECONDS: Final = 60.0


class SourceState(Enum):
    """Whether the GPUs can be queried; see the module's docstring for the transitions."""

    OPENING = "opening"
    """The source has to be opened or reopened, but is not lost."""
    OPEN = "open"
    """The GPUs are queried."""
    LOST = "lost"
    """No GPU answers until the source is reopened."""
    UNBOUND = "unbound"
    """No GPU answers until the source is reopened, because the driver was unbound."""


class Poll(NamedTuple):
    """The GPUs' answers to the queries of one tick."""

    at: ClockReading
    """When the queries started."""
    samples: list[RawGpuSample]
    """One sample for each GPU that answered in time."""


class Driver:
    """Queries the GPUs of a node; opens their source, and reopens it if needed."""

    def __init__(
        self,
        source: GpuSource,
        *,
        clock: Clock,
        check: Check,
        gpus_check: Check | None = None,
        deadline_seconds: float,
        backoff: Backoff,
        lost_gpu_backoff: Backoff | None = None,
        readings_seconds: float = 5.0,
        health_seconds: float = 10.0,
        cpu_wait: CpuWait = read_cpu_wait,
        report: Report = report_nowhere,
        listeners: Sequence[SourceListener] = (),
    ) -> None:
        """Create a driver; `check` fails if no GPU answers, `gpus_check` if any does not answer."""
        self._source = source
        self._clock = clock
        self._check = check
        self._gpus_check = gpus_check or Check()
        self.deadline_seconds = deadline_seconds
        """How long a tick waits for the source to be opened, in seconds; read in each tick."""
        self.lifecycle = SourceLifecycle(source, listeners=listeners)
        """Opens and closes the source."""
        self._availability = GpuAvailability(report)
        self.pool = GpuPool(
            availability=self._availability,
            deadline_seconds=deadline_seconds,
            readings_seconds=readings_seconds,
            health_seconds=health_seconds,
            cpu_wait=cpu_wait,
        )
        """The GPUs of the open source."""
        self._fast_poller = FastPoller()
        self.probe = LostGpuProbe(source)
        """Probes the lost GPUs."""
        self._open_timer = RetryTimer(backoff, calm_seconds=_CALM_SECONDS)
        self._lost_gpu_timer = RetryTimer(
            lost_gpu_backoff or slow_backoff(), calm_seconds=_CALM_SECONDS
        )
        self._state, self._reason = SourceState.OPENING, "not started yet"
        self._opening: Future[Sequence[Gpu]] | None = None
        """The result of the call that is opening the source; `None` if no such call is running."""
        self._worked_seconds = time.monotonic()
        self._pending_event = DriverEvent.NOTHING
        """The driver's last event, if it must wait until the source is open."""
        self._reported: tuple[int, Mapping[str, str | None], Capability] | None = None
        """State of the last inventory that was returned: the number of changes of GPU facts, the
        versions, and whether the driver announces unbinding. If one of them changes, the inventory
        is returned again."""
        self._was_unbound = False
        """Whether the driver was unbound since the source was last opened."""
        self._logged: tuple[set[str], str | None] | None = None
        """The UUIDs of the GPUs found when the source was last opened, and the reason for which the
        driver does not announce that it will be unbound. The reason is `None` if it does."""

    @property
    def idle_seconds(self) -> float:
        """Seconds for which no GPU has answered although at least one should."""
        return time.monotonic() - self._worked_seconds

    @property
    def detail(self) -> str:
        """The driver's state as text for people: the detail of the check."""
        return self._check.detail

    @property
    def known(self) -> Sequence[str]:
        """The UUIDs of all GPUs that have ever answered."""
        return self._availability.known

    @property
    def is_open(self) -> bool:
        """Whether the GPUs can be queried now."""
        return self._state is SourceState.OPEN

    async def poll(self, cursors: Mapping[str, SampleCursor]) -> Poll | None:
        """Return the GPUs' answers for a tick; `None` if the source is not open.

        If the source is not open, first try to open it. `cursors` are the positions in the GPUs'
        ring buffers, by UUID.
        """
        self._handle_driver_events()
        if not self.is_open and not await self._open():
            DRIVER_UP.set(0)
            return None
        at = ClockReading.read(self._clock)
        samples = await self.pool.poll(cursors, at.monotonic_ns)
        if self.pool.source_lost:
            self._lose(SourceState.LOST, self.pool.source_lost)
        self._update_checks({sample.uuid for sample in samples})
        self._restart_where_it_helps()
        return Poll(at, samples)

    @property
    def accounting_gpus(self) -> frozenset[str]:
        """The UUIDs of the GPUs for which the driver keeps process accounting."""
        gpus = self.pool.accounting_gpus if self.is_open else ()
        return frozenset(gpu.uuid for gpu in gpus)

    async def fast_poll(self, cursors: Mapping[str, SampleCursor | None]) -> Sequence[FastPoll]:
        """Query GPUs between two ticks; return the answers that arrive in time.

        `cursors` contains the GPUs to query, by UUID, with their positions in the ring buffers;
        `None` requests only the energy.
        """
        workers = self.pool.workers if self.is_open else ()
        requested = [
            (worker.gpu, cursors[worker.gpu.uuid])
            for worker in workers
            if worker.gpu.uuid in cursors and not (worker.is_unresponsive or worker.is_stuck)
        ]
        return await self._fast_poller.poll(requested, self._clock)

    def take_late_polls(self) -> Sequence[FastPoll]:
        """Return the answers to a late fast poll if they have arrived since; otherwise nothing."""
        return self._fast_poller.take()

    def inventory(self) -> NodeFacts | None:
        """Return the versions of the driver's software and the node's GPUs.

        Return `None` if the GPUs are unknown, or if nothing has changed since the last call that
        returned them.
        """
        unbind = self.lifecycle.unbind_capability
        known = (self.pool.facts_changes, self.lifecycle.versions, unbind)
        if not self.pool.facts_changes or known == self._reported:
            return None
        self._reported = known
        return NodeFacts(
            versions=self.lifecycle.versions,
            gpus=sorted(
                # List this capability of the driver with each GPU's own capabilities.
                (
                    replace(facts, capabilities=[*facts.capabilities, unbind])
                    for facts in self.pool.facts.values()
                ),
                key=attrgetter("index"),
            ),
        )

    def close(self) -> "Future[None] | None":
        """Start to close the source; return a future that is done when it is closed.

        If a call to the driver hangs, the source is not closed, because closing it would hang too.
        The result is then `None`, and the driver is released when the process exits.
        """
        parts = (self.pool, self._fast_poller, self.probe, self._source)
        closing = None if any(part.is_stuck for part in parts) else self.lifecycle.close()
        self._let_go()
        self.lifecycle.end()
        return closing

    async def _open(self) -> bool:
        """Try to open the source, and wait for at most a tick's deadline.

        During the backoff after an attempt, do nothing. Return whether the source is open now.
        """
        if self._opening is None:
            if not self._open_timer.is_due(self._clock.monotonic_ns()):
                return False
            self._opening = self.lifecycle.open()
        await wait_at_most(self._opening, self.deadline_seconds)
        if not self._opening.done():
            self._fail("opening the library takes too long")
            return False
        opening, self._opening = self._opening, None
        self._open_timer.record_attempt(self._clock.monotonic_ns())
        try:
            self._use(opening.result())
        except SourceLostError as error:
            # The source could not be opened, so an earlier event of the driver no longer matters.
            self._pending_event = DriverEvent.NOTHING
            if self._state is SourceState.UNBOUND and isinstance(error, DriverNotLoadedError):
                # Normal while a driver is being replaced, so the watchdog must not end the agent.
                self._worked_seconds = time.monotonic()
                self._fail(f"the driver was unbound: {error}")
            else:
                # Nothing can be lost before the first GPU has answered.
                if self._state is SourceState.OPENING and self._availability.known:
                    self._state = SourceState.LOST
                self._reason = str(error)
                self._fail(self._reason)
        return self.is_open

    def _use(self, found: Sequence[Gpu]) -> None:
        """Start to query the GPUs found by opening the source; report missing GPUs as lost."""
        self.pool.begin(found, self._clock.monotonic_ns())
        was_lost, reason = self._state is not SourceState.OPENING, self._reason
        self._state, self._reason = SourceState.OPEN, ""
        there = {gpu.uuid for gpu in found}
        # If the source was reopened for a lost GPU, it often has the same GPUs: log only changes.
        unheard = self.lifecycle.unbind_capability.reason
        if was_lost or (there, unheard) != self._logged:
            _log.info("source_opened", count=len(there), unbind_event_error=unheard)
        self._logged = (there, unheard)
        if self._was_unbound:
            # After an unbinding, a GPU that does not come back was removed on purpose.
            self._was_unbound = False
            self.pool.keep_facts(there, indices=self._source.unfound.keys())
        for uuid in self._availability.known:
            if uuid not in there:
                self._availability.record_lost(uuid, "it was missing when the library was reopened")
        self._availability.record_opening(
            {gpu.index: gpu.uuid for gpu in found}, self._source.unfound
        )
        if was_lost:
            self._availability.report_all("driver_reloaded", f"previous state: {reason}")

    def _handle_driver_events(self) -> None:
        """Handle the last event of the driver: that it is being unbound, or was bound to a GPU.

        If the source is not open, the event is handled once the source is open.
        """
        event = self.lifecycle.poll_driver_events()
        self._pending_event = self._pending_event if event is DriverEvent.NOTHING else event
        if not self.is_open or self._pending_event is DriverEvent.NOTHING:
            return
        event, self._pending_event = self._pending_event, DriverEvent.NOTHING
        if event is DriverEvent.BIND:
            # Only a reopened source finds the added GPU.
            self._restart("the driver was bound to a GPU")
            return
        # An open source blocks the unbinding until it is closed.
        self._availability.report_all("driver_unbound", "the agent has closed the library")
        self._was_unbound = True
        self._lose(SourceState.UNBOUND, "the driver was unbound")
        self._fail(self._reason)
        # Do not reopen at once: the driver waits until no process uses it.
        self.lifecycle.close()
        self._open_timer.wait(self._clock.monotonic_ns(), seconds=_UNBINDING_SECONDS)

    def _lose(self, state: SourceState, reason: str) -> None:
        """Record that no GPU answers until the source is reopened, and stop querying."""
        self._state, self._reason = state, reason
        self._let_go()

    def _let_go(self) -> None:
        """Stop querying the GPUs in ticks, fast polls and probes."""
        self.pool.end()
        self._fast_poller.end()
        self.probe.end()

    def _restart(self, reason: str) -> None:
        """Start to reopen the source at once, so that it may be open before the next tick."""
        if self.is_open:
            self._state, self._reason = SourceState.OPENING, reason
        self._let_go()
        self._opening = self.lifecycle.open()

    def _restart_where_it_helps(self) -> None:
        now_ns, missing = self._clock.monotonic_ns(), self._missing()
        is_due = self._open_timer.is_due(now_ns) and self._lost_gpu_timer.is_due(now_ns)
        # Do not start a probe in a tick that reopens the source anyway.
        may_probe = self.is_open and not (missing and is_due)
        answering = self.probe.find_answering(self._lost(), now_ns) if may_probe else ()
        parts = (self.pool, self.lifecycle, self._fast_poller, self.probe, self._source)
        may_harm = any(part.is_stuck for part in parts) and bool(self.pool.uuids)
        if not self._open_timer.is_due(now_ns):
            return
        if not self.is_open:
            # The source was lost in this tick: reopen it without waiting for the next tick.
            self._restart(self._reason)
        elif self.pool.is_unresponsive:
            self._restart("no GPU answers")
        elif missing and not may_harm and (answering or is_due):
            # `may_harm`: if a call hangs, reopening may hang too, and then no GPU would answer.
            if answering:
                self.probe.record_reopening(answering, now_ns)
            else:
                self._lost_gpu_timer.record_attempt(now_ns)
            self._restart(missing)
        elif not missing:
            self._open_timer.record_success(now_ns)
            self._lost_gpu_timer.record_success(now_ns)

    def _missing(self) -> str:
        """Return a text that names the lost GPUs, which may answer again if the source is reopened.

        The text is empty if no GPU is lost.
        """
        lost = self._lost()
        count = max(len(self._source.unfound), len(lost))
        named = f": {', '.join(lost)}" if lost else ""
        return f"{count} GPUs do not answer{named}" if count else ""

    def _lost(self) -> Sequence[str]:
        """Return the names of the lost GPUs that are not queried."""
        return sorted(self._availability.lost.keys() - self.pool.uuids)

    def _update_checks(self, answered: set[str]) -> None:
        unresponsive, missing = self.pool.uuids - answered, self._missing()
        # A node without any GPU also counts as working.
        if answered or not (unresponsive or missing):
            self._worked_seconds = time.monotonic()
        DRIVER_UP.set(bool(answered))
        trouble = (
            f"no answer in time from {', '.join(sorted(unresponsive))}" if unresponsive else missing
        )
        if not self.is_open or (trouble and not answered):
            self._fail(self._reason or trouble)
            return
        count = f"{len(answered)} GPUs"
        origin = self._source.origin
        self._check.ok(f"{count} by {origin}" if origin else count)
        if trouble:
            self._gpus_check.failed(trouble)
        else:
            self._gpus_check.ok(", without ".join([count, *self.pool.open_groups]))

    def _fail(self, reason: str) -> None:
        """Fail both checks because no GPU answers."""
        self._check.failed(reason)
        self._gpus_check.failed(f"no GPU answers, see {self._check.name}")
