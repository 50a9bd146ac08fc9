"""The agent at work: its parts put together for one node, run beside one another, and ended.

Several nodes may run in one process. What each part does is told in its own module.
"""

import asyncio
from collections.abc import Coroutine, Sequence

from agent.exposition.node_state import NodeState
from agent.gpu.driver import Driver
from agent.gpu.threads import wait_for
from agent.gpu.watchdog import Watchdog
from agent.host.kubelet.allocations import Allocations
from agent.host.kubelet.assignments import find_on
from agent.host.procfs import Procfs, check_procfs, read_boot_id
from agent.inventory import InventoryTracker
from agent.loop import Outputs, SampleLoop
from agent.metrics import ATTRIBUTION
from agent.monitor import AllocationsOn, IncidentMonitor
from agent.node import Host
from agent.publish.message_bundle import TickQueue
from agent.publish.publisher import SamplePublisher, shut_down
from agent.publish.send_queue import SendQueue
from agent.publish.spool import Spool
from agent.sampling import Sampler
from agent.settings import AgentSettings
from gpuledger.bus.protocol import Bus
from gpuledger.errors import UserError
from gpuledger.records import DeviceAllocation
from gpuledger.runtime import Backoff, Check, CheckSeverity, Readiness
from gpuledger.runtime.tasks import end_tasks

_CLOSING_SECONDS = 2.0


async def run_agent(
    *,
    machine: Host,
    bus: Bus | None,
    settings: AgentSettings,
    readiness: Readiness,
    view: NodeState | None = None,
) -> None:
    """Sample and publish one node until cancelled; what is queued then gets a last chance.

    Without a bus nothing is published; a view is shown each tick. Raises NothingWorksError where
    only a fresh start can help.
    """
    outbox = _outbox(settings, machine, readiness) if bus else None
    node = _run(machine, Outputs(outbox=outbox, view=view), settings, readiness)
    if bus and outbox:
        publisher = SamplePublisher(
            node=settings.node_name,
            bus=bus,
            outbox=outbox,
            check=readiness.check("kafka", severity=CheckSeverity.WARNING),
            backoff=Backoff(),
            catch_up_factor=settings.spool.catch_up_factor,
            now_ns=machine.clock.time_ns,
        )
        await _run_and_publish(node, publisher, outbox, flush_seconds=settings.flush_seconds)
    else:
        await node


async def _run_and_publish(
    node: Coroutine[None, None, None],
    publisher: SamplePublisher,
    outbox: SendQueue,
    *,
    flush_seconds: float,
) -> None:
    publishing = asyncio.create_task(publisher.run(), name="publishing")
    spilling = asyncio.create_task(outbox.run(), name="spilling")
    running = asyncio.create_task(node, name="node")
    try:
        await _first_to_fail(running, publishing, spilling)
    finally:
        await end_tasks(running)
        await shut_down(publisher, outbox, publishing, spilling, seconds=flush_seconds)


async def _run(
    machine: Host, outlets: Outputs, settings: AgentSettings, readiness: Readiness
) -> None:
    """Run everything that looks at the node; the driver is let go of at the end."""
    procfs_check = readiness.check("procfs", severity=CheckSeverity.WARNING)
    sampler = _sampler(settings, machine, procfs_check)
    hardware = InventoryTracker(node=settings.node_name, boot_id=_boot_id(machine.procfs))
    allocations = _allocations(machine, settings, readiness)
    watch = IncidentMonitor(
        node=settings.node_name,
        boot_id=_boot_id(machine.procfs),
        source=machine.gpus,
        clock=machine.clock,
        tell=outlets.tell_incident,
        processes_on=sampler.processes_on,
        allocations_on=_on(hardware, allocations),
        open_kmsg=machine.open_kmsg,
        kmsg_check=_kmsg_check(machine, readiness),
    )
    driver = _driver(machine, watch, settings, readiness)
    ticking = SampleLoop(
        driver=driver,
        sampler=sampler,
        hardware=hardware,
        watch=watch,
        allocations=allocations,
        outlets=outlets,
        clock=machine.clock,
        check=procfs_check,
        made=readiness.check("ticks"),
        settings=settings,
    )
    watchdog = Watchdog(driver, seconds=settings.watchdog_seconds, report=watch.tell_of)
    loops = [ticking.run(), watch.run(), watchdog.run()]
    if allocations:
        loops.append(allocations.run())
    try:
        await _run_all(loops)
    finally:
        await _close(driver)


def _driver(
    machine: Host, watch: IncidentMonitor, settings: AgentSettings, readiness: Readiness
) -> Driver:
    return Driver(
        machine.gpus,
        clock=machine.clock,
        check=readiness.check("nvml"),
        gpus_check=readiness.check("gpus", severity=CheckSeverity.WARNING),
        deadline_seconds=settings.patience_seconds,
        backoff=Backoff(),
        health_seconds=settings.health_seconds,
        report=watch.tell_of,
        listeners=(watch,),
    )


def _outbox(settings: AgentSettings, machine: Host, readiness: Readiness) -> SendQueue:
    spool = Spool(
        settings.spool,
        node=settings.node_name,
        boot_id=_boot_id(machine.procfs),
        boottime_ns=machine.clock.boottime_ns,
    )
    return SendQueue(
        queue=TickQueue(max_ticks=settings.queue_ticks),
        spool=spool if settings.spool.folder else None,
        check=readiness.check("spool", severity=CheckSeverity.WARNING),
        spill_after_seconds=settings.spool.spill_after_seconds,
    )


def _kmsg_check(machine: Host, readiness: Readiness) -> Check | None:
    return readiness.check("kmsg", severity=CheckSeverity.WARNING) if machine.open_kmsg else None


def _allocations(
    machine: Host, settings: AgentSettings, readiness: Readiness
) -> Allocations | None:
    if machine.kubelet is None or settings.kubelet.enabled is False:
        return None
    return Allocations(
        kubelet=machine.kubelet,
        clock=machine.clock,
        check=readiness.check("kubelet", severity=CheckSeverity.WARNING),
        backoff=Backoff(),
        settings=settings.kubelet,
    )


def _on(hardware: InventoryTracker, allocations: Allocations | None) -> AllocationsOn:
    def find(gpu_uuid: str, gpu_instance: int | None) -> Sequence[DeviceAllocation]:
        held = allocations.current(hardware.devices) if allocations else ()
        return find_on(held, gpu_uuid, gpu_instance)

    return find


def _boot_id(procfs: Procfs) -> str:
    """Return the kernel's id of this boot; raises `UserError` where `/proc` does not show it."""
    try:
        return read_boot_id(procfs)
    except OSError as error:
        raise UserError(f"cannot read /proc: {error}; the agent needs the node's /proc") from error


def _sampler(settings: AgentSettings, machine: Host, check: Check) -> Sampler:
    attribution = check_procfs(machine.procfs, wanted=settings.attribution)
    try:
        sampler = Sampler(
            node=settings.node_name,
            procfs=machine.procfs,
            fields=machine.gpus.fields,
            reads_processes=attribution.is_on,
        )
    except OSError as error:
        raise UserError(f"cannot read /proc: {error}; the agent needs the node's /proc") from error
    ATTRIBUTION.set(attribution.is_on)
    if attribution.is_wanted:
        check.ok(attribution.detail)
    else:
        check.failed(attribution.detail)
    return sampler


async def _close(driver: Driver) -> None:
    """Let go of the driver, unless a call hangs in it."""
    closing = driver.close()
    if closing:
        await wait_for(closing, _CLOSING_SECONDS)


async def _run_all(loops: Sequence[Coroutine[None, None, None]]) -> None:
    """Run loops that never end by themselves until one fails; end them all."""
    tasks = [asyncio.create_task(loop) for loop in loops]
    try:
        await _first_to_fail(*tasks)
    finally:
        await end_tasks(*tasks)


async def _first_to_fail(*tasks: "asyncio.Task[None]") -> None:
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
