"""When what happens to the scenario's pods in the API server: created, running, ended, deleted.

Here lives the order of events in nanoseconds since the scenario's start. What the objects look
like is `objects`' business, who writes them `player`'s.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from simulator.plan import NEVER_NS, PlannedPod

_MS: Final = 1_000_000
CREATED_BEFORE_NS: Final = 1500 * _MS
# Those of second 0 are created all at once, for which a busy API server takes its time.
FIRST_CREATED_BEFORE_NS: Final = 6000 * _MS
TERMINATING_NS: Final = 500 * _MS
FINISHED_STAYS_NS: Final = 3000 * _MS
RUNS_TO_AN_END: Final = ("Job", "CronJob", "PyTorchJob", "RayJob", "Workflow")


class PodStep(StrEnum):
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
    step: PodStep
    """What."""


def pod_events(pods: list[PlannedPod]) -> list[PodEvent]:
    """Return the steps of all pods that the API server knows, in order of time."""
    names: dict[tuple[str, str], list[PlannedPod]] = {}
    for pod in sorted(pods, key=lambda pod: pod.start_ns):
        if pod.spec.in_api:
            names.setdefault((pod.spec.namespace, pod.spec.name), []).append(pod)
    events = [event for same_name in names.values() for event in _one_after_another(same_name)]
    return sorted(events, key=lambda event: event.at_ns)


def _one_after_another(pods: list[PlannedPod]) -> list[PodEvent]:
    """Return the steps of pods of one name: each is deleted before the next one is created."""
    events: list[PodEvent] = []
    followers = [pod.start_ns for pod in pods[1:]] + [NEVER_NS]
    free_from_ns = -FIRST_CREATED_BEFORE_NS
    for pod, next_start_ns in zip(pods, followers, strict=True):
        before_ns = CREATED_BEFORE_NS if pod.start_ns else FIRST_CREATED_BEFORE_NS
        created_ns = max(pod.start_ns - before_ns, free_from_ns)
        steps = [(created_ns, PodStep.CREATED), (pod.start_ns, PodStep.RUNNING)]
        if pod.end_ns != NEVER_NS:
            step, stays_ns = _end_of(pod)
            free_from_ns = min(pod.end_ns + stays_ns, next_start_ns)
            steps += [(pod.end_ns, step), (free_from_ns, PodStep.DELETED)]
        events += [PodEvent(at_ns=at_ns, pod=pod, step=step) for at_ns, step in steps]
    return events


def _end_of(pod: PlannedPod) -> tuple[PodStep, int]:
    """Return how a pod ends, and for how long its object is there afterwards."""
    if pod.spec.owner is None or pod.spec.owner.kind in RUNS_TO_AN_END:
        return PodStep.FINISHED, FINISHED_STAYS_NS
    return PodStep.TERMINATING, TERMINATING_NS
