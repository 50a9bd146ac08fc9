"""The labels and annotations of an incident's alert. Pure."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

from gpuledger.keys import show_node
from gpuledger.ledger.series import label_of
from gpuledger.records import AttributedIncident, GpuEvent, Incident, PodDescription, PodState
from gpuledger_sinks.settings import AlertsSettings

INCIDENT: Final = "GpuIncident"
_MAX_PODS_NAMED: Final = 3
"""Maximum number of pods in the summary; the annotation `pods` lists all pods."""


def known_pod(attributed: AttributedIncident) -> PodDescription | None:
    """Return the first known pod on the GPU, or `None`; the alert must reach the pod's owner."""
    return next((pod for pod in attributed.pods if pod.state is PodState.KNOWN), None)


_MAX_NAMESPACES: Final = 10_000
"""Maximum number of namespaces whose labels are kept; their writers are untrusted."""


class IncidentWords:
    """Makes the labels and annotations of incidents' alerts."""

    def __init__(self, settings: AlertsSettings | None = None) -> None:
        """Use the settings that select which labels of pods and namespaces are copied to alerts."""
        chosen = settings or AlertsSettings()
        self._pod_labels, self._namespace_labels = chosen.pod_labels, chosen.namespace_labels
        self._namespaces: OrderedDict[tuple[str, str], dict[str, str]] = OrderedDict()

    def observe(self, event: GpuEvent) -> None:
        """Keep the chosen labels of the namespaces in a tick."""
        if not self._namespace_labels:
            return
        for namespace in event.namespaces or ():
            place = (event.cluster, namespace.name)
            self._namespaces[place] = _choose(
                "namespace_label", self._namespace_labels, namespace.labels
            )
            self._namespaces.move_to_end(place)
            if len(self._namespaces) > _MAX_NAMESPACES:
                self._namespaces.popitem(last=False)

    def labels_of(self, attributed: AttributedIncident) -> dict[str, str]:
        """Return the alert's labels, including the chosen labels of the first pod and namespace."""
        pod, cluster = known_pod(attributed), attributed.incident.cluster
        if pod is None:
            return labels_of(attributed)
        return {
            **self._namespaces.get((cluster, pod.namespace or ""), {}),
            **_choose("label", self._pod_labels, pod.labels),
            **labels_of(attributed),
        }

    def annotations_of(self, attributed: AttributedIncident) -> dict[str, str]:
        """Return the annotations of an incident's alert."""
        return annotations_of(attributed)


def _choose(prefix: str, names: list[str], labels: Mapping[str, str] | None) -> dict[str, str]:
    """Return the labels in `names` that an object has, by the label's name on an alert."""
    return {
        label_of(name, prefix=prefix): labels[name] for name in names if labels and name in labels
    }


def _container_of(attributed: AttributedIncident, pod: PodDescription | None) -> str:
    """Return the name of the pod's container to which the kubelet allocated the GPU.

    Empty if the kubelet allocated it to no container of the pod, or to several.
    """
    allocations = attributed.incident.allocations or ()
    names = {
        allocation.container
        for allocation, place in zip(allocations, attributed.allocation_pods or (), strict=False)
        if pod is not None and place < len(attributed.pods) and attributed.pods[place] == pod
    }
    return names.pop() if len(names) == 1 else ""


def labels_of(attributed: AttributedIncident) -> dict[str, str]:
    """Return the labels that identify the alert, including the first known pod.

    The alert is routed to the owner of this pod. A pod name that only the node has reported is not
    a label, because the owner of that pod may be unrelated to the incident. Alertmanager ignores
    empty labels.
    """
    incident = attributed.incident
    pod = known_pod(attributed)
    return {
        "alertname": INCIDENT,
        "severity": incident.severity.value,
        "cluster": incident.cluster,
        "node": incident.node,
        "gpu_uuid": incident.gpu_uuid,
        "gpu_index": _text(incident.gpu_index),
        "kind": incident.kind,
        "category": incident.category or "",
        "xid": _text(incident.xid),
        "gpu_instance": _text(incident.gpu_instance),
        "namespace": (pod and pod.namespace) or "",
        "pod": (pod and pod.name) or "",
        "container": _container_of(attributed, pod),
        "owner_kind": (pod and pod.owner_kind) or "",
        "owner_name": (pod and pod.owner_name) or "",
    }


def annotations_of(attributed: AttributedIncident) -> dict[str, str]:
    """Return the alert's annotations, with all pods that were on the GPU."""
    incident = attributed.incident
    named = [
        # A foreign pod has no name here, so its owner is not alerted.
        f"{pod.namespace}/{pod.name}" if pod.name is not None else pod.uid or "unknown"
        for pod in attributed.pods
    ]
    # A pod is listed twice if its UID is known from processes and its name from an allocation.
    pods = list(dict.fromkeys(named))
    what = incident.kind if incident.xid is None else f"XID {incident.xid}"
    where = f"{_gpu(incident)} on node {show_node(incident.cluster, incident.node)}"
    if pods:
        # A time-sliced GPU may have dozens of pods, and a summary becomes the subject of an email.
        shown, more = ", ".join(pods[:_MAX_PODS_NAMED]), len(pods) - _MAX_PODS_NAMED
        others = f" and {more} more" if more > 0 else ""
        where += f" ({'pod' if len(pods) == 1 else 'pods'} {shown}{others})"
    words = {
        "summary": f"{where}: {what}, {incident.message}",
        "description": incident.message,
        "mnemonic": incident.mnemonic,
        "action": incident.action,
        "pods": ", ".join(pods),
    }
    return {name: value for name, value in words.items() if value}


def _gpu(incident: Incident) -> str:
    """Return the GPU's name for people: its index, or its UUID if the index is unknown."""
    if incident.gpu_index is not None:
        gpu = f"GPU {incident.gpu_index}"
    elif incident.gpu_uuid.startswith("GPU-"):
        gpu = incident.gpu_uuid
    else:
        gpu = f"GPU {incident.gpu_uuid}"
    return gpu if incident.gpu_instance is None else f"{gpu} instance {incident.gpu_instance}"


def _text(number: int | None) -> str:
    return "" if number is None else str(number)
