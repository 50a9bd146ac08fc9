"""The GPUs of a node, polled from asyncio: opened, queried each tick, opened again where it helps.

A driver's calls can block for seconds or for ever, and a blocked thread cannot be ended. So every
call is made in a thread, and the event loop waits for none longer than the tick's deadline:

    Driver ── SourceLifecycle   opens and closes the source, in one thread
       ├───── GpuPool           the GPUs that the last opening found, one GpuWorker and thread each
       ├───── FastPoller        what the GPUs answer between two ticks, in one thread
       └───── GpuAvailability   which GPUs are lost, whatever the reason; it reports the changes

A GPU that hangs costs its own readings, never the tick of the others. Opening the source again
helps where no GPU answers, and may bring back a GPU that is lost; but it takes all of them out of
the ticks meanwhile, and can hang itself. So it is tried at ever longer intervals, and for the sake
of a lost GPU only while no call hangs.

The source is in one `SourceState`; in each but OPEN there is a reason, and an opening is begun as
soon as its wait is over (it may take many ticks):

    from      to       when
    OPENING   OPEN     an opening found the GPUs (none is an answer too)
    OPEN      OPENING  it is to be opened again: for a GPU that was bound or is lost, or as all are
                       unresponsive; what answered before is not lost
    OPEN      LOST     the source said that it is lost as a whole
    OPEN      UNBOUND  the driver is taken from its GPUs: closed at once, as the driver waits for it
    OPENING   LOST     an opening failed, though a GPU has answered before
    LOST      OPEN     an opening found GPUs: it is reported of each that the driver was reloaded
    UNBOUND   OPEN     as from LOST; that no driver is loaded meanwhile is as it should be

An opening that fails leaves each other state as it is, for another reason.
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
from gpuledger_agent.gpu.pool import GpuAvailability, GpuPool, Report, report_nowhere
from gpuledger_agent.gpu.protocol import (
    DriverEvent,
    DriverNotLoadedError,
    Gpu,
    GpuSource,
    SourceLostError,
)
from gpuledger_agent.gpu.threads import wait_at_most
from gpuledger_agent.metrics import DRIVER_UP

_log = structlog.get_logger(__name__)
# How long an unbinding has before the source is opened again.
_UNBINDING_SECONDS: Final = 5.0
# So long a source has to stay open, until its next loss counts as the first one.
_CALM_SECONDS: Final = 60.0


class SourceState(Enum):
    """Whether the GPUs can be queried; the table of the module's docstring has the changes."""

    OPENING = "opening"
    """It is to be opened, the first time or again; nothing is lost by that."""
    OPEN = "open"
    """Its GPUs are queried."""
    LOST = "lost"
    """No GPU answers until it is opened again."""
    UNBOUND = "unbound"
    """The same, as the driver was taken from its GPUs."""


class Poll(NamedTuple):
    """The answers of one tick."""

    at: ClockReading
    """When the GPUs were queried, and not when the last one answered or did not."""
    samples: list[RawGpuSample]
    """Those of the GPUs that answered in time."""


class Driver:
    """The GPUs of a node: opened, polled, and opened again when they were lost."""

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
        report: Report = report_nowhere,
        listeners: Sequence[SourceListener] = (),
    ) -> None:
        """Take the parts; `check`: does any GPU answer, `gpus_check`: does each one."""
        self._source = source
        self._clock = clock
        self._check = check
        self._gpus_check = gpus_check or Check()
        self.deadline_seconds = deadline_seconds
        """How long a tick waits for an opening; it is read at each tick."""
        self.lifecycle = SourceLifecycle(source, listeners=listeners)
        """The source's opening and closing."""
        self._availability = GpuAvailability(report)
        self.pool = GpuPool(
            availability=self._availability,
            deadline_seconds=deadline_seconds,
            readings_seconds=readings_seconds,
            health_seconds=health_seconds,
        )
        """The GPUs that the last opening found."""
        self._fast_poller = FastPoller()
        self._open_timer = RetryTimer(backoff, calm_seconds=_CALM_SECONDS)
        self._lost_gpu_timer = RetryTimer(
            lost_gpu_backoff or slow_backoff(), calm_seconds=_CALM_SECONDS
        )
        self._state, self._reason = SourceState.OPENING, "not started yet"
        self._opening: Future[Sequence[Gpu]] | None = None
        """The opening that is under way."""
        self._worked_seconds = time.monotonic()
        self._pending_event = DriverEvent.NOTHING
        """What the driver asked for while the source was not open."""
        self._reported: tuple[int, Mapping[str, str | None], Capability] | None = None
        """What was reported of the node last, as far as it tells whether there is news."""
        self._was_unbound = False
        """Whether the driver was taken from its GPUs since the last opening."""
        self._logged: tuple[set[str], str | None] | None = None
        """The GPUs that the last opening found, and why no unbinding is heard of."""

    @property
    def idle_seconds(self) -> float:
        """For how long nothing has worked: no GPU answered, though there should be one."""
        return time.monotonic() - self._worked_seconds

    @property
    def detail(self) -> str:
        """What is known of the driver now, for people."""
        return self._check.detail

    @property
    def known(self) -> Sequence[str]:
        """The UUIDs of all GPUs that answered once."""
        return self._availability.known

    @property
    def is_open(self) -> bool:
        """Whether the GPUs can be queried now."""
        return self._state is SourceState.OPEN

    async def poll(self, cursors: Mapping[str, SampleCursor]) -> Poll | None:
        """Query the GPUs; `None` where the source is not open."""
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
        """The GPUs whose driver keeps accounts of processes, by UUID."""
        gpus = self.pool.accounting_gpus if self.is_open else ()
        return frozenset(gpu.uuid for gpu in gpus)

    async def fast_poll(self, cursors: Mapping[str, SampleCursor | None]) -> Sequence[FastPoll]:
        """Return what GPUs answer between two ticks, those of them that do at once."""
        workers = self.pool.workers if self.is_open else ()
        requested = [
            (worker.gpu, cursors[worker.gpu.uuid])
            for worker in workers
            if worker.gpu.uuid in cursors and not (worker.is_unresponsive or worker.is_stuck)
        ]
        return await self._fast_poller.poll(requested, self._clock)

    def take_late_polls(self) -> Sequence[FastPoll]:
        """Return what GPUs have answered by now to a fast poll that was late."""
        return self._fast_poller.take()

    def inventory(self) -> NodeFacts | None:
        """Return what the node is built of, where that is news."""
        unbind = self.lifecycle.unbind_capability
        known = (self.pool.facts_changes, self.lifecycle.versions, unbind)
        if not self.pool.facts_changes or known == self._reported:
            return None
        self._reported = known
        return NodeFacts(
            versions=self.lifecycle.versions,
            gpus=sorted(
                # It is the driver's, and stands with each GPU's own capabilities.
                (
                    replace(facts, capabilities=[*facts.capabilities, unbind])
                    for facts in self.pool.facts.values()
                ),
                key=attrgetter("index"),
            ),
        )

    def close(self) -> "Future[None] | None":
        """Let go of the driver, unless a call hangs in it: then only the process's end helps."""
        is_stuck = self.pool.is_stuck or self._fast_poller.is_stuck or self._source.is_stuck
        closing = None if is_stuck else self.lifecycle.close()
        self._let_go()
        self.lifecycle.end()
        return closing

    async def _open(self) -> bool:
        """Open the source; return whether it is open now. An opening may outlive many ticks."""
        if self._opening is None:
            if not self._open_timer.is_due(self._clock.monotonic_ns()):
                return False
            self._opening = self.lifecycle.open()
        await wait_at_most(self._opening, self.deadline_seconds)
        if not self._opening.done():
            self._fail("the library does not return from its start")
            return False
        opening, self._opening = self._opening, None
        self._open_timer.record_attempt(self._clock.monotonic_ns())
        try:
            self._use(opening.result())
        except SourceLostError as error:
            # Whatever the driver asked for before is out of date: it is not open.
            self._pending_event = DriverEvent.NOTHING
            if self._state is SourceState.UNBOUND and isinstance(error, DriverNotLoadedError):
                # As it should be while a driver is exchanged, so no reason to give up.
                self._worked_seconds = time.monotonic()
                self._fail(f"the driver was unbound: {error}")
            else:
                # Before any GPU has answered there is nothing that could have been lost.
                if self._state is SourceState.OPENING and self._availability.known:
                    self._state = SourceState.LOST
                self._reason = str(error)
                self._fail(self._reason)
        return self.is_open

    def _use(self, found: Sequence[Gpu]) -> None:
        """Begin to query the GPUs that an opening found."""
        self.pool.begin(found, self._clock.monotonic_ns())
        was_lost, reason = self._state is not SourceState.OPENING, self._reason
        self._state, self._reason = SourceState.OPEN, ""
        there = {gpu.uuid for gpu in found}
        # An opening for a lost GPU may find what the one before did: that is no news.
        unheard = self.lifecycle.unbind_capability.reason
        if was_lost or (there, unheard) != self._logged:
            _log.info("source_opened", count=len(there), unbind_event_error=unheard)
        self._logged = (there, unheard)
        if self._was_unbound:
            # Somebody took the driver from its GPUs: one that has not come back was removed.
            self._was_unbound = False
            self.pool.keep_facts(there, indices=self._source.unfound.keys())
        for uuid in self._availability.known:
            if uuid not in there:
                self._availability.record_lost(uuid, "not there when the library was started again")
        self._availability.record_opening(
            {gpu.index: gpu.uuid for gpu in found}, self._source.unfound
        )
        if was_lost:
            self._availability.report_all("driver_reloaded", f"before: {reason}")

    def _handle_driver_events(self) -> None:
        """Do what the driver's events ask for, now or as soon as the source is open again."""
        event = self.lifecycle.poll_driver_events()
        self._pending_event = self._pending_event if event is DriverEvent.NOTHING else event
        if not self.is_open or self._pending_event is DriverEvent.NOTHING:
            return
        event, self._pending_event = self._pending_event, DriverEvent.NOTHING
        if event is DriverEvent.BIND:
            # Only a new opening counts the GPU that has come.
            self._restart("the driver was bound to a GPU")
            return
        # An open source is a user of the driver: it blocks the unbinding until it is closed.
        self._availability.report_all("driver_unbound", "the agent has closed the library")
        self._was_unbound = True
        self._lose(SourceState.UNBOUND, "the driver was unbound")
        self._fail(self._reason)
        # Not opened again at once: the driver waits until nobody holds it.
        self.lifecycle.close()
        self._open_timer.wait(self._clock.monotonic_ns(), seconds=_UNBINDING_SECONDS)

    def _lose(self, state: SourceState, reason: str) -> None:
        """Record that no GPU answers until the source is opened again."""
        self._state, self._reason = state, reason
        self._let_go()

    def _let_go(self) -> None:
        """Ask the GPUs of the open source no more, neither in ticks nor between them."""
        self.pool.end()
        self._fast_poller.end()

    def _restart(self, reason: str) -> None:
        """Begin to open again now, so that with luck it is over before the next tick."""
        if self.is_open:
            self._state, self._reason = SourceState.OPENING, reason
        self._let_go()
        self._opening = self.lifecycle.open()

    def _restart_where_it_helps(self) -> None:
        now_ns, missing = self._clock.monotonic_ns(), self._missing()
        parts = (self.pool, self.lifecycle, self._fast_poller, self._source)
        may_harm = any(part.is_stuck for part in parts) and bool(self.pool.uuids)
        if not self._open_timer.is_due(now_ns):
            return
        if not self.is_open:
            # It was lost in this tick: no need to wait for the next one.
            self._restart(self._reason)
        elif self.pool.is_unresponsive:
            self._restart("no GPU answers")
        elif missing and not may_harm and self._lost_gpu_timer.is_due(now_ns):
            # Where a call hangs an opening may hang too, and cost the GPUs that answer.
            self._lost_gpu_timer.record_attempt(now_ns)
            self._restart(missing)
        elif not missing:
            self._open_timer.record_success(now_ns)
            self._lost_gpu_timer.record_success(now_ns)

    def _missing(self) -> str:
        """Return the GPUs that can answer again only after a new opening; empty where none is."""
        lost = sorted(self._availability.lost.keys() - self.pool.uuids)
        count = max(len(self._source.unfound), len(lost))
        named = f": {', '.join(lost)}" if lost else ""
        return f"{count} GPUs do not answer{named}" if count else ""

    def _update_checks(self, answered: set[str]) -> None:
        unresponsive, missing = self.pool.uuids - answered, self._missing()
        # A node whose driver counts no GPU works too.
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
        """Record that no GPU answers, so that each GPU's check fails as well."""
        self._check.failed(reason)
        self._gpus_check.failed(f"no GPU answers, see {self._check.name}")
