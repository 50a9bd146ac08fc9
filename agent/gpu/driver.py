"""The driver, asked from asyncio: opened, asked each tick, and opened again where that helps.

NVML calls can block for seconds or for ever, and a blocked thread cannot be ended. So a GPU that
hangs costs its own readings, never the tick of the others, and its thread does not keep the
process alive. What to ask and what an answer means is decided elsewhere.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from dataclasses import replace
from operator import attrgetter
from typing import Final

import structlog

from agent.core.raw import NodeFacts, RawGpuSample, SampleCursor
from agent.gpu.lifecycle import NvmlLifecycle, NvmlListener, Retry
from agent.gpu.nvidia.client import DriverNotLoadedError, NvmlLostError
from agent.gpu.nvidia.events import DriverEvent, capability_of
from agent.gpu.nvidia.session import Gpu, NvmlSession
from agent.gpu.poll import wait_for
from agent.gpu.pool import GpuAvailability, GpuPool, Tell, tell_nobody
from agent.gpu.process_scanner import ProcessScanner
from agent.gpu.worker import slow_backoff
from agent.metrics import DRIVER_UP
from gpuledger.clock import Clock
from gpuledger.records import GpuFacts
from gpuledger.runtime import Backoff, Check

_log = structlog.get_logger(__name__)
# How long an unbinding gets before the driver is asked for again.
_UNBINDING_SECONDS: Final = 5.0


class Driver:
    """The GPUs of a node: opened, asked, and opened again when they were lost."""

    def __init__(
        self,
        nvml: NvmlSession,
        *,
        clock: Clock,
        check: Check,
        gpus_check: Check | None = None,
        deadline_seconds: float,
        backoff: Backoff,
        lost_gpu_backoff: Backoff | None = None,
        health_seconds: float = 10.0,
        tell: Tell = tell_nobody,
        users: Sequence[NvmlListener] = (),
    ) -> None:
        """Take the parts; `check`: does any GPU answer, `gpus_check`: does each one."""
        self._nvml = nvml
        self._clock = clock
        self._check = check
        self._gpus_check = gpus_check or Check()
        self._deadline_seconds = deadline_seconds
        self._keeper = NvmlLifecycle(nvml, users=users)
        self._losses = GpuAvailability(tell)
        self._crew = GpuPool(
            losses=self._losses, deadline_seconds=deadline_seconds, health_seconds=health_seconds
        )
        self._glancer = ProcessScanner()
        self._start_retry = Retry(backoff)
        self._lost_gpu_retry = Retry(lost_gpu_backoff or slow_backoff())
        self._opening: Future[Sequence[Gpu]] | None = None
        self._closed: str | None = "not started yet"
        self._was_lost = False
        self._is_unbound = False
        self._worked_seconds = time.monotonic()
        self._told: object = None
        self._logged: object = None
        self._wish = DriverEvent.NOTHING

    @property
    def idle_seconds(self) -> float:
        """For how long nothing has worked: no GPU answered, though there should be one."""
        return time.monotonic() - self._worked_seconds

    @property
    def detail(self) -> str:
        """What is to be said of the driver now."""
        return self._check.detail

    @property
    def known(self) -> Sequence[str]:
        """The UUIDs of all GPUs that answered once."""
        return self._losses.known

    async def ask(
        self, last_seen: Mapping[str, SampleCursor], *, asking: Callable[[], object] = bool
    ) -> list[RawGpuSample] | None:
        """Return the answers of the GPUs that answered in time; `None` without a working library.

        `asking` is called when the GPUs are asked: the answers are of then, and not of when the
        last one came or did not come.
        """
        self._heed()
        if self._closed is not None and not await self._start():
            DRIVER_UP.set(0)
            return None
        asking()
        answers = await self._crew.ask(last_seen, self._clock.monotonic_ns())
        if self._crew.library_lost:
            self._lose_library(self._crew.library_lost)
        self._report({answer.uuid for answer in answers})
        self._restart_where_it_helps()
        return answers

    @property
    def keeps_accounts(self) -> bool:
        """Whether there is something to glance at."""
        return self._closed is None and bool(self._crew.accounting_gpus)

    async def glance(self) -> Collection[int]:
        """Return the pids that are new since the last glance on GPUs that keep accounts."""
        return await self._glancer.look(self._crew.accounting_gpus)

    def inventory(self) -> NodeFacts | None:
        """Return what the node is built of, where that is news."""
        state = (self._crew.facts_changes, self._keeper.versions, self._keeper.unbind_unheard)
        if not self._crew.facts or state == self._told:
            return None
        self._told = state
        return NodeFacts(
            versions=self._keeper.versions,
            gpus=sorted(map(self._with_unbind, self._crew.facts.values()), key=attrgetter("index")),
        )

    def close(self) -> "Future[None] | None":
        """Let go of the driver, unless a call hangs in it: then only the process's end helps."""
        closing = None if self._crew.is_stuck else self._keeper.close()
        self._crew.end()
        self._keeper.end()
        return closing

    async def _start(self) -> bool:
        """Start the library; tells whether it answers now. A start may outlive many calls."""
        if self._opening is None:
            if not self._start_retry.is_due(self._clock.monotonic_ns()):
                return False
            self._opening = self._keeper.open()
        await wait_for(self._opening, self._deadline_seconds)
        if not self._opening.done():
            self._fail("nvmlInit does not return")
            return False
        opening, self._opening = self._opening, None
        self._start_retry.tried(self._clock.monotonic_ns())
        try:
            self._use(opening.result())
        except NvmlLostError as error:
            self._take_down_failure(error)
        return self._closed is None

    def _use(self, found: Sequence[Gpu]) -> None:
        """Begin to ask the GPUs of a new start."""
        self._crew.begin(found, self._clock.monotonic_ns())
        reason, self._closed = self._closed, None
        was_lost, self._was_lost, self._is_unbound = self._was_lost, False, False
        there = {gpu.uuid for gpu in found}
        self._log_start(there, is_news=was_lost)
        for uuid in self._losses.known:
            if uuid not in there:
                self._losses.lose(uuid, "not there when the library was started again")
        self._losses.started({gpu.index: gpu.uuid for gpu in found}, self._nvml.unfound)
        if was_lost:
            self._losses.tell_all("driver_reloaded", f"before: {reason}")

    def _log_start(self, there: AbstractSet[str], *, is_news: bool) -> None:
        """Log a start, unless it found what the one before did, as one for a lost GPU may often."""
        found = (there, self._keeper.unbind_unheard)
        if is_news or found != self._logged:
            _log.info("nvml_started", count=len(there), unbind_unheard=self._keeper.unbind_unheard)
        self._logged = found

    def _take_down_failure(self, error: NvmlLostError) -> None:
        self._wish = DriverEvent.NOTHING
        if self._is_unbound and isinstance(error, DriverNotLoadedError):
            # As it should be while a driver is exchanged, so no reason to give up.
            self._worked_seconds = time.monotonic()
            self._fail(f"the driver was unbound: {error}")
            return
        self._was_lost = bool(self._losses.known)
        self._closed = str(error)
        self._fail(self._closed)

    def _heed(self) -> None:
        """Do what the driver wishes for, or as soon as the library is open again."""
        heard = self._keeper.look()
        self._wish = self._wish if heard is DriverEvent.NOTHING else heard
        if self._closed is not None or self._wish is DriverEvent.NOTHING:
            return
        wish, self._wish = self._wish, DriverEvent.NOTHING
        if wish is DriverEvent.LOOK_AGAIN:
            self._restart("the driver was bound to a GPU")
            return
        self._losses.tell_all("driver_unbound", "the agent has closed the library")
        self._is_unbound = True
        self._lose_library("the driver was unbound")
        self._fail("the driver was unbound")
        self._keeper.close()
        self._start_retry.wait(self._clock.monotonic_ns(), _UNBINDING_SECONDS)

    def _lose_library(self, reason: str) -> None:
        """Take down that no handle is good any more."""
        self._closed = reason
        self._was_lost = True
        self._crew.end()

    def _restart(self, reason: str) -> None:
        """Begin a new start now, so that with luck it is over before the next tick."""
        self._closed = self._closed or reason
        self._crew.end()
        self._opening = self._keeper.open()

    def _restart_where_it_helps(self) -> None:
        now_ns, missing = self._clock.monotonic_ns(), self._missing()
        is_stuck = self._crew.is_stuck or self._keeper.is_stuck or self._glancer.is_stuck
        may_harm = is_stuck and bool(self._crew.uuids)
        if not self._start_retry.is_due(now_ns):
            return
        if self._closed is not None:
            self._restart(self._closed)
        elif self._crew.is_silent:
            self._restart("no GPU answers")
        elif missing and not may_harm and self._lost_gpu_retry.is_due(now_ns):
            # Where a call hangs a new start may hang too, and cost the GPUs that answer.
            self._lost_gpu_retry.tried(now_ns)
            self._restart(missing)
        elif not missing:
            self._start_retry.all_is_well(now_ns)
            self._lost_gpu_retry.all_is_well(now_ns)

    def _with_unbind(self, facts: GpuFacts) -> GpuFacts:
        """Add whether the driver tells that it will be unbound, as nobody asks a GPU for that."""
        told = capability_of(self._keeper.unbind_unheard)
        return replace(facts, capabilities=[*facts.capabilities, told])

    def _missing(self) -> str:
        """Return which GPUs only a new start could bring back; empty where there are none."""
        lost = sorted(self._losses.lost.keys() - self._crew.uuids)
        count = max(self._nvml.missing, len(lost))
        named = f": {', '.join(lost)}" if lost else ""
        return f"{count} GPUs do not answer{named}" if count else ""

    def _report(self, answered: set[str]) -> None:
        silent, missing = self._crew.uuids - answered, self._missing()
        if answered or not (silent or missing):
            self._worked_seconds = time.monotonic()
        DRIVER_UP.set(bool(answered))
        trouble = f"no answer in time from {', '.join(sorted(silent))}" if silent else missing
        if self._closed is not None or (trouble and not answered):
            self._fail(self._closed or trouble)
            return
        count = f"{len(answered)} GPUs"
        self._check.ok(count)
        if trouble:
            self._gpus_check.failed(trouble)
        else:
            self._gpus_check.ok(", without ".join([count, *self._crew.open_groups]))

    def _fail(self, reason: str) -> None:
        """Record that no GPU answers, so that the check of each one fails as well."""
        self._check.failed(reason)
        self._gpus_check.failed("no GPU answers, see nvml")
