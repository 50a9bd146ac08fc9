"""A scenario planned for one run: pods, processes, faults and incidents, with ids and times.

This module turns the nested scenario into flat lists, with times in nanoseconds since the
scenario's start. It has no clock: callers pass the time. NVML, the kernel log and the kubelet each
report the plan in their own way.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Final

from gpuledger.clock import NS_PER_MS, NS_PER_SECOND
from gpuledger.errors import UserError
from gpuledger_simulator import identities
from gpuledger_simulator.schema import (
    Fault,
    GpuGroup,
    GpuIncident,
    HealthFault,
    Node,
    Process,
    Scenario,
    ScenarioPod,
)

_COMM_BYTES: Final = 15  # TASK_COMM_LEN without the null byte, as in /proc/<pid>/comm
NEVER_NS: Final = 1 << 62


@dataclass(frozen=True, kw_only=True)
class PlannedPod:
    """A pod that the simulator will run, with its start and end."""

    key: str
    """`namespace/name`, with `#2` appended if the name occurs a second time, and so on."""
    spec: ScenarioPod
    """The pod in the scenario."""
    start_ns: int
    """Start of the pod's containers."""
    end_ns: int
    """End of the pod's containers."""
    wait_ns: int
    """Time for which the pod waits for its node."""
    container_ids: dict[str, str]
    """The runtime's id of each container, by container name."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedProcess:
    """A process that the simulator will run, on all of its GPUs."""

    node: str
    """Node name."""
    pid: int
    """Process id."""
    spec: Process
    """The process in the scenario."""
    start_ns: int
    """Start time."""
    end_ns: int
    """End time."""
    pod: PlannedPod | None
    """The pod of the process; `None` on the host."""
    container_id: str | None
    """The id of the process's container; `None` on the host."""
    host_cgroup: str | None
    """Cgroup path of a host process; `None` in a pod."""

    @property
    def comm(self) -> str:
        """The kernel's name for the process."""
        name = self.spec.comm or self.spec.command.split()[0].rsplit("/", 1)[-1]
        return name.encode()[:_COMM_BYTES].decode(errors="ignore")

    def alive(self, time_ns: int) -> bool:
        """Return whether the process runs at `time_ns` since the scenario's start."""
        return self.start_ns <= time_ns < self.end_ns

    @cached_property
    def visits(self) -> Sequence[tuple[int, int]]:
        """The times at which the process has its GPUs open, as (start, end), in order."""
        plan = self.spec.visits
        if plan is None:
            return [(self.start_ns, self.end_ns)]
        first_ns = self.start_ns + _ns(plan.first_seconds)
        starts = (first_ns + number * _ns(plan.every_seconds) for number in range(plan.count))
        length_ns = _ns(plan.length_seconds)
        return [
            (start_ns, min(start_ns + length_ns, self.end_ns))
            for start_ns in starts
            if start_ns < self.end_ns
        ]

    def visit_at(self, time_ns: int) -> tuple[int, int] | None:
        """Return the latest visit that had started by `time_ns`; `None` if there is none yet."""
        begun = bisect_right(self.visits, time_ns, key=itemgetter(0))
        return self.visits[begun - 1] if begun else None

    def is_on_gpu(self, time_ns: int) -> bool:
        """Return whether the process has its GPUs open at `time_ns`."""
        visit = self.visit_at(time_ns)
        return visit is not None and time_ns < visit[1]

    def on_gpu_ns(self, start_ns: int, end_ns: int) -> int:
        """Return for how long within [start, end) the process had its GPUs open, in nanoseconds."""
        spans = (min(end_ns, end) - max(start_ns, start) for start, end in self.visits)
        return sum(max(0, span) for span in spans)


def gpu_groups(node: Node) -> list[GpuGroup]:
    """Return a node's GPUs in the driver's order, one entry per GPU."""
    groups = [node.gpus] if isinstance(node.gpus, GpuGroup) else node.gpus
    return [group for group in groups for _ in range(group.count)]


def plan_pods(scenario: Scenario, *, epoch_ns: int) -> list[PlannedPod]:
    """Return the planned pods, in the scenario's order."""
    seen: dict[str, int] = {}
    planned = []
    for pod in scenario.pods:
        name = f"{pod.namespace}/{pod.name}"
        # A name may occur several times, for example if a StatefulSet recreates a pod.
        seen[name] = seen.get(name, 0) + 1
        key = name if seen[name] == 1 else f"{name}#{seen[name]}"
        ids = {
            container.name: identities.container_id(
                scenario.seed, epoch_ns, f"{key}/{container.name}"
            )
            for container in pod.containers
        }
        planned.append(
            PlannedPod(
                key=key,
                spec=pod,
                start_ns=_ns(pod.start_seconds),
                end_ns=_end_ns(pod.end_seconds),
                wait_ns=_ns(pod.wait_seconds),
                container_ids=ids,
            )
        )
    return planned


def plan_processes(scenario: Scenario, pods: list[PlannedPod]) -> list[PlannedProcess]:
    """Return the planned processes in the scenario's order; processes in pods are first."""
    orders: Counter[str] = Counter()

    def next_pid(node: str, process: Process) -> int:
        # The order on the node determines the pid, so every process of a run derives the same pids.
        orders[node] += 1
        return process.pid or identities.pid(scenario.seed, node, orders[node] - 1)

    in_pods = [
        PlannedProcess(
            node=pod.spec.node,
            pid=next_pid(pod.spec.node, process),
            spec=process,
            start_ns=pod.start_ns + _ns(process.start_seconds),
            # A process ends at the latest with its pod, because the kubelet removes the pod's
            # cgroup.
            end_ns=min(_end_ns(process.end_seconds, after_ns=pod.start_ns), pod.end_ns),
            pod=pod,
            container_id=pod.container_ids[container.name],
            host_cgroup=None,
        )
        for pod in pods
        for container in pod.spec.containers
        for process in container.processes
    ]
    on_host = [
        PlannedProcess(
            node=process.node,
            pid=next_pid(process.node, process),
            spec=process,
            start_ns=_ns(process.start_seconds),
            end_ns=_end_ns(process.end_seconds),
            pod=None,
            container_id=None,
            host_cgroup=process.cgroup,
        )
        for process in scenario.host_processes
    ]
    return in_pods + on_host


def _ns(seconds: float) -> int:
    return round(seconds * NS_PER_SECOND)


def _end_ns(seconds: float | None, *, after_ns: int = 0) -> int:
    return NEVER_NS if seconds is None else after_ns + _ns(seconds)


OF_THE_DRIVER: Final = frozenset({"driver_reload", "version_mismatch", "unbind"})


@dataclass(frozen=True, kw_only=True)
class PlannedFault:
    """A fault with its times in nanoseconds since the scenario's start."""

    spec: Fault
    """The fault in the scenario."""
    start_ns: int
    """Start time."""
    end_ns: int | None
    """End time; `None` if the fault never ends."""

    def is_there(self, now_ns: int) -> bool:
        """Return whether the fault is active at `now_ns`."""
        return self.start_ns <= now_ns and (self.end_ns is None or now_ns < self.end_ns)

    def is_over(self, now_ns: int) -> bool:
        """Return whether the fault has ended by `now_ns`."""
        return self.end_ns is not None and self.end_ns <= now_ns

    def is_of(self, gpu: int | None, call: str) -> bool:
        """Return whether the fault affects a call; `gpu` is `None` for a call without a GPU."""
        if gpu is None:
            return call in self.spec.calls
        return gpu in (self.spec.gpus or (gpu,)) and call in (self.spec.calls or (call,))


def plan_faults(faults: Sequence[Fault], node: str) -> list[PlannedFault]:
    """Return the faults of a node, in the scenario's order."""
    return [
        PlannedFault(
            spec=fault,
            start_ns=_ns(fault.start_seconds),
            end_ns=None if fault.end_seconds is None else _ns(fault.end_seconds),
        )
        for fault in faults
        if fault.node == node
    ]


def check_faults(faults: Sequence[Fault], gpus: dict[str, int]) -> None:
    """Raise `UserError` if a fault is invalid; `gpus` has the number of GPUs by node."""
    for number, fault in enumerate(faults):
        where = f"faults[{number}]"
        if fault.node not in gpus:
            raise UserError(
                f"{where}.node: unknown node {fault.node!r}; available: {', '.join(gpus)}"
            )
        missing = [index for index in fault.gpus if index >= gpus[fault.node]]
        if missing:
            raise UserError(
                f"{where}.gpus: {fault.node} has no GPU {missing[0]}; "
                f"available: 0 to {gpus[fault.node] - 1}"
            )
        if fault.end_seconds is not None and fault.end_seconds <= fault.start_seconds:
            raise UserError(
                f"{where}.end_seconds: {fault.end_seconds} is not after "
                f"start_seconds {fault.start_seconds}"
            )
        if fault.kind in OF_THE_DRIVER and (fault.gpus or fault.calls):
            raise UserError(
                f"{where}.kind: {fault.kind} affects the whole driver; remove gpus and calls"
            )


@dataclass(frozen=True, kw_only=True)
class PlannedIncident:
    """One incident at one instant."""

    time_ns: int
    """Time, in nanoseconds since the scenario's start."""
    spec: GpuIncident
    """The incident in the scenario."""


def plan_incidents(scenario: Scenario, node: Node) -> list[PlannedIncident]:
    """Return a node's incidents in order of time; each new MIG layout is an incident."""
    specs = [spec for spec in scenario.incidents if spec.node == node.name]
    specs += [
        # As with the real driver, only NVML reports a new layout; the kernel log does not. A layout
        # that exists from the start is not an incident.
        GpuIncident(
            node=node.name,
            gpu=index,
            at_seconds=layout.start_seconds,
            event="mig_change",
            reported_by="nvml",
        )
        for index, group in enumerate(gpu_groups(node))
        for layout in group.mig
        if layout.start_seconds
    ]
    planned = [
        # Repetitions are a millisecond apart, so that each has its own time.
        PlannedIncident(time_ns=_ns(spec.at_seconds) + repeat * NS_PER_MS, spec=spec)
        for spec in specs
        for repeat in range(spec.times)
    ]
    return sorted(planned, key=lambda incident: incident.time_ns)


@dataclass(frozen=True)
class HealthFaults:
    """The health problems of one GPU: counts remain after a problem ends, states do not."""

    all: Sequence[HealthFault] = ()
    """The problems in the scenario's order."""

    def count(
        self, name: str, time_ns: int, *, since_ns: int = -NS_PER_SECOND, nvlink: int | None = None
    ) -> int:
        """Return the sum of the field `name` of all problems that start in (since_ns, time_ns].

        With `nvlink`, only the problems of this NVLink count.
        """
        # By default, the interval begins before the scenario's start and includes problems at 0 s.
        return sum(
            getattr(fault, name)
            for fault in self.all
            if since_ns < _ns(fault.start_seconds) <= time_ns
            and (nvlink is None or fault.nvlink == nvlink)
        )

    def has(self, name: str, time_ns: int) -> bool:
        """Return whether a problem that sets the field `name` is active at `time_ns`."""
        return any(getattr(fault, name) for fault in self.lasting(time_ns))

    def throttles(self, time_ns: int) -> set[str]:
        """Return the reasons for which the clocks are throttled at `time_ns`."""
        return {fault.throttle for fault in self.lasting(time_ns) if fault.throttle}

    def throttled_ns(self, throttles: Sequence[str], until_ns: int) -> int:
        """Return for how long these throttle reasons applied up to `until_ns`, in nanoseconds."""
        spans = [
            min(until_ns, _end_ns(fault.end_seconds)) - _ns(fault.start_seconds)
            for fault in self.all
            if fault.throttle in throttles
        ]
        return sum(max(0, span) for span in spans)

    def recovery(self, time_ns: int) -> str:
        """Return the recovery action that the driver requests at `time_ns`.

        If several problems request one, the last problem in the scenario decides.
        """
        recoveries = [fault.recovery for fault in self.lasting(time_ns) if fault.recovery != "none"]
        return recoveries[-1] if recoveries else "none"

    def lasting(self, time_ns: int) -> list[HealthFault]:
        """Return the problems that are active at `time_ns`, in the scenario's order."""
        return [
            fault
            for fault in self.all
            if _ns(fault.start_seconds) <= time_ns < _end_ns(fault.end_seconds)
        ]
