"""An attributed incident to the labels and words of its alert. Pure."""

from typing import Final

from gpuledger.records import AttributedIncident, PodDescription

INCIDENT: Final = "GpuIncident"


def labels_of(taken: AttributedIncident) -> dict[str, str]:
    """Give the alert's identity; the first known pod is in it, so that its owner is reached.

    A label without a value is no label: Alertmanager takes it away.
    """
    incident = taken.incident
    pod = next((pod for pod in taken.pods if pod.name), None)
    return {
        "alertname": INCIDENT,
        "severity": incident.severity.value,
        "node": incident.node,
        "gpu_uuid": incident.gpu_uuid,
        "kind": incident.kind,
        "category": incident.category or "",
        "xid": _text(incident.xid),
        "gpu_instance": _text(incident.gpu_instance),
        "namespace": (pod and pod.namespace) or "",
        "pod": (pod and pod.name) or "",
    }


def annotations_of(taken: AttributedIncident) -> dict[str, str]:
    """Give the alert's words, with all pods that were on the GPU."""
    incident = taken.incident
    what = incident.kind if incident.xid is None else f"XID {incident.xid}"
    words = {
        "summary": f"{what} on {incident.node}",
        "description": incident.message,
        "mnemonic": incident.mnemonic,
        "action": incident.action,
        "pods": ", ".join(map(_name, taken.pods)),
    }
    return {name: value for name, value in words.items() if value}


def _text(number: int | None) -> str:
    return "" if number is None else str(number)


def _name(pod: PodDescription) -> str:
    if pod.name is None:
        return pod.uid or "unknown"
    return f"{pod.namespace}/{pod.name}"
