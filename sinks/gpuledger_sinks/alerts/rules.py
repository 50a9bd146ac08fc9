"""What is worth an alert, and in what words: the table of rules, and incidents. Pure.

A rule is a condition of a GPU in a tick (`rules_of`); when it has lasted long enough is
`gpuledger_sinks.alerts.engine`'s business. An incident is an alert by itself, with the labels and words that
are made of it here.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from gpuledger.clock import NS_PER_SECOND
from gpuledger.keys import show_node
from gpuledger.records import (
    Account,
    AttributedIncident,
    GpuBooks,
    GpuEvent,
    Incident,
    PodDescription,
    PodState,
    Severity,
)
from gpuledger_sinks.settings import AlertsSettings, alert_label_of

BUSY_WITHOUT_POD: Final = "GpuBusyWithoutPod"
_OUTSIDE_PODS: Final = (Account.HOST, Account.UNATTRIBUTED)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule, held against each GPU in each tick."""

    name: str
    """The alert's name."""
    severity: Severity
    """How loud it is."""
    for_ns: int
    """How long the measure must reach the threshold, by the events' time, before it fires."""
    threshold: float
    """From which measure on the condition holds."""
    measure: Callable[[GpuBooks, int], float | None]
    """Measures a GPU's books of so many nanoseconds; `None` where the tick does not say."""
    summary: str
    """One line for people, with `{gpu}` and `{node}`."""
    description: str
    """What it means and what to do, with `{gpu}`, `{node}`, `{measure}` and `{threshold}`."""

    def labels_of(self, event: GpuEvent, books: GpuBooks) -> dict[str, str]:
        """Return the alert's identity on a GPU: nothing that changes while it stands.

        With a pod or the measure in it, each change would be the end of an alert and the begin of
        another.
        """
        return {
            "alertname": self.name,
            "severity": self.severity.value,
            "cluster": event.cluster,
            "node": event.node,
            "gpu_uuid": books.reading.uuid,
            "gpu_index": str(books.reading.index),
        }

    def annotations_of(self, event: GpuEvent, books: GpuBooks, *, measure: float) -> dict[str, str]:
        """Return the alert's words, with the measure of the tick in which it fires."""
        words = {
            "gpu": books.reading.index,
            "node": show_node(event.cluster, event.node),
            "measure": measure,
            "threshold": self.threshold,
        }
        return {
            "summary": self.summary.format(**words),
            "description": self.description.format(**words),
        }


def rules_of(settings: AlertsSettings) -> tuple[Rule, ...]:
    """Return the table of rules with the thresholds that the settings name."""
    busy = settings.busy_without_pod
    return (
        Rule(
            name=BUSY_WITHOUT_POD,
            severity=Severity.WARNING,
            for_ns=round(busy.for_seconds * NS_PER_SECOND),
            threshold=busy.threshold_ratio,
            measure=busy_without_pod_ratio,
            summary="GPU {gpu} on node {node} works for no pod",
            description=(
                "GPU {gpu} on node {node} was busy for {measure:.0%} of the time with work of no "
                "pod (threshold {threshold:.0%}): a process outside Kubernetes, or one that "
                "outlived its pod. Look for it with `nvidia-smi` on the node."
            ),
        ),
    )


def busy_without_pod_ratio(books: GpuBooks, interval_ns: int) -> float | None:
    """Return the share of the time booked on the host or on nobody; None where it is not known."""
    if interval_ns <= 0 or not books.entries:
        return None
    outside = [entry.busy_ns for entry in books.entries if entry.account in _OUTSIDE_PODS]
    known = [busy_ns for busy_ns in outside if busy_ns is not None]
    if len(known) < len(outside):
        return None  # a sum of what is known would end an alert for want of a reading
    return sum(known) / interval_ns


INCIDENT: Final = "GpuIncident"
_MAX_PODS_NAMED: Final = 3
"""In the summary; all stand in the annotation `pods`."""


def known_pod(attributed: AttributedIncident) -> PodDescription | None:
    """Return the first pod on the GPU whose record has come: its owner is reached by the alert."""
    return next((pod for pod in attributed.pods if pod.state is PodState.KNOWN), None)


_MAX_NAMESPACES: Final = 10_000
"""Of a sink, namespaces whose labels are known; their names are anybody's."""


class IncidentWords:
    """Makes the labels and the annotations of the alert of an incident."""

    def __init__(self, settings: AlertsSettings | None = None) -> None:
        """Take which labels of pods and of namespaces alerts have."""
        chosen = settings or AlertsSettings()
        self._pod_labels, self._namespace_labels = chosen.pod_labels, chosen.namespace_labels
        self._namespaces: OrderedDict[tuple[str, str], dict[str, str]] = OrderedDict()

    def see(self, event: GpuEvent) -> None:
        """Remember what a tick says of namespaces."""
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
        """Return the labels, those of the first known pod and of its namespace included."""
        pod, cluster = known_pod(attributed), attributed.incident.cluster
        if pod is None:
            return labels_of(attributed)
        return {
            **self._namespaces.get((cluster, pod.namespace or ""), {}),
            **_choose("label", self._pod_labels, pod.labels),
            **labels_of(attributed),
        }

    def annotations_of(self, attributed: AttributedIncident) -> dict[str, str]:
        """Return the annotations."""
        return annotations_of(attributed)


def _choose(prefix: str, names: list[str], labels: Mapping[str, str] | None) -> dict[str, str]:
    """Return the chosen ones of an object's labels, as they are called on an alert."""
    return {
        alert_label_of(prefix, name): labels[name] for name in names if labels and name in labels
    }


def _container_of(attributed: AttributedIncident, pod: PodDescription | None) -> str:
    """Return the container of the pod to which the kubelet gave the GPU, where that is one."""
    allocations = attributed.incident.allocations or ()
    names = {
        allocation.container
        for allocation, place in zip(allocations, attributed.allocation_pods or (), strict=False)
        if pod is not None and place < len(attributed.pods) and attributed.pods[place] == pod
    }
    return names.pop() if len(names) == 1 else ""


def labels_of(attributed: AttributedIncident) -> dict[str, str]:
    """Return the alert's identity; the first known pod is in it, so that its owner is reached.

    A name that the node alone gives is in no label: its owner may have nothing to do with it.

    A label without a value is no label: Alertmanager takes it away.
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
    """Return the alert's words, with all pods that were on the GPU."""
    incident = attributed.incident
    pods = [
        # A foreign pod has no name here: its owner is not reached by it.
        f"{pod.namespace}/{pod.name}" if pod.name is not None else pod.uid or "unknown"
        for pod in attributed.pods
    ]
    what = incident.kind if incident.xid is None else f"XID {incident.xid}"
    where = f"{_gpu(incident)} on node {show_node(incident.cluster, incident.node)}"
    if pods:
        # A time-sliced GPU may have dozens, and a summary is the subject of a mail.
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
    """Return the GPU as people number it, and by what else is known of it where nobody can."""
    if incident.gpu_index is not None:
        gpu = f"GPU {incident.gpu_index}"
    elif incident.gpu_uuid.startswith("GPU-"):
        gpu = incident.gpu_uuid
    else:
        gpu = f"GPU {incident.gpu_uuid}"
    return gpu if incident.gpu_instance is None else f"{gpu} instance {incident.gpu_instance}"


def _text(number: int | None) -> str:
    return "" if number is None else str(number)
