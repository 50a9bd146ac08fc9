"""The sampling loop: queries the GPUs, makes a tick and queues it; never waits for Kafka."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import structlog

from gpuledger.clock import NS_PER_SECOND, Clock, boot_time_ns
from gpuledger.keys import NodeId
from gpuledger.records import Incident, Inventory, NodeSample
from gpuledger.runtime import Check
from gpuledger.runtime.logs import Repeats
from gpuledger.topics import Topics
from gpuledger_agent.core.fast_polls import FastPollPlan, FastPollTime
from gpuledger_agent.core.raw import ClockReading, NodeFacts, RawGpuSample
from gpuledger_agent.core.tick import NodeTick
from gpuledger_agent.exposition.node_state import NodeState
from gpuledger_agent.gpu.driver import Driver
from gpuledger_agent.host.cgroup import UNRECOGNIZED
from gpuledger_agent.host.job_directory import JobDirectory
from gpuledger_agent.host.kubelet.allocations import Allocations
from gpuledger_agent.host.kubelet.assignments import DeviceIndex
from gpuledger_agent.host.kubelet.pod_list import NodePods
from gpuledger_agent.metrics import (
    FAST_POLLS_FAILED,
    PROCESSES_UNRECOGNIZED,
    TICK_SECONDS,
    TICKS_FAILED,
    TICKS_LATE,
)
from gpuledger_agent.monitor import IncidentMonitor
from gpuledger_agent.publish.message_bundle import bundle_incident, bundle_inventory, bundle_tick
from gpuledger_agent.publish.send_queue import SendQueue
from gpuledger_agent.sampling import Sampler
from gpuledger_agent.settings import AgentSettings

_log = structlog.get_logger(__name__)
_repeats: Final = Repeats()
_ANSWER_RATIO: Final = 0.25
"""Maximum part of the sampling interval for which a tick waits for the kubelet's answer, counted
from the tick's start."""


@dataclass(kw_only=True)
class Schedule:
    """The times at which ticks are due; missed ticks are skipped."""

    tick_ns: int
    """Time between two ticks."""
    due_ns: int
    """Monotonic time at which the next tick is due."""

    def is_late(self, now_ns: int) -> bool:
        """Return whether a tick that begins now is late by more than half an interval."""
        return now_ns - self.due_ns > self.tick_ns // 2

    def advance(self, now_ns: int) -> float:
        """Set `due_ns` to the first due time after `now_ns`; return the seconds until then."""
        missed = max(0, now_ns - self.due_ns) // self.tick_ns
        self.due_ns += (missed + 1) * self.tick_ns
        return (self.due_ns - now_ns) / NS_PER_SECOND


class InventoryTracker:
    """The GPUs of one node according to the driver's last answer."""

    def __init__(self, *, node: NodeId, boot_id: str) -> None:
        self._node = node
        self._boot_id = boot_id
        self.devices = DeviceIndex()
        """The GPUs and MIG instances to which device ids can resolve."""

    def update(self, facts: NodeFacts, *, time_ns: int) -> Inventory:
        """Store the node's GPUs; return the inventory record that reports them."""
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
    """The agent's outputs that are switched on."""

    send_queue: SendQueue | None
    """Queue of the messages to publish; `None` if nothing is published."""
    node_state: NodeState | None
    """State of the `/metrics` page; `None` without that page."""
    topics: Topics
    """The topics to which the messages go."""
    check: Check | None = None
    """Check that fails if rows of the last sample were left out of its record."""
    clock: Clock | None = None
    """The clock of incidents and inventories; `None` if their times must not be corrected."""

    def report_tick(self, tick: NodeTick) -> None:
        """Queue a tick for publishing, and show it on `/metrics`."""
        self._put_tick(tick)
        if self.node_state:
            self.node_state.update(tick.sample, tick.readings, processes=tick.processes)

    def report_silence(self, tick: NodeTick) -> None:
        """Queue a tick in which the driver did not answer.

        `/metrics` is not updated, so its values become stale.
        """
        self._put_tick(tick)

    def report_incident(self, incident: Incident) -> None:
        """Queue an incident for publishing, and count it on `/metrics`."""
        if self.send_queue:
            self.send_queue.put(
                bundle_incident(incident, self.topics, boot_time_ns=self._boot_time_ns)
            )
        if self.node_state:
            self.node_state.record_incident(incident)

    def report_inventory(self, inventory: Inventory) -> None:
        """Queue the node's hardware for publishing, and show it on `/metrics`."""
        if self.send_queue:
            self.send_queue.put_inventory(
                bundle_inventory(inventory, self.topics, boot_time_ns=self._boot_time_ns)
            )
        if self.node_state:
            self.node_state.set_inventory(inventory)

    def _put_tick(self, tick: NodeTick) -> None:
        if self.send_queue:
            self.send_queue.put(bundle_tick(tick, self.topics, check=self.check))

    @property
    def _boot_time_ns(self) -> int | None:
        return boot_time_ns(self.clock) if self.clock else None


@dataclass(kw_only=True)
class SampleLoop:
    """Makes the ticks of one node and reports them to the outputs."""

    driver: Driver
    """Polls the GPUs."""
    sampler: Sampler
    """Makes ticks from the GPUs' answers."""
    inventory: InventoryTracker
    """The node's hardware."""
    monitor: IncidentMonitor
    """Reports incidents, and evaluates the health readings."""
    allocations: Allocations | None
    """The devices allocated to containers; `None` if the kubelet is not queried."""
    pods: NodePods | None = None
    """The node's pods with labels and annotations; `None` if nothing uses them."""
    jobs: JobDirectory | None = None
    """The devices allocated to jobs; `None` if no scheduler reports them."""
    outputs: Outputs
    """Receives the ticks."""
    clock: Clock
    """The node's clock."""
    procfs_check: Check
    """Check of whether `/proc` shows the processes."""
    mig_check: Check
    """Check of whether the driver shows the existing MIG instances."""
    samples_check: Check
    """Check of whether ticks can be made from the GPUs' answers."""
    settings: AgentSettings
    """The intervals and timeouts."""
    _hidden_ticks: int = field(default=0, init=False)
    """Number of consecutive ticks in which `/proc` showed none of the processes on the GPUs."""

    async def run(self) -> None:
        """Make ticks until cancelled."""
        tick_ns = round(self.settings.sampling_interval_seconds * NS_PER_SECOND)
        first_seconds = min(
            self.settings.first_sample_seconds, self.settings.sampling_interval_seconds
        )
        first_ns = round(first_seconds * NS_PER_SECOND)
        # The first interval begins with the driver's first answer.
        while not await self._try_tick():
            await self.clock.sleep(first_ns / NS_PER_SECOND)
        schedule = Schedule(tick_ns=tick_ns, due_ns=self.clock.monotonic_ns() + first_ns)
        wait_seconds = first_ns / NS_PER_SECOND
        while True:
            await self._wait(wait_seconds)
            late = schedule.is_late(self.clock.monotonic_ns())
            TICKS_LATE.inc(late)
            await self._try_tick(late=late)
            # Advance after the tick, so that a tick that takes too long skips the ticks due in it.
            wait_seconds = schedule.advance(self.clock.monotonic_ns())

    async def _wait(self, seconds: float) -> None:
        """Wait for the next tick; meanwhile, make the fast polls of GPUs that need them."""
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
        """Pass late answers to fast polls to the sampler, because the tick needs their energy."""
        with self._fast_polling():
            self.sampler.take_fast_polls(self.driver.take_late_polls())

    @contextmanager
    def _fast_polling(self) -> Iterator[None]:
        """Catch, count and log errors of fast polls, so that only the polls' data is lost."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # the next tick repeats all queries
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
        """Make one tick; return whether it succeeded and the driver answered.

        An error is counted and logged, and only this tick is lost.
        """
        try:
            has_answered = await self.tick(late=late)
        except Exception as error:  # noqa: BLE001  # the ticks that follow matter more
            TICKS_FAILED.inc()
            self.sampler.forget()
            detail = f"the last sample failed: {type(error).__name__}: {error}"
            if count := _repeats.count(type(error).__name__):
                _log.exception("sample_failed", count=count)
            self.samples_check.failed(detail)
            return False
        if has_answered:
            made_ns, clock = self.clock.monotonic_ns(), self.clock

            def describe() -> str:
                seconds_ago = (clock.monotonic_ns() - made_ns) / NS_PER_SECOND
                return f"the last sample was {seconds_ago:.1f} s ago"

            self.samples_check.ok(describe)
        return has_answered

    async def tick(self, *, late: bool = False) -> bool:
        """Make one tick and report it; return whether the driver answered."""
        began_seconds = time.perf_counter()
        if self.allocations:
            self.allocations.request_if_due()
        if self.pods:
            self.pods.request_if_due()
        self._take_late_polls()
        poll = await self.driver.poll(self.sampler.begin_tick())
        if poll:
            self._check_mig(poll.samples)
        # Update the devices before the tick, because allocations are resolved to them.
        if poll and (facts := self.driver.inventory()):
            time_ns = self.clock.time_ns()
            self.outputs.report_inventory(self.inventory.update(facts, time_ns=time_ns))
        # Until a GPU is known, there is nothing to report.
        if poll is None and not self.inventory.devices.uuids:
            return False
        if self.allocations:
            spent_seconds = time.perf_counter() - began_seconds
            await self.allocations.wait_answer(
                self.settings.sampling_interval_seconds * _ANSWER_RATIO - spent_seconds
            )
        self._take_late_polls()
        tick = self.sampler.sample(
            # Without the driver no GPU answers, but GPUs may still be allocated to containers.
            poll.samples if poll else (),
            at=poll.at if poll else ClockReading.read(self.clock),
            known=self.inventory.devices.uuids,
            allocations=self.allocations.current(self.inventory.devices)
            if self.allocations
            else (),
            allocations_unknown=self.allocations is not None and self.allocations.are_unknown,
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
                f"the driver does not show the agent the MIG instances of {', '.join(hidden)}: set"
                " NVIDIA_MIG_MONITOR_DEVICES=all in its container and add the capability SYS_ADMIN"
            )
        else:
            count = sum(gpu.mig_enabled or False for gpu in samples)
            self.mig_check.ok(f"{count} GPUs are partitioned into MIG instances")

    def _report(self, tick: NodeTick) -> None:
        if tick.processes and self.allocations:
            # If a process started or ended, a device may have been allocated or released.
            self.allocations.refresh_soon()
        self.outputs.report_tick(tick)
        for uuid in tick.relayouted:
            instances = (gpu for gpu in tick.sample.gpus if gpu.parent_uuid == uuid)
            profiles = ", ".join(gpu.mig_profile or "?" for gpu in instances)
            self.monitor.report("mig_changed", uuid, f"it has {profiles or 'no instances'} now")
        for gpu in tick.readings.gpus:
            self.monitor.evaluate_health(gpu, time_ns=tick.sample.time_ns)
        if self.sampler.reads_processes:
            self._check_processes(tick.sample)

    def _check_processes(self, sample: NodeSample) -> None:
        running = [process for process in sample.processes if not process.ended]
        jobs = [
            sample.containers[process.container].job_id or ""
            for process in running
            if process.container is not None
        ]
        unrecognized = [job_id for job_id in jobs if job_id.startswith(UNRECOGNIZED)]
        PROCESSES_UNRECOGNIZED.inc(len(unrecognized))
        if unlisted := self.sampler.unlisted_gpus:
            self.procfs_check.failed(
                f"the driver refuses to list the processes on {', '.join(unlisted)}, so their users"
                " are unknown; gpuledger_agent_nvml_errors_total shows the call and its error"
            )
            return
        is_hidden = all(process.started_boottime_ns is None for process in running)
        self._hidden_ticks = self._hidden_ticks + 1 if running and is_hidden else 0
        # Processes that have just ended cannot be read either, but this hardly ever affects all
        # processes in two consecutive ticks.
        if self._hidden_ticks > 1:
            self.procfs_check.failed(
                f"/proc shows none of the {len(running)} processes on GPUs; set hostPID: true"
            )
        elif unrecognized:
            self.procfs_check.failed(
                f"{len(unrecognized)} processes on GPUs are in cgroups of no known form, so their"
                f" use has the job ids {', '.join(sorted(set(unrecognized)))}; update the agent, or"
                " report the output of gpuledger cgroup /proc/PID/cgroup"
            )
        elif self.sampler.shows_no_cgroups and (sample.allocations or sample.job_allocations):
            self.procfs_check.failed(
                f"all {len(running)} processes on GPUs are in the cgroup /, so the use of pods and"
                " jobs is attributed to the host; turn on cgroups in the container runtime and the"
                " kubelet"
            )
        elif not self._hidden_ticks:
            self.procfs_check.ok(f"{len(running)} processes on GPUs")
