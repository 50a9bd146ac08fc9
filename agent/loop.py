"""The loop that ticks: ask the GPUs, make the tick, tell it. Nothing here waits for a receiver."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from agent.gpu.driver import Driver
from agent.incidents.monitor import IncidentMonitor
from agent.inventory import InventoryTracker
from agent.kubelet.allocations import Allocations
from agent.metrics import TICK_SECONDS, TICKS_FAILED, TICKS_LATE
from agent.outputs import Outputs
from agent.sampling import ClockReading, NodeTick, Sampler
from agent.schedule import Schedule
from agent.settings import AgentSettings
from gpuledger.clock import Clock
from gpuledger.records import DeviceAllocation, NodeSample
from gpuledger.runtime import Check
from gpuledger.runtime.logs import Repeats

_log = structlog.get_logger(__name__)
_repeats: Final = Repeats()


@dataclass(kw_only=True)
class SampleLoop:
    """The ticks of one node."""

    driver: Driver
    """Whom to ask."""
    sampler: Sampler
    """Who makes ticks of the answers."""
    hardware: InventoryTracker
    """What the node is built of."""
    watch: IncidentMonitor
    """Who looks at the health that was read."""
    allocations: Allocations | None
    """Who holds which GPU; `None` where nobody is asked."""
    outlets: Outputs
    """Where ticks go."""
    clock: Clock
    """Whose ticks they are."""
    check: Check
    """Whether `/proc` shows the processes."""
    made: Check
    """Whether ticks can be made of what was answered."""
    settings: AgentSettings
    """How often."""

    async def run(self) -> None:
        """Tick for ever."""
        schedule = Schedule(
            tick_ns=round(self.settings.tick_seconds * 1e9), due_ns=self.clock.monotonic_ns()
        )
        first_ns = round(min(self.settings.first_tick_seconds, self.settings.tick_seconds) * 1e9)
        while not await self._try_to_take():
            await self.clock.sleep(first_ns / 1e9)
        wait_seconds = schedule.restart(self.clock.monotonic_ns(), first_ns)
        while True:
            await self._rest(wait_seconds)
            late = schedule.is_late(self.clock.monotonic_ns())
            TICKS_LATE.inc(late)
            await self._try_to_take(late=late)
            wait_seconds = schedule.advance(self.clock.monotonic_ns())

    async def _rest(self, seconds: float) -> None:
        """Wait for the next tick; where the driver keeps accounts, look meanwhile who comes."""
        end_ns, pause_seconds = (
            self.clock.monotonic_ns() + seconds * 1e9,
            self.settings.process_scan_seconds,
        )
        while (
            self.driver.has_process_accounting
            and self.clock.monotonic_ns() + pause_seconds * 1e9 < end_ns
        ):
            await self.clock.sleep(pause_seconds)
            seen_ns = self.clock.boottime_ns()
            self.sampler.see(await self.driver.scan_processes(), seen_boottime_ns=seen_ns)
        await self.clock.sleep(max(0.0, (end_ns - self.clock.monotonic_ns()) / 1e9))

    async def _try_to_take(self, *, late: bool = False) -> bool:
        """Take one tick; what goes wrong in it costs that tick, and is told once."""
        try:
            has_answered = await self.take(late=late)
        except Exception as error:  # noqa: BLE001  # one tick is less than all that come after it
            TICKS_FAILED.inc()
            self.sampler.forget()
            detail = f"the last tick failed: {type(error).__name__}: {error}"
            if count := _repeats.count(type(error).__name__):
                _log.exception("tick_failed", count=count)
            self.made.failed(detail)
            return False
        if has_answered:
            self.made.ok(self._age(self.clock.monotonic_ns()))
        return has_answered

    def _age(self, made_ns: int) -> Callable[[], str]:
        """Return what says, whenever it is asked, how old the last tick is."""
        return lambda: f"the last tick was {(self.clock.monotonic_ns() - made_ns) / 1e9:.1f} s ago"

    async def take(self, *, late: bool = False) -> bool:
        """Take one tick and tell it; tells whether the driver answered at all."""
        began_seconds = time.perf_counter()
        moments: list[ClockReading] = []
        answers = await self.driver.poll(
            self.sampler.last_seen(), on_poll=lambda: moments.append(ClockReading.read(self.clock))
        )
        if answers is None:
            return False
        self._take_stock()
        tick = self.sampler.sample(
            answers,
            asked_boottime_ns=moments[-1].boottime_ns,
            at=moments[-1],
            allocations=self._allocated(),
            late=late,
        )
        if tick:
            self._tell(tick)
        TICK_SECONDS.observe(time.perf_counter() - began_seconds)
        return True

    def _take_stock(self) -> None:
        """Report what the node is built of, where that is news."""
        facts = self.driver.inventory()
        if facts:
            now_ns = self.clock.time_ns()
            self.outlets.tell_inventory(self.hardware.take(facts, time_ns=now_ns))

    def _allocated(self) -> Sequence[DeviceAllocation]:
        return self.allocations.current(self.hardware.devices) if self.allocations else ()

    def _tell(self, tick: NodeTick) -> None:
        if tick.processes and self.allocations:
            self.allocations.ask_soon()
        self.outlets.tell_tick(tick)
        for uuid in tick.cut_anew:
            self.watch.tell_of("mig_changed", uuid, _describe_cut(tick.sample, uuid))
        for gpu in tick.readings.gpus:
            if gpu.health:
                self.watch.look_at(gpu.uuid, gpu.health, time_ns=tick.sample.time_ns)
        if self.sampler.reads_processes:
            _check_processes(self.check, tick.sample)


def _describe_cut(sample: NodeSample, gpu_uuid: str) -> str:
    profiles = [gpu.mig_profile or "?" for gpu in sample.gpus if gpu.parent_uuid == gpu_uuid]
    return f"it has {', '.join(profiles) or 'no instances'} now"


def _check_processes(check: Check, sample: NodeSample) -> None:
    """Report so where /proc shows none of the driver's processes: it is another pid namespace's."""
    running = [process for process in sample.processes if not process.ended]
    if running and all(process.started_boottime_ns is None for process in running):
        check.failed(f"/proc shows none of the {len(running)} processes on GPUs: is hostPID set?")
    else:
        check.ok(f"{len(running)} processes on GPUs")
