"""The agent at work: ask the GPUs once a tick, put the tick into the outbox, publish the outbox.

Here the parts are put together for one node; several nodes may run in one process.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from agent.exposition.view import NodeView
from agent.kubelet.allocations import Allocations
from agent.kubelet.client import Kubelet
from agent.kubelet.devices import DeviceIndex
from agent.metrics import ATTRIBUTION, TICK_SECONDS, TICKS_LATE
from agent.nvml.driver import Driver
from agent.nvml.library import Nvml
from agent.processes.namespace import judge_procfs
from agent.processes.procfs import Procfs
from agent.publishing.outbox import Outbox
from agent.publishing.parcels import pack
from agent.publishing.publisher import Publisher, flush
from agent.publishing.queue import TickQueue
from agent.publishing.spool import Spool
from agent.sampling import Moment, Sampler, Tick
from agent.schedule import Schedule
from agent.settings import AgentSettings
from gpuledger.bus.protocol import Bus
from gpuledger.clock import Clock
from gpuledger.errors import UserError
from gpuledger.records import DeviceAllocation, NodeSample
from gpuledger.service import Backoff, Check, Readiness

_log = structlog.get_logger(__name__)


async def run_agent(
    *,
    nvml: Any,  # noqa: ANN401  # pynvml is an untyped module
    procfs: Procfs,
    clock: Clock,
    bus: Bus | None,
    settings: AgentSettings,
    readiness: Readiness,
    view: NodeView | None = None,
    kubelet: Kubelet | None = None,
) -> None:
    """Sample and publish one node until cancelled; what is queued then gets a last chance.

    Without a bus nothing is published; a view is shown each tick; without a kubelet ticks have no
    allocations.
    """
    outbox = _outbox(settings, clock, readiness) if bus else None
    driver = Driver(
        Nvml(nvml),
        clock=clock,
        check=readiness.check("nvml"),
        deadline_seconds=settings.gpu_deadline_seconds,
        backoff=Backoff(),
    )
    sampling = Sampling(
        driver=driver,
        sampler=_sampler(settings, procfs, readiness.check("procfs")),
        clock=clock,
        outbox=outbox,
        view=view,
        allocations=_allocations(kubelet, settings, clock, readiness),
        check=readiness.check("procfs"),
        settings=settings,
    )
    try:
        if bus and outbox:
            await _sample_and_publish(sampling, bus, outbox, readiness)
        else:
            await sampling.run()
    finally:
        driver.close()


async def _sample_and_publish(
    sampling: "Sampling", bus: Bus, outbox: Outbox, readiness: Readiness
) -> None:
    settings = sampling.settings
    publisher = Publisher(
        node=settings.node_name,
        bus=bus,
        outbox=outbox,
        check=readiness.check("kafka"),
        backoff=Backoff(),
        catch_up_factor=settings.spool.catch_up_factor,
    )
    publishing = asyncio.create_task(publisher.run(), name="publishing")
    spilling = asyncio.create_task(outbox.run(), name="spilling")
    try:
        await _first_to_fail(
            asyncio.create_task(sampling.run(), name="sampling"), publishing, spilling
        )
    finally:
        await flush(publisher, outbox, publishing, spilling, seconds=settings.flush_seconds)


@dataclass(kw_only=True)
class Sampling:
    """The loop that samples."""

    driver: Driver
    """Whom to ask."""
    sampler: Sampler
    """Who makes ticks of the answers."""
    clock: Clock
    """Whose ticks they are."""
    outbox: Outbox | None
    """Where they go; `None` where nothing is published."""
    view: NodeView | None
    """Where they are shown."""
    allocations: Allocations | None
    """Who holds which GPU; `None` where nobody is asked."""
    check: Check
    """Whether `/proc` shows the processes."""
    settings: AgentSettings
    """How often."""
    devices: DeviceIndex = field(default_factory=DeviceIndex)
    """The GPUs to which allocations may lead."""

    async def run(self) -> None:
        """Sample for ever, and have the kubelet asked meanwhile."""
        if self.allocations is None:
            return await self._sample()
        asking = asyncio.create_task(self.allocations.run(), name="kubelet")
        sampling = asyncio.create_task(self._sample(), name="ticks")
        try:
            await _first_to_fail(sampling, asking)
        finally:
            asking.cancel()

    async def _sample(self) -> None:
        schedule = Schedule(
            tick_ns=round(self.settings.tick_seconds * 1e9), due_ns=self.clock.monotonic_ns()
        )
        first_ns = round(min(self.settings.first_tick_seconds, self.settings.tick_seconds) * 1e9)
        while not await self.take():
            await self.clock.sleep(first_ns / 1e9)
        wait_seconds = schedule.restart(self.clock.monotonic_ns(), first_ns)
        while True:
            await self.clock.sleep(wait_seconds)
            if schedule.is_late(self.clock.monotonic_ns()):
                TICKS_LATE.inc()
            await self.take()
            wait_seconds = schedule.advance(self.clock.monotonic_ns())

    async def take(self) -> bool:
        """Take one tick, publish and show it; tells whether the driver answered at all."""
        began_seconds = time.perf_counter()
        asked_boottime_ns = self.clock.boottime_ns()
        answers = await self.driver.ask(self.sampler.last_seen())
        if answers is None:
            return False
        tick = self.sampler.sample(
            answers,
            asked_boottime_ns=asked_boottime_ns,
            at=Moment.read(self.clock),
            allocations=self._allocated(),
        )
        if tick:
            self._put(tick)
        TICK_SECONDS.observe(time.perf_counter() - began_seconds)
        return True

    def _allocated(self) -> Sequence[DeviceAllocation]:
        if self.allocations is None:
            return ()
        facts = self.driver.inventory()
        if facts:
            self.devices = DeviceIndex.of(facts.gpus)
        return self.allocations.current(self.devices)

    def _put(self, tick: Tick) -> None:
        if tick.processes and self.allocations:
            self.allocations.ask_soon()
        if self.outbox:
            self.outbox.put(pack(tick))
        if self.view:
            self.view.show(tick.sample, processes=tick.processes)
        if self.sampler.reads_processes:
            _check_processes(self.check, tick.sample)


def _outbox(settings: AgentSettings, clock: Clock, readiness: Readiness) -> Outbox:
    spool = Spool(settings.spool, node=settings.node_name, now_ns=clock.time_ns)
    return Outbox(
        queue=TickQueue(most_ticks=settings.queue_ticks),
        spool=spool if settings.spool.folder else None,
        check=readiness.check("spool"),
        after_seconds=settings.spool.after_seconds,
    )


def _allocations(
    kubelet: Kubelet | None, settings: AgentSettings, clock: Clock, readiness: Readiness
) -> Allocations | None:
    if kubelet is None or settings.kubelet.enabled is False:
        return None
    return Allocations(
        kubelet=kubelet,
        clock=clock,
        check=readiness.check("kubelet"),
        backoff=Backoff(),
        settings=settings.kubelet,
    )


def _sampler(settings: AgentSettings, procfs: Procfs, check: Check) -> Sampler:
    attribution = judge_procfs(procfs, wanted=settings.attribution)
    try:
        sampler = Sampler(node=settings.node_name, procfs=procfs, reads_processes=attribution.is_on)
    except OSError as error:
        raise UserError(f"cannot read /proc: {error}; the agent needs the node's /proc") from error
    ATTRIBUTION.set(attribution.is_on)
    if attribution.is_wanted:
        check.ok(attribution.detail)
    else:
        _log.error("processes are not read", detail=attribution.detail)
        check.failed(attribution.detail)
    return sampler


def _check_processes(check: Check, sample: NodeSample) -> None:
    """Say so where /proc shows none of the driver's processes: it is another pid namespace's."""
    running = [process for process in sample.processes if not process.ended]
    if running and all(process.started_boottime_ns is None for process in running):
        check.failed(f"/proc shows none of the {len(running)} processes on GPUs: is hostPID set?")
    else:
        check.ok(f"{len(running)} processes on GPUs")


async def _first_to_fail(*tasks: "asyncio.Task[None]") -> None:
    """Wait for the first of tasks that never end by themselves; end the first one."""
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
