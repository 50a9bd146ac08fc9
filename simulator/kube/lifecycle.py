"""When what happens to the scenario's pods in the API server: created, running, ended, deleted.

Here lives the order of events in nanoseconds since the scenario's start. What the objects look
like is `objects`' business, who writes them `player`'s.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from simulator.kernels import NEVER_NS
from simulator.plan import PlannedPod

_MS: Final = 1_000_000
CREATED_BEFORE_NS: Final = 1500 * _MS
TERMINATING_NS: Final = 500 * _MS
FINISHED_STAYS_NS: Final = 3000 * _MS
RUNS_TO_AN_END: Final = ("Job", "CronJob", "PyTorchJob", "RayJob", "Workflow")


class Step(StrEnum):
    """A step in a pod's life that the API server sees."""

    CREATED = "created"
    RUNNING = "running"
    FINISHED = "finished"
    TERMINATING = "terminating"
    DELETED = "deleted"


@dataclass(frozen=True, kw_only=True)
class PodEvent:
    """A step of one pod."""

    at_ns: int
    """When, in nanoseconds since the scenario's start."""
    pod: PlannedPod
    """Whose."""
    step: Step
    """What."""


def pod_events(pods: list[PlannedPod]) -> list[PodEvent]:
    """Give the steps of all pods that the API server knows, in order of time."""
    known = [pod for pod in pods if pod.spec.in_api]
    free_from: dict[str, int] = {}
    events: list[PodEvent] = []
    for pod in sorted(known, key=lambda pod: pod.start_ns):
        name = f"{pod.spec.namespace}/{pod.spec.name}"
        comes_again = any(other.key.startswith(f"{name}#") for other in known)
        steps = _steps(pod, free_from.get(name, pod.start_ns - CREATED_BEFORE_NS), comes_again)
        events += [PodEvent(at_ns=at_ns, pod=pod, step=step) for at_ns, step in steps]
        free_from[name] = steps[-1][0]
    return sorted(events, key=lambda event: event.at_ns)


def _steps(pod: PlannedPod, free_from_ns: int, comes_again: bool) -> list[tuple[int, Step]]:  # noqa: FBT001  # one caller
    created_ns = max(pod.start_ns - CREATED_BEFORE_NS, min(free_from_ns, pod.start_ns))
    steps = [(created_ns, Step.CREATED), (pod.start_ns, Step.RUNNING)]
    if pod.end_ns == NEVER_NS:
        return steps
    if pod.spec.owner is None or pod.spec.owner.kind in RUNS_TO_AN_END:
        stays_ns = TERMINATING_NS if comes_again else FINISHED_STAYS_NS
        return [*steps, (pod.end_ns, Step.FINISHED), (pod.end_ns + stays_ns, Step.DELETED)]
    deleted_ns = pod.end_ns + TERMINATING_NS
    return [*steps, (pod.end_ns, Step.TERMINATING), (deleted_ns, Step.DELETED)]
