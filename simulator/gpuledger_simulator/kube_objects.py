"""The scenario's nodes, pods and owners as Kubernetes objects, and the steps of a pod's life.

This module defines the order of the steps, in nanoseconds since the scenario's start, and the form
of the objects. `server` writes the objects. The server assigns resource versions; a real API server
also assigns the UIDs.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

import orjson

from gpuledger.clock import NS_PER_MS, NS_PER_SECOND
from gpuledger_simulator import identities
from gpuledger_simulator.kubelet import SimulatedKubelet
from gpuledger_simulator.plan import NEVER_NS, PlannedPod, gpu_groups
from gpuledger_simulator.planned_run import PlannedRun
from gpuledger_simulator.schema import Controller, Node, Owner, ScenarioContainer, ScenarioPod

# The start of a pod in the scenario is the start of its containers; the pod is created earlier.
CREATED_BEFORE_NS: Final = 1500 * NS_PER_MS
# All pods that start at second 0 are created at the same time, for which a busy API server needs
# longer.
FIRST_CREATED_BEFORE_NS: Final = 6000 * NS_PER_MS
TERMINATING_NS: Final = 500 * NS_PER_MS
FINISHED_STAYS_NS: Final = 3000 * NS_PER_MS
RUNS_TO_AN_END: Final = ("Job", "CronJob", "PyTorchJob", "RayJob", "Workflow")


class PodStep(StrEnum):
    """A step in a pod's life that is visible in the API server."""

    CREATED = "created"
    SCHEDULED = "scheduled"
    RUNNING = "running"
    FINISHED = "finished"
    TERMINATING = "terminating"
    DELETED = "deleted"


@dataclass(frozen=True, kw_only=True)
class PodEvent:
    """A step of one pod."""

    at_ns: int
    """Time, in nanoseconds since the scenario's start."""
    pod: PlannedPod
    """The pod."""
    step: PodStep
    """The step."""


def pod_events(pods: list[PlannedPod]) -> list[PodEvent]:
    """Return the steps of all pods that exist in the API server, in order of time."""
    names: dict[tuple[str, str], list[PlannedPod]] = {}
    for pod in sorted(pods, key=lambda pod: pod.start_ns):
        if pod.spec.in_api:
            names.setdefault((pod.spec.namespace, pod.spec.name), []).append(pod)
    events = [event for same_name in names.values() for event in _one_after_another(same_name)]
    return sorted(events, key=lambda event: event.at_ns)


def _one_after_another(pods: list[PlannedPod]) -> list[PodEvent]:
    """Return the steps of pods with the same name; each is deleted before the next is created."""
    events: list[PodEvent] = []
    followers = [pod.start_ns for pod in pods[1:]] + [NEVER_NS]
    free_from_ns = -FIRST_CREATED_BEFORE_NS
    for pod, next_start_ns in zip(pods, followers, strict=True):
        before_ns = CREATED_BEFORE_NS if pod.start_ns else FIRST_CREATED_BEFORE_NS
        created_ns = max(pod.start_ns - before_ns - pod.wait_ns, free_from_ns)
        steps = [(created_ns, PodStep.CREATED)]
        if pod.wait_ns:
            # A pod that does not wait is created with its node.
            steps.append((max(pod.start_ns - before_ns, created_ns), PodStep.SCHEDULED))
        steps.append((pod.start_ns, PodStep.RUNNING))
        if pod.end_ns != NEVER_NS:
            # A pod that runs to completion stays as finished. A pod whose controller keeps it
            # running ends only by deletion.
            if pod.spec.owner is None or pod.spec.owner.kind in RUNS_TO_AN_END:
                step, stays_ns = PodStep.FINISHED, FINISHED_STAYS_NS
            else:
                step, stays_ns = PodStep.TERMINATING, TERMINATING_NS
            free_from_ns = min(pod.end_ns + stays_ns, next_start_ns)
            steps += [(pod.end_ns, step), (free_from_ns, PodStep.DELETED)]
        events += [PodEvent(at_ns=at_ns, pod=pod, step=step) for at_ns, step in steps]
    return events


Json = dict[str, Any]

_API_VERSIONS: Final = {
    "Deployment": "apps/v1",
    "ReplicaSet": "apps/v1",
    "StatefulSet": "apps/v1",
    "DaemonSet": "apps/v1",
    "Job": "batch/v1",
    "CronJob": "batch/v1",
    "PyTorchJob": "kubeflow.org/v1",
    "RayCluster": "ray.io/v1",
    "RayJob": "ray.io/v1",
    "Workflow": "argoproj.io/v1alpha1",
}


_PLURALS: Final = {"ReplicaSet": "replicasets", "Job": "jobs"}
_QOS_CLASSES: Final = {
    "guaranteed": "Guaranteed",
    "burstable": "Burstable",
    "besteffort": "BestEffort",
}


def kube_time(time_ns: int) -> str:
    """Return an instant in the format of Kubernetes: RFC 3339 in whole seconds."""
    return datetime.fromtimestamp(time_ns // NS_PER_SECOND, tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def node_object(run: PlannedRun, node: Node) -> Json:
    """Return a node object with its GPUs as capacity."""
    capacity = {"cpu": "64", "memory": "512Gi", "nvidia.com/gpu": str(len(gpu_groups(node)))}
    seeds = run.scenario.seed, run.epoch_ns
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": node.name,
            "uid": identities.run_uuid(*seeds, f"node/{node.name}"),
            "creationTimestamp": kube_time(run.epoch_ns),
            "labels": {"kubernetes.io/hostname": node.name, **node.labels},
        },
        "spec": {},
        "status": {
            "capacity": capacity,
            "allocatable": capacity,
            "conditions": [{"type": "Ready", "status": "True"}],
            "nodeInfo": {"bootID": identities.run_uuid(*seeds, f"boot/{node.name}")},
        },
    }


def pod_object(run: PlannedRun, pod: PlannedPod, *, created_ns: int) -> Json:
    """Return a pod as it is created: bound to its node if it does not wait, and not started."""
    spec = pod.spec
    controller = _controller(spec)
    controller_labels = {}
    if controller and controller.kind == "ReplicaSet":
        controller_labels = {"pod-template-hash": controller.name.rpartition("-")[2]}
    elif controller and controller.kind == "Job":
        # Kubernetes 1.27 added the second label and kept the first.
        names = ("job-name", "batch.kubernetes.io/job-name")
        controller_labels = dict.fromkeys(names, controller.name)
    label_fields: Json = {f"f:{name}": {} for name in spec.labels}
    metadata: Json = {
        "name": spec.name,
        "namespace": spec.namespace,
        "uid": run.uid(pod),
        "creationTimestamp": kube_time(run.epoch_ns + created_ns),
        "labels": {**controller_labels, **spec.labels},
        "annotations": spec.annotations,
        # Real API servers add this bookkeeping; it is included because clients have to skip it.
        "managedFields": [
            {
                "manager": "kube-controller-manager",
                "operation": "Update",
                "apiVersion": "v1",
                "fieldsType": "FieldsV1",
                "fieldsV1": {"f:metadata": {"f:labels": {".": {}, **label_fields}}},
            }
        ],
    }
    if controller:
        metadata["ownerReferences"] = [owner_reference(run, spec.namespace, controller)]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {
            **({} if pod.wait_ns else {"nodeName": spec.node}),
            "restartPolicy": "Never" if controller and controller.kind == "Job" else "Always",
            "terminationGracePeriodSeconds": 30,
            "containers": [_container(container, spec) for container in spec.containers],
        },
        "status": {
            "phase": "Pending",
            "qosClass": _QOS_CLASSES[spec.qos],
            "conditions": [scheduled_condition(run.epoch_ns + created_ns, waits=pod.wait_ns > 0)],
        },
    }


def scheduled_condition(time_ns: int, *, waits: bool = False) -> Json:
    """Return the condition of a pod that has a node since `time_ns`, or waits since then."""
    found = {"type": "PodScheduled", "lastTransitionTime": kube_time(time_ns)}
    if not waits:
        return {**found, "status": "True"}
    message = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
    return {**found, "status": "False", "reason": "Unschedulable", "message": message}


def pod_status(run: PlannedRun, pod: PlannedPod, step: PodStep) -> Json:
    """Return the part of a pod's status that a kubelet writes at a step."""
    started = kube_time(run.epoch_ns + pod.start_ns)
    finished = step is not PodStep.RUNNING
    state: Json = {"running": {"startedAt": started}}
    if finished:
        ended = kube_time(run.epoch_ns + pod.end_ns)
        reason = {"exitCode": 0, "reason": "Completed"}
        state = {"terminated": {**reason, "startedAt": started, "finishedAt": ended}}
    return {
        "phase": "Succeeded" if finished else "Running",
        "startTime": started,
        "conditions": [{"type": "Ready", "status": "False" if finished else "True"}],
        "containerStatuses": [
            {
                "name": container.name,
                "image": container.image,
                "imageID": f"{container.image.partition(':')[0]}@sha256:{'0' * 64}",
                "containerID": f"containerd://{pod.container_ids[container.name]}",
                "ready": not finished,
                "started": not finished,
                "restartCount": 0,
                "state": state,
            }
            for container in pod.spec.containers
        ],
    }


class SimulatedPodList:
    """A kubelet's own pod list, as its HTTPS port returns it."""

    def __init__(self, run: PlannedRun, kubelet: SimulatedKubelet, *, node: str) -> None:
        self.node = node
        """The node's name."""
        self._run = run
        self._kubelet = kubelet

    async def fetch(self) -> bytes:
        """Return a `v1` `PodList` of the pods that the kubelet lists now, as JSON."""
        items = [self._item(pod) for pod in self._kubelet.listed_pods()]
        # Go encodes an empty list as null.
        found: Json = {"kind": "PodList", "apiVersion": "v1", "metadata": {}}
        return orjson.dumps({**found, "items": items or None})

    def _item(self, pod: PlannedPod) -> Json:
        created_ns = pod.start_ns - CREATED_BEFORE_NS - pod.wait_ns
        item = pod_object(self._run, pod, created_ns=created_ns)
        item["spec"]["nodeName"] = self.node
        del item["apiVersion"], item["kind"]
        item["status"] |= pod_status(self._run, pod, PodStep.RUNNING)
        return item


def owner_objects(run: PlannedRun) -> list[tuple[str, Json]]:
    """Return the pods' controllers of built-in kinds, each with its plural resource name."""
    objects = []
    for pod in run.pods:
        spec = pod.spec
        controller = _controller(spec)
        # Other kinds are custom resources, which this API server does not contain.
        if not controller or controller.kind not in _PLURALS:
            continue
        reference = owner_reference(run, spec.namespace, controller)
        metadata: Json = {
            "name": controller.name,
            "namespace": spec.namespace,
            "uid": reference["uid"],
            "creationTimestamp": kube_time(run.epoch_ns),
        }
        if spec.owner and spec.owner.name != controller.name:
            metadata["ownerReferences"] = [owner_reference(run, spec.namespace, spec.owner)]
        item = {
            "apiVersion": reference["apiVersion"],
            "kind": controller.kind,
            "metadata": metadata,
            "spec": {},
        }
        objects.append((_PLURALS[controller.kind], item))
    return objects


def owner_reference(run: PlannedRun, namespace: str, owner: Controller | Owner) -> Json:
    """Return an entry of `metadata.ownerReferences` for a controller or workload."""
    what = f"owner/{namespace}/{owner.kind}/{owner.name}"
    return {
        "apiVersion": _API_VERSIONS.get(owner.kind, "example.org/v1"),
        "kind": owner.kind,
        "name": owner.name,
        "uid": identities.run_uuid(run.scenario.seed, run.epoch_ns, what),
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _controller(pod: ScenarioPod) -> Controller | None:
    """Return a pod's direct controller.

    For a Deployment, this is the ReplicaSet, whose name is taken from the pod's name.
    """
    if pod.owner is None:
        return None
    if pod.owner.via:
        return pod.owner.via
    if pod.owner.kind == "Deployment":
        return Controller(kind="ReplicaSet", name=pod.name.rpartition("-")[0] or pod.name)
    return Controller(kind=pod.owner.kind, name=pod.owner.name)


def _container(container: ScenarioContainer, pod: ScenarioPod) -> Json:
    # The limit is the number of GPUs that the container uses, because the scheduler counts GPUs.
    gpus = {index for process in container.processes for index in process.gpus}
    resources: Json = {"limits": {"nvidia.com/gpu": str(len(gpus))}} if gpus else {}
    if pod.qos != "besteffort":
        resources.setdefault("limits", {})["memory"] = "64Gi"
    return {
        "name": container.name,
        "image": container.image,
        "command": [word for process in container.processes for word in process.command.split()],
        "resources": resources,
    }
