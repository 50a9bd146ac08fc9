"""The loop that ticks: query the GPUs, make the tick, hand it on; it waits for no receiver."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import structlog

from gpuledger.clock import NS_PER_SECOND, Clock
from gpuledger.keys import NodeId
from gpuledger.records import Incident, Inventory
from gpuledger.runtime import Check
from gpuledger.runtime.logs import Repeats
from gpuledger.topics import Topics
from gpuledger_agent.core.fast_polls import FastPollPlan, FastPollTime
from gpuledger_agent.core.raw import ClockReading, NodeFacts, RawGpuSample
from gpuledger_agent.core.tick import NodeTick
from gpuledger_agent.exposition.node_state import NodeState
from gpuledger_agent.gpu.driver import Driver
from gpuledger_agent.host.job_directory import JobDirectory
from gpuledger_agent.host.kubelet.allocations import Allocations
from gpuledger_agent.host.kubelet.assignments import DeviceIndex
from gpuledger_agent.metrics import FAST_POLLS_FAILED, TICK_SECONDS, TICKS_FAILED, TICKS_LATE
from gpuledger_agent.monitor import IncidentMonitor
from gpuledger_agent.publish.message_bundle import bundle_incident, bundle_inventory, bundle_tick
from gpuledger_agent.publish.send_queue import SendQueue
from gpuledger_agent.sampling import Sampler
from gpuledger_agent.settings import AgentSettings

_log = structlog.get_logger(__name__)
_repeats: Final = Repeats()
_ANSWER_RATIO: Final = 0.25
"""Of a tick: for how long it waits for the kubelet's answer, counted from its beginning."""


@dataclass(kw_only=True)
class Schedule:
    """A grid of ticks; one that was missed is left out, not made up for."""

    tick_ns: int
    """Length of a tick."""
    due_ns: int
    """When the next tick is due."""

    def is_late(self, now_ns: int) -> bool:
        """Return whether the tick that begins now begins more than half a tick after its time."""
        return now_ns - self.due_ns > self.tick_ns // 2

    def advance(self, now_ns: int) -> float:
        """Go on to the first tick that is still to come; return the seconds until then."""
        missed = max(0, now_ns - self.due_ns) // self.tick_ns
        self.due_ns += (missed + 1) * self.tick_ns
        return (self.due_ns - now_ns) / NS_PER_SECOND


class InventoryTracker:
    """The GPUs of one node, by the driver's last answer: here ids of devices find theirs."""

    def __init__(self, *, node: NodeId, boot_id: str) -> None:
        self._node = node
        self._boot_id = boot_id
        self.devices = DeviceIndex()
        """The GPUs and instances to which ids may lead."""

    def update(self, facts: NodeFacts, *, time_ns: int) -> Inventory:
        """Record what the node is built of now; return the record that reports it."""
        self.devices = DeviceIndex.of(facts.gpus)
        return Inventory(
            cluster=self._node.cluster,
            node=self._node.node,
            boot_id=self._boot_id,
            time_ns=time_ns,
            gpus=list(facts.gpus),
            **facts.versions,
        )


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The agent's outputs, those of them that are switched on."""

    send_queue: SendQueue | None
    """What is to be published; `None` where nothing is."""
    node_state: NodeState | None
    """What `/metrics` shows; `None` where there is no page."""
    topics: Topics
    """The topics to which the queue goes."""

    def report_tick(self, tick: NodeTick) -> None:
        """Report a tick."""
        if self.send_queue:
            self.send_queue.put(bundle_tick(tick, self.topics))
        if self.node_state:
            self.node_state.update(tick.sample, tick.readings, processes=tick.processes)

    def report_silence(self, tick: NodeTick) -> None:
        """Report a tick in which the driver was away; the page goes on to age."""
        if self.send_queue:
            self.send_queue.put(bundle_tick(tick, self.topics))

    def report_incident(self, incident: Incident) -> None:
        """Report an incident."""
        if self.send_queue:
            self.send_queue.put(bundle_incident(incident, self.topics))
        if self.node_state:
            self.node_state.record_incident(incident)

    def report_inventory(self, inventory: Inventory) -> None:
        """Report what the node is built of."""
        if self.send_queue:
            self.send_queue.put(bundle_inventory(inventory, self.topics))
        if self.node_state:
            self.node_state.set_inventory(inventory)


@dataclass(kw_only=True)
class SampleLoop:
    """The ticks of one node."""

    driver: Driver
    """Polls the GPUs."""
    sampler: Sampler
    """Makes ticks of the answers."""
    inventory: InventoryTracker
    """What the node is built of."""
    monitor: IncidentMonitor
    """Watches the health that was read."""
    allocations: Allocations | None
    """Who holds which GPU; `None` where the kubelet is not asked."""
    jobs: JobDirectory | None = None
    """Which jobs hold which GPU; `None` where no scheduler says it."""
    outputs: Outputs
    """Where ticks go."""
    clock: Clock
    """Whose ticks they are."""
    procfs_check: Check
    """Whether `/proc` shows the processes."""
    mig_check: Check
    """Whether the driver shows the MIG instances that there are."""
    samples_check: Check
    """Whether ticks can be made of what was answered."""
    settings: AgentSettings
    """How often."""
    _hidden_ticks: int = field(default=0, init=False)
    """Ticks on end in which `/proc` showed no process that is on a GPU."""

    async def run(self) -> None:
        """Tick for ever."""
        tick_ns = round(self.settings.sampling_interval_seconds * NS_PER_SECOND)
        first_seconds = min(
            self.settings.first_sample_seconds, self.settings.sampling_interval_seconds
        )
        first_ns = round(first_seconds * NS_PER_SECOND)
        # Until the driver answers there is no interval to begin.
        while not await self._try_tick():
            await self.clock.sleep(first_ns / NS_PER_SECOND)
        schedule = Schedule(tick_ns=tick_ns, due_ns=self.clock.monotonic_ns() + first_ns)
        wait_seconds = first_ns / NS_PER_SECOND
        while True:
            await self._wait(wait_seconds)
            late = schedule.is_late(self.clock.monotonic_ns())
            TICKS_LATE.inc(late)
            await self._try_tick(late=late)
            # By the time after the tick: one that took longer than a tick leaves ticks out.
            wait_seconds = schedule.advance(self.clock.monotonic_ns())

    async def _wait(self, seconds: float) -> None:
        """Wait for the next tick, with fast polls of the GPUs that need them in between."""
        begin_ns = self.clock.monotonic_ns()
        plan = FastPollPlan(
            begin_ns=begin_ns,
            end_ns=begin_ns + round(seconds * NS_PER_SECOND),
            lag_ns=self.sampler.lag_ns,
            pause_ns=round(self.settings.fast_poll_interval_seconds * NS_PER_SECOND),
        )
        while poll_time := self._next_fast_poll(plan):
            await self._sleep_until(poll_time.at_ns)
            with self._fast_polling():
                cursors = self.sampler.fast_poll_cursors(
                    poll_time.others,
                    now_ns=self.clock.monotonic_ns(),
                    accounting_gpus=self.driver.accounting_gpus,
                )
                if cursors:
                    self.sampler.take_fast_polls(await self.driver.fast_poll(cursors))
        await self._sleep_until(plan.end_ns)

    def _take_late_polls(self) -> None:
        """Take in what came later than a fast poll waits: a tick needs the energy that it read."""
        with self._fast_polling():
            self.sampler.take_fast_polls(self.driver.take_late_polls())

    @contextmanager
    def _fast_polling(self) -> Iterator[None]:
        """Limit the cost of a failure to what fast polls told, and log it once."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # the tick to come asks for all of it again
            FAST_POLLS_FAILED.inc()
            self.sampler.drop_fast_polls()
            if count := _repeats.count(f"look {type(error).__name__}"):
                _log.exception("fast_poll_failed", count=count)

    def _next_fast_poll(self, plan: FastPollPlan) -> FastPollTime | None:
        now_ns = self.clock.monotonic_ns()
        closely = self.driver.accounting_gpus or self.sampler.watched_closely(now_ns)
        return plan.next(now_ns, is_close=bool(closely))

    async def _sleep_until(self, at_ns: int) -> None:
        await self.clock.sleep(max(0.0, (at_ns - self.clock.monotonic_ns()) / NS_PER_SECOND))

    async def _try_tick(self, *, late: bool = False) -> bool:
        """Make one tick; what goes wrong in it costs that tick, and is logged once."""
        try:
            has_answered = await self.tick(late=late)
        except Exception as error:  # noqa: BLE001  # one tick is less than all that come after it
            TICKS_FAILED.inc()
            self.sampler.forget()
            detail = f"the last tick failed: {type(error).__name__}: {error}"
            if count := _repeats.count(type(error).__name__):
                _log.exception("sample_failed", count=count)
            self.samples_check.failed(detail)
            return False
        if has_answered:
            made_ns, clock = self.clock.monotonic_ns(), self.clock

            def describe() -> str:
                seconds_ago = (clock.monotonic_ns() - made_ns) / NS_PER_SECOND
                return f"the last tick was {seconds_ago:.1f} s ago"

            self.samples_check.ok(describe)
        return has_answered

    async def tick(self, *, late: bool = False) -> bool:
        """Make one tick and report it; return whether the driver answered at all."""
        began_seconds = time.perf_counter()
        if self.allocations:
            self.allocations.request_if_due()
        self._take_late_polls()
        poll = await self.driver.poll(self.sampler.begin_tick())
        if poll:
            self._check_mig(poll.samples)
        # Before the tick: its allocations are found among these devices.
        if poll and (facts := self.driver.inventory()):
            time_ns = self.clock.time_ns()
            self.outputs.report_inventory(self.inventory.update(facts, time_ns=time_ns))
        # Before any GPU is known there is nothing to tell of, and no interval to begin.
        if poll is None and not self.inventory.devices.uuids:
            return False
        if self.allocations:
            spent_seconds = time.perf_counter() - began_seconds
            await self.allocations.wait_answer(
                self.settings.sampling_interval_seconds * _ANSWER_RATIO - spent_seconds
            )
        self._take_late_polls()
        tick = self.sampler.sample(
            # Where the driver is away, so are all its GPUs: who holds them holds them on.
            poll.samples if poll else (),
            at=poll.at if poll else ClockReading.read(self.clock),
            known=self.inventory.devices.uuids,
            allocations=self.allocations.current(self.inventory.devices)
            if self.allocations
            else (),
            job_allocations=self.jobs.current(self.inventory.devices) if self.jobs else (),
            late=late,
        )
        if tick and poll:
            self._report(tick)
        elif tick:
            self.outputs.report_silence(tick)
        TICK_SECONDS.observe(time.perf_counter() - began_seconds)
        return poll is not None

    def _check_mig(self, samples: Sequence[RawGpuSample]) -> None:
        hidden = sorted(gpu.uuid for gpu in samples if gpu.mig_hidden)
        if hidden:
            self.mig_check.failed(
                f"the driver refuses the agent the MIG instances of {', '.join(hidden)}: in its"
                " container set NVIDIA_MIG_MONITOR_DEVICES=all and add the capability SYS_ADMIN"
            )
        else:
            count = sum(gpu.mig_enabled or False for gpu in samples)
            self.mig_check.ok(f"{count} GPUs are cut into instances")

    def _report(self, tick: NodeTick) -> None:
        if tick.processes and self.allocations:
            # Who has come or gone may have been given a device, or have given one back.
            self.allocations.refresh_soon()
        self.outputs.report_tick(tick)
        for uuid in tick.relayouted:
            instances = (gpu for gpu in tick.sample.gpus if gpu.parent_uuid == uuid)
            profiles = ", ".join(gpu.mig_profile or "?" for gpu in instances)
            self.monitor.report("mig_changed", uuid, f"it has {profiles or 'no instances'} now")
        for gpu in tick.readings.gpus:
            self.monitor.evaluate_health(gpu, time_ns=tick.sample.time_ns)
        if not self.sampler.reads_processes:
            return
        running = [process for process in tick.sample.processes if not process.ended]
        if unlisted := self.sampler.unlisted_gpus:
            self.procfs_check.failed(
                f"the driver refuses its lists of processes of {', '.join(unlisted)}: who uses"
                " them is not known; gpuledger_agent_nvml_errors_total has the call and its error"
            )
            return
        is_hidden = all(process.started_boottime_ns is None for process in running)
        self._hidden_ticks = self._hidden_ticks + 1 if running and is_hidden else 0
        # Those that have just ended cannot be read either, but hardly all of them twice.
        if self._hidden_ticks > 1:
            self.procfs_check.failed(
                f"/proc shows none of the {len(running)} processes on GPUs: is hostPID set?"
            )
        elif not self._hidden_ticks:
            self.procfs_check.ok(f"{len(running)} processes on GPUs")
