"""A scenario laid out for one run: every pod, container and process with its ids and its times.

Here the YAML's nesting becomes flat lists in nanoseconds since the scenario's start. Nothing here
knows what time it is.
"""

from dataclasses import dataclass

from simulator import identities
from simulator.kernels import NEVER_NS
from simulator.scenario.schema import HostProcess, Process, Scenario, ScenarioContainer, ScenarioPod

_NS = 1_000_000_000
_COMM_BYTES = 15


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


def plan_pods(scenario: Scenario, *, epoch_ns: int) -> list[PlannedPod]:
    """Lay out the pods in the scenario's order."""
    seen: dict[str, int] = {}
    planned = []
    for pod in scenario.pods:
        name = f"{pod.namespace}/{pod.name}"
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
    pids = _Pids(scenario.seed)
    in_pods = [
        _in_pod(pod, container, process, pids)
        for pod in pods
        for container in pod.spec.containers
        for process in container.processes
    ]
    return in_pods + [_on_host(process, pids) for process in scenario.host_processes]


class _Pids:
    """Hands out the pids of each node."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._given: dict[str, int] = {}

    def next(self, node: str) -> int:
        self._given[node] = self._given.get(node, -1) + 1
        return identities.pid(self._seed, node, self._given[node])


def _in_pod(
    pod: PlannedPod, container: ScenarioContainer, process: Process, pids: _Pids
) -> PlannedProcess:
    end_ns = _end_ns(process.end_seconds, after_ns=pod.start_ns)
    return PlannedProcess(
        node=pod.spec.node,
        pid=pids.next(pod.spec.node),
        spec=process,
        start_ns=pod.start_ns + _ns(process.start_seconds),
        end_ns=min(end_ns, pod.end_ns),
        pod=pod,
        container_id=pod.container_ids[container.name],
        host_cgroup=None,
    )


def _on_host(process: HostProcess, pids: _Pids) -> PlannedProcess:
    return PlannedProcess(
        node=process.node,
        pid=pids.next(process.node),
        spec=process,
        start_ns=_ns(process.start_seconds),
        end_ns=_end_ns(process.end_seconds),
        pod=None,
        container_id=None,
        host_cgroup=process.cgroup,
    )


def _ns(seconds: float) -> int:
    return round(seconds * _NS)


def _end_ns(seconds: float | None, *, after_ns: int = 0) -> int:
    return NEVER_NS if seconds is None else after_ns + _ns(seconds)
