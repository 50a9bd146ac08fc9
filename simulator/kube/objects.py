"""The scenario's nodes, pods and their owners as Kubernetes objects.

Here lives the form of the objects. Versions, and UIDs where a real API server gives them, are the
server's business.
"""

from datetime import UTC, datetime
from typing import Any, Final

from simulator import identities
from simulator.kube.lifecycle import PodStep
from simulator.plan import PlannedPod, gpu_groups
from simulator.scenario.schema import Controller, Node, Owner, ScenarioContainer, ScenarioPod
from simulator.simulation import Simulation

Json = dict[str, Any]

_NS: Final = 1_000_000_000
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


def kube_time(time_ns: int) -> str:
    """Write an instant as Kubernetes does: RFC 3339 in whole seconds."""
    return datetime.fromtimestamp(time_ns // _NS, tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def node_object(simulation: Simulation, node: Node) -> Json:
    """Return a node with its GPUs as capacity."""
    capacity = {"cpu": "64", "memory": "512Gi", "nvidia.com/gpu": str(len(gpu_groups(node)))}
    run = simulation.scenario.seed, simulation.epoch_ns
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": node.name,
            "uid": identities.run_uuid(*run, f"node/{node.name}"),
            "creationTimestamp": kube_time(simulation.epoch_ns),
            "labels": {"kubernetes.io/hostname": node.name, **node.labels},
        },
        "spec": {},
        "status": {
            "capacity": capacity,
            "allocatable": capacity,
            "conditions": [{"type": "Ready", "status": "True"}],
            "nodeInfo": {"bootID": identities.run_uuid(*run, f"boot/{node.name}")},
        },
    }


def pod_object(simulation: Simulation, pod: PlannedPod, *, created_ns: int) -> Json:
    """Return a pod as it is created: bound to its node, its containers not yet started."""
    spec = pod.spec
    controller = _controller(spec)
    metadata: Json = {
        "name": spec.name,
        "namespace": spec.namespace,
        "uid": simulation.uid(pod),
        "creationTimestamp": kube_time(simulation.epoch_ns + created_ns),
        "labels": {**_controller_labels(controller), **spec.labels},
        "annotations": spec.annotations,
        "managedFields": _managed_fields(spec),
    }
    if controller:
        metadata["ownerReferences"] = [owner_reference(simulation, spec.namespace, controller)]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {
            "nodeName": spec.node,
            "restartPolicy": "Never" if controller and controller.kind == "Job" else "Always",
            "terminationGracePeriodSeconds": 30,
            "containers": [_container(container, spec) for container in spec.containers],
        },
        "status": {"phase": "Pending", "qosClass": _QOS_CLASSES[spec.qos]},
    }


def pod_status(simulation: Simulation, pod: PlannedPod, step: PodStep) -> Json:
    """Return the part of the status that a kubelet writes at a step."""
    started = kube_time(simulation.epoch_ns + pod.start_ns)
    finished = step is not PodStep.RUNNING
    state: Json = {"running": {"startedAt": started}}
    if finished:
        ended = kube_time(simulation.epoch_ns + pod.end_ns)
        reason = {"exitCode": 0, "reason": "Completed"}
        state = {"terminated": {**reason, "startedAt": started, "finishedAt": ended}}
    return {
        "phase": "Succeeded" if finished else "Running",
        "startTime": started,
        "conditions": [{"type": "Ready", "status": "False" if finished else "True"}],
        "containerStatuses": [
            _container_status(container, pod, state) for container in pod.spec.containers
        ],
    }


def owner_objects(simulation: Simulation) -> list[tuple[str, Json]]:
    """Return the controllers between pods and workloads, each with its plural name."""
    objects = []
    for pod in simulation.pods:
        controller = _controller(pod.spec)
        if controller and controller.kind in _PLURALS:
            plural = _PLURALS[controller.kind]
            objects.append((plural, _controller_object(simulation, pod.spec, controller)))
    return objects


_PLURALS: Final = {"ReplicaSet": "replicasets", "Job": "jobs"}
_QOS_CLASSES: Final = {
    "guaranteed": "Guaranteed",
    "burstable": "Burstable",
    "besteffort": "BestEffort",
}


def owner_reference(simulation: Simulation, namespace: str, owner: Controller | Owner) -> Json:
    """Point to a controller as metadata.ownerReferences does."""
    what = f"owner/{namespace}/{owner.kind}/{owner.name}"
    return {
        "apiVersion": _API_VERSIONS.get(owner.kind, "example.org/v1"),
        "kind": owner.kind,
        "name": owner.name,
        "uid": identities.run_uuid(simulation.scenario.seed, simulation.epoch_ns, what),
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _controller(pod: ScenarioPod) -> Controller | None:
    """Return the pod's direct controller; a Deployment's is the ReplicaSet in its name."""
    if pod.owner is None:
        return None
    if pod.owner.via:
        return pod.owner.via
    if pod.owner.kind == "Deployment":
        return Controller(kind="ReplicaSet", name=pod.name.rpartition("-")[0] or pod.name)
    return Controller(kind=pod.owner.kind, name=pod.owner.name)


def _controller_labels(controller: Controller | None) -> dict[str, str]:
    if controller and controller.kind == "ReplicaSet":
        return {"pod-template-hash": controller.name.rpartition("-")[2]}
    if controller and controller.kind == "Job":
        return {"job-name": controller.name, "batch.kubernetes.io/job-name": controller.name}
    return {}


def _controller_object(simulation: Simulation, pod: ScenarioPod, controller: Controller) -> Json:
    reference = owner_reference(simulation, pod.namespace, controller)
    metadata: Json = {
        "name": controller.name,
        "namespace": pod.namespace,
        "uid": reference["uid"],
        "creationTimestamp": kube_time(simulation.epoch_ns),
    }
    if pod.owner and pod.owner.name != controller.name:
        metadata["ownerReferences"] = [owner_reference(simulation, pod.namespace, pod.owner)]
    return {
        "apiVersion": reference["apiVersion"],
        "kind": controller.kind,
        "metadata": metadata,
        "spec": {},
    }


def _container(container: ScenarioContainer, pod: ScenarioPod) -> Json:
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


def _container_status(container: ScenarioContainer, pod: PlannedPod, state: Json) -> Json:
    return {
        "name": container.name,
        "image": container.image,
        "imageID": f"{container.image.partition(':')[0]}@sha256:{'0' * 64}",
        "containerID": f"containerd://{pod.container_ids[container.name]}",
        "ready": "running" in state,
        "started": "running" in state,
        "restartCount": 0,
        "state": state,
    }


def _managed_fields(pod: ScenarioPod) -> list[Json]:
    """Return what a real object carries of its writers: bytes that a reader has to skip."""
    labels: Json = {f"f:{name}": {} for name in pod.labels}
    return [
        {
            "manager": "kube-controller-manager",
            "operation": "Update",
            "apiVersion": "v1",
            "fieldsType": "FieldsV1",
            "fieldsV1": {"f:metadata": {"f:labels": {".": {}, **labels}}},
        }
    ]
