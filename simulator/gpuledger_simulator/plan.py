"""A scenario laid out for one run: its pods, processes, faults and incidents, with ids and times.

Here the YAML's nesting becomes flat lists in nanoseconds since the scenario's start. Nothing here
knows what time it is: whoever asks says so. How NVML, the kernel's log and the kubelet show what is
planned is theirs.
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

_COMM_BYTES: Final = 15  # TASK_COMM_LEN without its end, as in /proc/<pid>/comm
NEVER_NS: Final = 1 << 62


@dataclass(frozen=True, kw_only=True)
class PlannedPod:
    """A pod of the run."""

    key: str
    """`namespace/name`, and `#2` behind it where the name comes a second time."""
    spec: ScenarioPod
    """What the scenario says of it."""
    start_ns: int
    """When its containers start."""
    end_ns: int
    """When they end."""
    container_ids: dict[str, str]
    """The runtime's id of each container, by the container's name."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedProcess:
    """A process of the run, on all its GPUs."""

    node: str
    """The node on which it runs."""
    pid: int
    """Its process id."""
    spec: Process
    """What the scenario says of it."""
    start_ns: int
    """When it starts."""
    end_ns: int
    """When it ends."""
    pod: PlannedPod | None
    """Its pod; None on the host."""
    container_id: str | None
    """Its container's id; None on the host."""
    host_cgroup: str | None
    """Its cgroup path; None in a pod."""

    @property
    def comm(self) -> str:
        """The kernel's name of it."""
        name = self.spec.comm or self.spec.command.split()[0].rsplit("/", 1)[-1]
        return name.encode()[:_COMM_BYTES].decode(errors="ignore")

    def alive(self, time_ns: int) -> bool:
        """Whether it runs at `time_ns` since the scenario's start."""
        return self.start_ns <= time_ns < self.end_ns

    @cached_property
    def visits(self) -> Sequence[tuple[int, int]]:
        """The times in which it has its GPUs open, as (start, end), in order."""
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
        """Return the latest visit to its GPUs that had begun by then."""
        begun = bisect_right(self.visits, time_ns, key=itemgetter(0))
        return self.visits[begun - 1] if begun else None

    def is_on_gpu(self, time_ns: int) -> bool:
        """Return whether it has its GPUs open at `time_ns`."""
        visit = self.visit_at(time_ns)
        return visit is not None and time_ns < visit[1]

    def on_gpu_ns(self, start_ns: int, end_ns: int) -> int:
        """Return for how long within [start, end) it had its GPUs open."""
        spans = (min(end_ns, end) - max(start_ns, start) for start, end in self.visits)
        return sum(max(0, span) for span in spans)


def gpu_groups(node: Node) -> list[GpuGroup]:
    """Return the GPUs of a node one by one, in the driver's order."""
    groups = [node.gpus] if isinstance(node.gpus, GpuGroup) else node.gpus
    return [group for group in groups for _ in range(group.count)]


def plan_pods(scenario: Scenario, *, epoch_ns: int) -> list[PlannedPod]:
    """Lay out the pods in the scenario's order."""
    seen: dict[str, int] = {}
    planned = []
    for pod in scenario.pods:
        name = f"{pod.namespace}/{pod.name}"
        # A StatefulSet's pod comes again under its name, as another pod.
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
                container_ids=ids,
            )
        )
    return planned


def plan_processes(scenario: Scenario, pods: list[PlannedPod]) -> list[PlannedProcess]:
    """Lay out the processes, those of pods first, in the scenario's order."""
    orders: Counter[str] = Counter()

    def next_pid(node: str) -> int:
        # By the order on the node: whoever lays the same scenario out gives the same pids.
        orders[node] += 1
        return identities.pid(scenario.seed, node, orders[node] - 1)

    in_pods = [
        PlannedProcess(
            node=pod.spec.node,
            pid=next_pid(pod.spec.node),
            spec=process,
            start_ns=pod.start_ns + _ns(process.start_seconds),
            # No process outlives its pod: the kubelet ends its cgroup.
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
            pid=next_pid(process.node),
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
    """What the scenario says."""
    start_ns: int
    """When it begins."""
    end_ns: int | None
    """When it ends; `None` is never."""

    def is_there(self, now_ns: int) -> bool:
        """Return whether it is there."""
        return self.start_ns <= now_ns and (self.end_ns is None or now_ns < self.end_ns)

    def is_over(self, now_ns: int) -> bool:
        """Return whether it has been there."""
        return self.end_ns is not None and self.end_ns <= now_ns

    def is_of(self, gpu: int | None, call: str) -> bool:
        """Return whether a call is meant; `gpu` is `None` for one that takes no GPU."""
        if gpu is None:
            return call in self.spec.calls
        return gpu in (self.spec.gpus or (gpu,)) and call in (self.spec.calls or (call,))


def plan_faults(faults: Sequence[Fault], node: str) -> list[PlannedFault]:
    """Return the faults of a node in the scenario's order."""
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
    """Check them against the number of GPUs by node; raises UserError."""
    for number, fault in enumerate(faults):
        where = f"faults[{number}]"
        if fault.node not in gpus:
            raise UserError(f"{where}.node: no node {fault.node!r}; there is {', '.join(gpus)}")
        missing = [index for index in fault.gpus if index >= gpus[fault.node]]
        if missing:
            raise UserError(
                f"{where}.gpus: {fault.node} has no GPU {missing[0]}; "
                f"it has 0 to {gpus[fault.node] - 1}"
            )
        if fault.end_seconds is not None and fault.end_seconds <= fault.start_seconds:
            raise UserError(
                f"{where}.end_seconds: {fault.end_seconds} is not after "
                f"start_seconds {fault.start_seconds}"
            )
        if fault.kind in OF_THE_DRIVER and (fault.gpus or fault.calls):
            raise UserError(
                f"{where}.kind: {fault.kind} happens to the whole driver; leave out gpus and calls"
            )


@dataclass(frozen=True, kw_only=True)
class PlannedIncident:
    """One thing that happens once."""

    time_ns: int
    """When, since the scenario's start."""
    spec: GpuIncident
    """What the scenario says of it."""


def plan_incidents(scenario: Scenario, node: Node) -> list[PlannedIncident]:
    """Return what happens on a node, in the order of time; a new cut into instances is an event."""
    specs = [spec for spec in scenario.incidents if spec.node == node.name]
    specs += [
        # Only NVML tells of it, as the driver does: the kernel's log has no line for a new cut. The
        # one at the scenario's start was there before anybody could look.
        GpuIncident(
            node=node.name,
            gpu=index,
            at_seconds=layout.start_seconds,
            event="mig_change",
            told_by="nvml",
        )
        for index, group in enumerate(gpu_groups(node))
        for layout in group.mig
        if layout.start_seconds
    ]
    planned = [
        # A burst is a millisecond apart, so that each has a time of its own.
        PlannedIncident(time_ns=_ns(spec.at_seconds) + repeat * NS_PER_MS, spec=spec)
        for spec in specs
        for repeat in range(spec.times)
    ]
    return sorted(planned, key=lambda incident: incident.time_ns)


@dataclass(frozen=True)
class HealthFaults:
    """What befalls one GPU over time: counts stay, states end."""

    all: Sequence[HealthFault] = ()
    """As the scenario has them."""

    def count(
        self, name: str, time_ns: int, *, since_ns: int = -NS_PER_SECOND, nvlink: int | None = None
    ) -> int:
        """Return how often something has happened by now, and after `since_ns`; to one NVLink."""
        # By itself from before the start, or what happens at second 0 would not have happened.
        return sum(
            getattr(fault, name)
            for fault in self.all
            if since_ns < _ns(fault.start_seconds) <= time_ns
            and (nvlink is None or fault.nvlink == nvlink)
        )

    def has(self, name: str, time_ns: int) -> bool:
        """Return whether a state lasts now."""
        return any(getattr(fault, name) for fault in self.lasting(time_ns))

    def throttles(self, time_ns: int) -> set[str]:
        """Return why the clocks are held down now."""
        return {fault.throttle for fault in self.lasting(time_ns) if fault.throttle}

    def throttled_ns(self, throttles: Sequence[str], until_ns: int) -> int:
        """Return for how long they have been for these reasons, by now."""
        spans = [
            min(until_ns, _end_ns(fault.end_seconds)) - _ns(fault.start_seconds)
            for fault in self.all
            if fault.throttle in throttles
        ]
        return sum(max(0, span) for span in spans)

    def recovery(self, time_ns: int) -> str:
        """Return what the driver asks for now: the last of what it asks for."""
        recoveries = [fault.recovery for fault in self.lasting(time_ns) if fault.recovery != "none"]
        return recoveries[-1] if recoveries else "none"

    def lasting(self, time_ns: int) -> list[HealthFault]:
        """Return what lasts at an instant, in the scenario's order."""
        return [
            fault
            for fault in self.all
            if _ns(fault.start_seconds) <= time_ns < _end_ns(fault.end_seconds)
        ]
