"""An attributed incident to the labels and words of its alert. Pure."""

from typing import Final

from gpuledger.records import AttributedIncident, Incident, PodDescription

INCIDENT: Final = "GpuIncident"
_MAX_PODS_NAMED: Final = 3
"""In the summary; all stand in the annotation `pods`."""


def labels_of(attributed: AttributedIncident) -> dict[str, str]:
    """Return the alert's identity; the first known pod is in it, so that its owner is reached.

    A label without a value is no label: Alertmanager takes it away.
    """
    incident = attributed.incident
    pod = next((pod for pod in attributed.pods if pod.name), None)
    return {
        "alertname": INCIDENT,
        "severity": incident.severity.value,
        "node": incident.node,
        "gpu_uuid": incident.gpu_uuid,
        "gpu_index": _text(incident.gpu_index),
        "kind": incident.kind,
        "category": incident.category or "",
        "xid": _text(incident.xid),
        "gpu_instance": _text(incident.gpu_instance),
        "namespace": (pod and pod.namespace) or "",
        "pod": (pod and pod.name) or "",
    }


def annotations_of(attributed: AttributedIncident) -> dict[str, str]:
    """Return the alert's words, with all pods that were on the GPU."""
    incident, pods = attributed.incident, [_name(pod) for pod in attributed.pods]
    what = incident.kind if incident.xid is None else f"XID {incident.xid}"
    where = f"{_gpu(incident)} on node {incident.node}{_named(pods)}"
    words = {
        "summary": f"{where}: {what}, {incident.message}",
        "description": incident.message,
        "mnemonic": incident.mnemonic,
        "action": incident.action,
        "pods": ", ".join(pods),
    }
    return {name: value for name, value in words.items() if value}


def _gpu(incident: Incident) -> str:
    """Return the GPU as people number it, and by what else is known of it where nobody can."""
    if incident.gpu_index is not None:
        gpu = f"GPU {incident.gpu_index}"
    elif incident.gpu_uuid.startswith("GPU-"):
        gpu = incident.gpu_uuid
    else:
        gpu = f"GPU {incident.gpu_uuid}"
    return gpu if incident.gpu_instance is None else f"{gpu} instance {incident.gpu_instance}"


def _named(pods: list[str]) -> str:
    """Return the pods in brackets: the first few, and how many more there are."""
    if not pods:
        return ""
    shown, more = ", ".join(pods[:_MAX_PODS_NAMED]), len(pods) - _MAX_PODS_NAMED
    return f" ({'pod' if len(pods) == 1 else 'pods'} {shown}{f' and {more} more' * (more > 0)})"


def _text(number: int | None) -> str:
    return "" if number is None else str(number)


def _name(pod: PodDescription) -> str:
    if pod.name is None:
        return pod.uid or "unknown"  # a foreign pod too: its owner is not reached by it
    return f"{pod.namespace}/{pod.name}"
