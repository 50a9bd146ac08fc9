"""Wiring: builds, runs and ends the parts of one node's agent.

Each part is described in its own module. `run_agent` runs them concurrently until one fails or the
task is cancelled. Several nodes may run in one process.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from gpuledger.bus.protocol import Bus
from gpuledger.clock import Clock
from gpuledger.errors import UserError
from gpuledger.records import DeviceAllocation
from gpuledger.runtime import Backoff, Check, CheckSeverity, Readiness
from gpuledger.runtime.tasks import end_tasks, run_tasks
from gpuledger.topics import Topics
from gpuledger_agent.exposition import PageRenderer
from gpuledger_agent.exposition.node_state import NodeState, make_node_state
from gpuledger_agent.exposition.pod_lookup import PodLookup
from gpuledger_agent.gpu.driver import Driver
from gpuledger_agent.gpu.protocol import GpuSource
from gpuledger_agent.gpu.threads import wait_at_most
from gpuledger_agent.gpu.watchdog import Watchdog
from gpuledger_agent.host.job_directory import JobDirectory, ReadJobFiles
from gpuledger_agent.host.kmsg import Kmsg
from gpuledger_agent.host.kubelet.allocations import Allocations, Kubelet
from gpuledger_agent.host.kubelet.assignments import find_on
from gpuledger_agent.host.kubelet.pod_labels import PodLabels
from gpuledger_agent.host.kubelet.pod_list import NodePods, PodList
from gpuledger_agent.host.kubelet.shares.pod_shares import PodShares
from gpuledger_agent.host.node_pods import (
    ContainerNames,
    HasCgroup,
    ListNames,
    PodChanges,
    PodEnds,
    PodFolders,
    PodUids,
)
from gpuledger_agent.host.procfs import Procfs, check_procfs, read_boot_id
from gpuledger_agent.loop import InventoryTracker, Outputs, SampleLoop
from gpuledger_agent.metrics import ATTRIBUTION, count_published_from_zero
from gpuledger_agent.monitor import IncidentMonitor
from gpuledger_agent.publish.inventory_repeats import InventoryRepeats
from gpuledger_agent.publish.message_bundle import BundleQueue
from gpuledger_agent.publish.publisher import SamplePublisher, shut_down
from gpuledger_agent.publish.send_queue import SendQueue
from gpuledger_agent.publish.spool import Spool
from gpuledger_agent.sampling import Sampler
from gpuledger_agent.settings import AgentSettings

_CLOSING_SECONDS: Final = 2.0


@dataclass(frozen=True, kw_only=True)
class Host:
    """The interfaces through which the agent reads a node."""

    gpus: GpuSource
    """The GPUs."""
    procfs: Procfs
    """The files of `/proc`."""
    clock: Clock
    """The clocks."""
    kubelet: Kubelet | None = None
    """Reports the container of each allocated device; `None` if the kubelet must not be queried."""
    pod_list: PodList | None = None
    """Lists the node's pods with labels and annotations; `None` without access to the list."""
    list_log_names: ListNames = tuple
    """Returns the names of the containers' logs."""
    list_pod_folders: ListNames = tuple
    """Returns the names of the pods' log directories."""
    list_pod_cgroups: ListNames = tuple
    """Returns the names of the pods' cgroups."""
    has_cgroup: HasCgroup = lambda _: False
    """Returns whether the pod with a given UID has a cgroup."""
    read_job_files: ReadJobFiles | None = None
    """Reads the scheduler's job directory; `None` if there is none."""
    open_kmsg: Callable[[], Kmsg] | None = None
    """Opens the kernel log at its end; `None` if the kernel log must not be read."""

    @cached_property
    def pod_folders(self) -> PodFolders:
        """The names of the pods' log directories and cgroups; all users share one instance."""
        return PodFolders(
            list_folders=self.list_pod_folders,
            list_cgroups=self.list_pod_cgroups,
            has_cgroup=self.has_cgroup,
            clock=self.clock,
        )


@dataclass(frozen=True, kw_only=True)
class NodePage:
    """The page `/metrics` of one node."""

    render: PageRenderer
    """Returns the page."""
    node_state: NodeState
    """The samples and readings that the page shows."""
    pod_labels: PodLabels | None
    """The pod labels that the page shows; `None` if the page shows no pod labels."""


def make_page(host: Host, settings: AgentSettings) -> NodePage:
    """Return the node's page, which `run_agent` keeps up to date.

    It has no pod labels if none are configured or the agent has no access to the list of pods.
    """
    exposition, pod_labels = settings.exposition, None
    pods = PodLookup(
        name_of=ContainerNames(list_names=host.list_log_names, clock=host.clock).name_of,
        find_uids=PodUids(host.pod_folders).find,
    )
    if exposition.has_pod_labels and host.pod_list is not None:
        patterns = exposition.dcgm_pod_label_patterns if exposition.dcgm_pod_labels else None
        pod_labels = PodLabels(exposition.pod_labels, dcgm_patterns=patterns)
        pods = replace(
            pods, labels_of=pod_labels.labels_of, dcgm_labels_of=pod_labels.dcgm_labels_of
        )
    node_state = make_node_state(
        exposition,
        clock=host.clock,
        sampling_interval_seconds=settings.sampling_interval_seconds,
        readings_seconds=settings.readings_seconds,
        pods=pods,
    )
    return NodePage(
        render=PageRenderer(node_state, settings=exposition, clock=host.clock),
        node_state=node_state,
        pod_labels=pod_labels,
    )


async def run_agent(
    *,
    host: Host,
    bus: Bus | None,
    settings: AgentSettings,
    readiness: Readiness,
    page: NodePage | None = None,
) -> None:
    """Sample one node's GPUs and publish the samples until cancelled.

    After the cancellation, try for `flush_seconds` to publish the samples that are still queued.
    Without a bus, publish nothing. Keep `page` up to date if it is given. Raise `UserError` if
    `/proc` cannot be read, and `NothingWorksError` if no GPU answers and only a restart of the
    process can help.
    """
    context = AgentContext(
        host=host,
        settings=settings,
        readiness=readiness,
        pod_labels=page.pod_labels if page else None,
    )
    node_state = page.node_state if page else None
    topics = bus.topics if bus else Topics(settings.kafka.topic_prefix)
    count_published_from_zero(topics)
    # No queue without a bus, because nothing would empty it.
    if bus is None:
        await context.run_node(Outputs(send_queue=None, node_state=node_state, topics=topics))
        return
    send_queue = context.send_queue()
    publisher = context.publisher(bus, send_queue)
    publishing = asyncio.create_task(publisher.run(), name="publishing")
    spilling = asyncio.create_task(send_queue.run(), name="spilling")
    repeats = InventoryRepeats(bus=bus, send_queue=send_queue)
    repeating = asyncio.create_task(repeats.run(), name="repeating")
    outputs = Outputs(
        send_queue=send_queue,
        node_state=node_state,
        topics=topics,
        check=readiness.check("records", severity=CheckSeverity.WARNING),
        clock=host.clock,
    )
    running = asyncio.create_task(context.run_node(outputs), name="node")
    try:
        await _first_to_fail(running, publishing, spilling, repeating)
    finally:
        # Stop producing ticks before stopping the publisher.
        await end_tasks(running, repeating)
        await shut_down(publisher, send_queue, publishing, spilling, seconds=settings.flush_seconds)


class AgentContext:
    """Builds the parts of one node's agent."""

    def __init__(
        self,
        *,
        host: Host,
        settings: AgentSettings,
        readiness: Readiness,
        pod_labels: PodLabels | None = None,
    ) -> None:
        """Keep the arguments and read the boot id; raise `UserError` if `/proc` cannot be read."""
        self._host = host
        self._settings = settings
        self._readiness = readiness
        self._pod_labels = pod_labels
        # With labels, all of the list's failures matter; otherwise `PodShares` decides.
        self._pod_list_check = (
            readiness.check("pod_labels", severity=CheckSeverity.WARNING) if pod_labels else Check()
        )
        self._shares: PodShares | None = None
        try:
            self._boot_id = read_boot_id(host.procfs)
        except OSError as error:
            raise UserError(
                f"cannot read /proc: {error}; the agent needs the node's /proc"
            ) from error

    async def run_node(self, outputs: Outputs) -> None:
        """Run every loop that reads the node until one fails; close the driver at the end."""
        host, settings = self._host, self._settings
        procfs_check = self._readiness.check("procfs", severity=CheckSeverity.WARNING)
        sampler = self.sampler(procfs_check)
        inventory = InventoryTracker(node=settings.node, boot_id=self._boot_id)
        allocations = self.allocations()
        pods = self._node_pods()
        monitor = self._monitor(outputs, sampler, inventory, allocations)
        driver = self._driver(monitor)
        loop = SampleLoop(
            driver=driver,
            sampler=sampler,
            inventory=inventory,
            monitor=monitor,
            allocations=allocations,
            pods=pods,
            jobs=self.jobs(),
            outputs=outputs,
            clock=host.clock,
            procfs_check=procfs_check,
            mig_check=self._readiness.check("mig", severity=CheckSeverity.WARNING),
            samples_check=self._readiness.check("samples"),
            settings=settings,
        )
        watchdog = Watchdog(driver, seconds=settings.watchdog_seconds, report=monitor.report)
        loops = [loop.run(), monitor.run(), watchdog.run()]
        if allocations:
            loops.append(allocations.run())
        if pods:
            loops.append(pods.run(self._pod_list_check))
        try:
            await _run_all(loops)
        finally:
            # Do not wait for a call that hangs in the driver.
            if closing := driver.close():
                await wait_at_most(closing, _CLOSING_SECONDS)

    def _monitor(
        self,
        outputs: Outputs,
        sampler: Sampler,
        inventory: InventoryTracker,
        allocations: Allocations | None,
    ) -> IncidentMonitor:
        """Return the incident monitor; it adds the GPU's processes and allocations to incidents."""
        host = self._host

        def allocations_on(gpu_uuid: str, gpu_instance: int | None) -> Sequence[DeviceAllocation]:
            allocated = allocations.current(inventory.devices) if allocations else ()
            return find_on(allocated, gpu_uuid, gpu_instance)

        return IncidentMonitor(
            node=self._settings.node,
            boot_id=self._boot_id,
            source=host.gpus,
            clock=host.clock,
            publish=outputs.report_incident,
            processes_on=sampler.processes_on,
            allocations_on=allocations_on,
            open_kmsg=host.open_kmsg,
            kmsg_check=self._readiness.check("kmsg", severity=CheckSeverity.WARNING)
            if host.open_kmsg
            else None,
            slowdown_seconds=self._settings.incidents.slowdown_seconds,
        )

    def _driver(self, monitor: IncidentMonitor) -> Driver:
        """Return the driver, which polls the GPUs and reports lost GPUs to the monitor."""
        settings = self._settings
        return Driver(
            self._host.gpus,
            clock=self._host.clock,
            check=self._readiness.check("nvml"),
            gpus_check=self._readiness.check("gpus", severity=CheckSeverity.WARNING),
            deadline_seconds=settings.poll_timeout_seconds,
            backoff=Backoff(),
            readings_seconds=settings.readings_seconds,
            health_seconds=settings.health_seconds,
            report=monitor.report,
            listeners=(monitor,),
        )

    def send_queue(self) -> SendQueue:
        """Return the send queue, with a spool if one is configured."""
        settings = self._settings
        spool = Spool(
            settings.spool,
            node=settings.node,
            boot_id=self._boot_id,
            boottime_ns=self._host.clock.boottime_ns,
        )
        return SendQueue(
            queue=BundleQueue(max_bundles=settings.queue_samples),
            spool=spool if settings.spool.directory else None,
            check=self._readiness.check("spool", severity=CheckSeverity.WARNING),
            spill_after_seconds=settings.spool.spill_after_seconds,
        )

    def publisher(self, bus: Bus, send_queue: SendQueue) -> SamplePublisher:
        """Return the publisher, which sends the bundles of the send queue to the bus."""
        return SamplePublisher(
            node=self._settings.node,
            bus=bus,
            send_queue=send_queue,
            check=self._readiness.check("kafka", severity=CheckSeverity.WARNING),
            backoff=Backoff(),
            catch_up_factor=self._settings.spool.catch_up_factor,
            clock=self._host.clock,
        )

    def sampler(self, procfs_check: Check) -> Sampler:
        """Return the sampler, and set the check of `/proc`.

        The sampler omits processes if attribution is off or `/proc` is not the whole machine's.
        """
        host = self._host
        access = check_procfs(host.procfs, wanted=self._settings.attribution)
        ATTRIBUTION.set(access.is_on)
        if access.matches_setting:
            procfs_check.ok(access.detail)
        else:
            procfs_check.failed(access.detail)
        return Sampler(
            node=self._settings.node,
            procfs=host.procfs,
            reads_processes=access.is_on,
        )

    def jobs(self) -> JobDirectory | None:
        """Return the reader of the scheduler's job directory; `None` without such a directory."""
        if self._host.read_job_files is None:
            return None
        check = self._readiness.check("job_files", severity=CheckSeverity.WARNING)
        return JobDirectory(self._host.read_job_files, check=check)

    def allocations(self) -> Allocations | None:
        """Return the reader of device allocations; `None` if the kubelet must not be queried."""
        host, settings = self._host, self._settings.kubelet
        # `auto` queries any kubelet; each query finds out whether the socket exists.
        if host.kubelet is None or settings.enabled is False:
            return None
        wants_shares = host.pod_list is not None and self._settings.allocations.sources
        self._shares = PodShares(
            self._settings.allocations,
            check=self._readiness.check("allocations", severity=CheckSeverity.WARNING),
            pod_list_check=self._pod_list_check if wants_shares else None,
        )
        return Allocations(
            kubelet=host.kubelet,
            clock=host.clock,
            check=self._readiness.check("kubelet", severity=CheckSeverity.WARNING),
            backoff=Backoff(),
            settings=settings,
            ends=PodEnds(host.pod_folders),
            have_pods_changed=PodChanges(host.list_pod_folders, host.list_pod_cgroups).have_changed,
            shares=self._shares,
        )

    def _node_pods(self) -> NodePods | None:
        """Return the loop that queries the list of pods; `None` if nothing reads it."""
        host, settings = self._host, self._settings
        shares = self._shares if settings.allocations.sources else None
        readers = [reader for reader in (self._pod_labels, shares) if reader]
        if host.pod_list is None or not readers:
            return None
        return NodePods(
            host.pod_list,
            readers,
            refresh_seconds=settings.kubelet.api.refresh_seconds,
            clock=host.clock,
            has_cgroup=host.has_cgroup,
        )


async def _run_all(loops: Sequence[Coroutine[None, None, None]]) -> None:
    """Run endless loops until one fails, then end the others and raise the error."""
    async with run_tasks(*loops) as tasks:
        await _first_to_fail(*tasks)


async def _first_to_fail(*tasks: "asyncio.Task[None]") -> None:
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
