"""One run of a scenario: its nodes, its clock and its ground truth.

This module creates the parts and connects them. Two processes that start from the same scenario and
the same epoch have identical simulations, so they do not need to communicate.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from gpuledger.clock import NS_PER_SECOND, Clock
from gpuledger.errors import UserError
from gpuledger.small_files import read_small_file
from gpuledger_simulator import identities
from gpuledger_simulator.clock import NodeClock, ScaledClock, SetClock
from gpuledger_simulator.device import SimulatedGpu, describe_gpu
from gpuledger_simulator.ground_truth import (
    InstanceUsage,
    PodUsage,
    Usage,
    instance_usages,
    pod_usage,
    sum_usage,
)
from gpuledger_simulator.identities import FileUids, Uids
from gpuledger_simulator.kube_objects import SimulatedPodList
from gpuledger_simulator.kubelet import SimulatedKubelet
from gpuledger_simulator.nvml import SimulatedNvml
from gpuledger_simulator.nvml.faults import make_nvml
from gpuledger_simulator.plan import (
    PlannedProcess,
    gpu_groups,
    plan_faults,
    plan_incidents,
    plan_processes,
)
from gpuledger_simulator.planned_run import PlannedRun
from gpuledger_simulator.procfs import SimulatedJobFiles, SimulatedKmsg, SimulatedProcfs
from gpuledger_simulator.scenario.load import load_scenario
from gpuledger_simulator.schema import Node, Scenario

DEFAULT_SCENARIO: Final = Path(__file__).with_name("default.yaml")
"""The one-node scenario that is used if no file is given."""


_MACHINE_BYTES: Final = 512 << 30


@dataclass(frozen=True, kw_only=True)
class SimulatedNode:
    """The interfaces that an agent on this node uses."""

    name: str
    """The node's name."""
    nvml: SimulatedNvml
    """The node's NVML library, which reports its GPUs."""
    procfs: SimulatedProcfs
    """The node's `/proc`."""
    clock: NodeClock
    """The node's clock, with all steps of its wall clock."""
    gpus: list[SimulatedGpu]
    """The true state of the node's GPUs."""
    kubelet: SimulatedKubelet
    """The node's kubelet."""
    pod_list: SimulatedPodList
    """The kubelet's pod list as API objects."""
    open_kmsg: Callable[[], SimulatedKmsg]
    """Opens the kernel log at its end."""
    job_files: Callable[[], Mapping[str, bytes]] | None = None
    """Reads the scheduler's job directory; `None` if the scenario has no job on the node."""


class Simulation(PlannedRun):
    """A running scenario, as agents and API servers see it."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        epoch_ns: int,
        clock: Clock | None = None,
        uids: Uids | None = None,
    ) -> None:
        super().__init__(scenario, epoch_ns=epoch_ns, uids=uids)
        self.clock = clock or ScaledClock(epoch_ns=epoch_ns, speed=scenario.speed)
        self.processes = plan_processes(scenario, self.pods)
        self.nodes = {node.name: self._make_node(node) for node in scenario.nodes}

    def node(self, name: str) -> SimulatedNode:
        """Return a node by its name; raise `UserError` if the scenario does not contain it."""
        if name not in self.nodes:
            known = ", ".join(self.nodes)
            raise UserError(
                f"scenario {self.scenario.name}: unknown node {name!r}; available: {known}"
            )
        return self.nodes[name]

    def truth(self, start_ns: int, end_ns: int, node: str | None = None) -> list[PodUsage]:
        """Return the usage within [start, end) of each pod that ran then, in the scenario's order.

        Times are in nanoseconds since the Unix epoch. `node` restricts the result to one node.
        """
        start, end = start_ns - self.epoch_ns, end_ns - self.epoch_ns
        return [
            pod_usage(
                pod,
                sum_usage(self.node(pod.spec.node).gpus, start, end, of=pod),
                uid=self.uid(pod),
            )
            for pod in self.pods
            if node in (None, pod.spec.node) and pod.start_ns < end and pod.end_ns > start
        ]

    def host_truth(self, start_ns: int, end_ns: int, node: str | None = None) -> Usage:
        """Return the usage of processes outside pods within [start, end), on one or all nodes."""
        gpus = [
            gpu
            for simulated in self.nodes.values()
            if node in (None, simulated.name)
            for gpu in simulated.gpus
        ]
        start, end = start_ns - self.epoch_ns, end_ns - self.epoch_ns
        return sum_usage(gpus, start, end, of=None)

    def instance_truth(self, start_ns: int, end_ns: int, node: str) -> list[InstanceUsage]:
        """Return the usage of each of a node's MIG instances within [start, end)."""
        start, end = start_ns - self.epoch_ns, end_ns - self.epoch_ns
        return instance_usages(self.node(node).gpus, start, end)

    def _make_node(self, node: Node) -> SimulatedNode:
        seed, uptime_ns = self.scenario.seed, round(node.uptime_seconds * NS_PER_SECOND)
        processes = [process for process in self.processes if process.node == node.name]
        gpus = self._make_gpus(node, processes)
        incidents = plan_incidents(self.scenario, node)
        boot_time_ns = self.epoch_ns - uptime_ns
        jobs = [job for job in self.scenario.jobs if job.node == node.name]
        # The simulated parts use `truth`. The node itself shows `clock`, in which steps are
        # visible.
        truth = NodeClock(self.clock, boot_time_ns=boot_time_ns)
        steps = [
            SetClock(
                self.epoch_ns + round(step.at_seconds * NS_PER_SECOND),
                round(step.by_seconds * NS_PER_SECOND),
            )
            for step in node.clock_steps
        ]
        clock = NodeClock(self.clock, boot_time_ns=boot_time_ns, steps=steps)
        kubelet = SimulatedKubelet(
            self.pods,
            gpus,
            node=node.name,
            clock=truth,
            epoch_ns=self.epoch_ns,
            uid_of=self.given_uid,
            ended_seconds=node.ended_pods_listed_seconds,
        )
        return SimulatedNode(
            name=node.name,
            nvml=make_nvml(
                gpus,
                faults=plan_faults(self.scenario.faults, node.name),
                clock=truth,
                shown_ns=clock.shown_ns,
                epoch_ns=self.epoch_ns,
                uptime_ns=uptime_ns,
                sample_period_ns=round(self.scenario.sample_period_seconds * NS_PER_SECOND),
                incidents=incidents,
                event_support=node.events,
                driver=node.driver,
            ),
            procfs=SimulatedProcfs(
                processes,
                clock=truth,
                epoch_ns=self.epoch_ns,
                boot_id=identities.run_uuid(seed, self.epoch_ns, f"boot/{node.name}"),
                cgroup_driver=node.cgroup_driver,
                uid_of=self.given_uid,
                host_pid=node.host_pid,
                memory_bytes=_machine_bytes(gpus),
            ),
            clock=clock,
            gpus=gpus,
            kubelet=kubelet,
            pod_list=SimulatedPodList(self, kubelet, node=node.name),
            open_kmsg=partial(SimulatedKmsg, incidents, clock=truth, epoch_ns=self.epoch_ns),
            job_files=SimulatedJobFiles(jobs, clock=truth, epoch_ns=self.epoch_ns).read
            if jobs
            else None,
        )

    def _make_gpus(self, node: Node, processes: list[PlannedProcess]) -> list[SimulatedGpu]:
        seed = self.scenario.seed
        return [
            SimulatedGpu(
                describe_gpu(group, uuid=identities.gpu_uuid(seed, node.name, index), index=index),
                [process for process in processes if index in process.spec.gpus],
                seed=seed,
                time_slice_ns=round(self.scenario.time_slice_seconds * NS_PER_SECOND),
            )
            for index, group in enumerate(gpu_groups(node))
        ]


def _machine_bytes(gpus: Sequence[SimulatedGpu]) -> int:
    """Return the size of a node's memory; if the GPUs share it, this is a GPU's memory size."""
    unified = (gpu.facts.memory_bytes for gpu in gpus if gpu.facts.unified_memory)
    return next(unified, _MACHINE_BYTES)


def open_simulation(
    scenario: Path,
    *,
    epoch_ns: int = 0,
    epoch_file: Path | None = None,
    uids_file: Path | None = None,
) -> Simulation:
    """Read a scenario and start or join its run; raise `UserError` if an input is invalid.

    The epoch is `epoch_ns`, or the epoch in `epoch_file`, or now. If `uids_file` is given, the pods
    have the UIDs that a real API server assigned to them.
    """
    read = load_scenario(scenario)
    epoch_ns = choose_epoch_ns(epoch_ns, file=epoch_file)
    uids = FileUids(uids_file, epoch_ns=epoch_ns) if uids_file else None
    return Simulation(read, epoch_ns=epoch_ns, uids=uids)


def choose_epoch_ns(epoch_ns: int, *, file: Path | None = None) -> int:
    """Return `epoch_ns` if it is not 0, else the epoch in `file`, else the current time.

    The first process creates the file, so that processes that start later use the same epoch. Raise
    `UserError` if the file does not contain an epoch or cannot be written.
    """
    if epoch_ns:
        return epoch_ns
    now_ns = time.time_ns()
    if file is None:
        return now_ns
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        draft.write_text(f"{now_ns}\n")
        try:
            file.hardlink_to(draft)  # atomic: one process succeeds, with the full content
        except FileExistsError:
            return int(read_small_file(file).decode())
        finally:
            draft.unlink()
    except OSError as error:
        raise UserError(f"{file}: cannot read or write the epoch: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{file}: invalid epoch; delete the file to start a new run") from error
    return now_ns
