"""Sums up the events of a run: usage by pod, time covered by node, lost GPUs and alerts.

Pure sums over events, except for the clock by which alerts end. Nothing is drawn or printed here.

An event lists its node's GPUs and marks those that did not respond as `unresponsive`. A GPU that
responded before and is unresponsive or missing in its node's newest event is lost. It is shown
until it responds again, or until another GPU responds at its index.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from gpuledger.clock import NS_PER_MINUTE, NS_PER_SECOND, Clock
from gpuledger.keys import key_in, node_key
from gpuledger.ledger.entries import PodIndex, PodOfEntry
from gpuledger.ledger.quantities import imbalances
from gpuledger.records import (
    AttributedIncident,
    Category,
    Entry,
    GpuEvent,
    PodDescription,
    PodState,
)
from gpuledger.records.base import DEFAULT_CLUSTER, BaseRecord
from gpuledger_sinks.alerts.active_alerts import ActiveAlert, Now, rfc3339
from gpuledger_sinks.alerts.partition_alerts import PartitionAlerts
from gpuledger_sinks.alerts.slots import Labels
from gpuledger_sinks.settings import AlertsSettings

_WITHOUT_POD = (Category.HOST, Category.UNATTRIBUTED)
XID: Final = "xid"
_MAX_INCIDENTS: Final = 200
_SAME_CAUSE_NS: Final = NS_PER_MINUTE
"""An XID is the cause of a GPU's loss if it came at most this long before the last reading."""


@dataclass(frozen=True, kw_only=True)
class LostGpu:
    """A GPU that no longer responds."""

    index: int
    """The driver's index of the GPU at its last reading."""
    since_ns: int
    """Time of its loss in nanoseconds since the epoch; without an incident, its last reading."""
    cause: str | None
    """The XID that came with the loss."""
    allocatees: tuple[str, ...]
    """The pods to which it is still allocated, as `namespace/pod`."""


@dataclass(frozen=True, kw_only=True)
class _Seen:
    node: str
    """The key of its node."""
    index: int
    time_ns: int


class GpuTracker:
    """Follows the GPUs of all nodes, with a bounded number of incidents."""

    def __init__(self) -> None:
        self.incidents: deque[AttributedIncident] = deque(maxlen=_MAX_INCIDENTS)
        self._seen: dict[str, _Seen] = {}

    def add(self, event: GpuEvent) -> None:
        """Record which GPUs responded in an event."""
        readings = (gpu.reading for gpu in event.gpus if not gpu.reading.unresponsive)
        physical_gpus = [reading for reading in readings if reading.parent_uuid is None]
        node = node_key(event)
        here = {(node, reading.index) for reading in physical_gpus}
        # If another GPU had one of these indexes before, it was removed.
        self._seen = {
            uuid: seen for uuid, seen in self._seen.items() if (seen.node, seen.index) not in here
        }
        for reading in physical_gpus:
            self._seen[reading.uuid] = _Seen(node=node, index=reading.index, time_ns=event.time_ns)

    def add_incident(self, incident: AttributedIncident) -> None:
        """Record an incident, unless it only reports a healthy GPU when the agent starts."""
        reported = incident.incident
        if not (reported.present_at_start and reported.ended_kinds):
            self.incidents.append(incident)

    def lost(self, newest: GpuEvent) -> list[LostGpu]:
        """Return the GPUs of a node that did not respond in its newest event."""
        here = {gpu.reading.uuid for gpu in newest.gpus if not gpu.reading.unresponsive}
        gone = [
            (uuid, seen)
            for uuid, seen in self._seen.items()
            if seen.node == node_key(newest) and uuid not in here
        ]
        lost = []
        for uuid, seen in gone:
            # Only incidents since shortly before the last reading: after earlier ones, the GPU
            # still worked.
            incidents = [
                attributed.incident
                for attributed in self.incidents
                if attributed.incident.gpu_uuid == uuid
                and attributed.incident.time_ns >= seen.time_ns - _SAME_CAUSE_NS
            ]
            xids = [incident.xid for incident in incidents if incident.kind == XID]
            lost_ns = [incident.time_ns for incident in incidents if incident.kind == "gpu_lost"]
            pods = PodIndex(newest)
            allocatees = [
                pods.allocatee_of(entry).described
                for books in newest.gpus
                if books.reading.uuid == uuid
                for entry in books.entries
            ]
            lost.append(
                LostGpu(
                    index=seen.index,
                    since_ns=lost_ns[0] if lost_ns else seen.time_ns,
                    cause=f"XID {xids[-1]}" if xids else None,
                    allocatees=tuple(
                        f"{allocatee.namespace}/{allocatee.name}"
                        for allocatee in allocatees
                        if allocatee.name is not None
                    ),
                )
            )
        return lost


@dataclass
class PodTotal:
    """A pod's usage in the run so far."""

    uid: str
    """The pod's UID, or its container's id while the UID is unknown."""
    cluster: str = DEFAULT_CLUSTER
    """Its cluster."""
    namespace: str | None = None
    """Its namespace, once known."""
    pod: str | None = None
    """Its name, once known."""
    owner: str | None = None
    """Kind and name of its workload, once known."""
    busy_ns: int = 0
    """Busy time attributed to it."""
    memory_byte_ns: int = 0
    """Memory attributed to it, times nanoseconds."""
    energy_millijoules: int = 0
    """Energy attributed to it."""

    def add(self, entry: Entry, *, interval_ns: int) -> None:
        """Add an entry of a tick with this interval."""
        self.busy_ns += entry.busy_ns or 0
        self.memory_byte_ns += (entry.memory_bytes or 0) * interval_ns
        self.energy_millijoules += entry.energy_millijoules or 0

    def name(self, description: PodDescription) -> None:
        """Update the names from a description."""
        self.namespace = description.namespace or self.namespace
        self.pod = description.name or self.pod
        self.owner = owner_of(description) or self.owner


PodName = tuple[str, str, str]
"""Cluster, namespace and name of a pod."""


@dataclass
class AllocationTotal:
    """The GPUs that were allocated to a pod in the run so far."""

    owner: str | None = None
    """Kind and name of the pod's workload, once known."""
    unused_ns: int = 0
    """Time in which they ran no kernel."""
    allocated_ns: int = 0
    """Time that was allocated to the pod, used or not."""


@dataclass
class Tally:
    """The sums of a run; their size depends on the number of pods and nodes."""

    events: int = 0
    """Number of events."""
    entries: int = 0
    """Number of entries in the events."""
    pods: dict[str, PodTotal] = field(default_factory=dict)
    """Usage of each pod, by its key: cluster and UID."""
    allocations: dict[PodName, AllocationTotal] = field(default_factory=dict)
    """The GPUs that were allocated to each pod."""
    free_ns: int = 0
    """Time in which GPUs that were not allocated ran no kernel."""
    gap_ns: int = 0
    """Time in which GPUs did not respond."""
    without_pod_ns: int = 0
    """Busy time of the host and of unknown processes."""
    other_ns: dict[str, int] = field(default_factory=dict)
    """Busy time of other categories, such as jobs, by category."""
    gpu_tracker: GpuTracker = field(default_factory=GpuTracker)
    """The GPUs and their incidents."""
    latest: dict[str, GpuEvent] = field(default_factory=dict)
    """The last event of each node, by node key."""
    covered_ns: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """By node key, the time ranges that ticks cover, with adjacent ticks merged."""
    conservation_error_max_ratio: float = 0.0
    """Largest difference between a device's reading and the sum of its entries, divided by the
    reading."""
    first_named_seconds: float | None = None
    """When the first event with a pod's name arrived, in seconds since boot."""

    def add(self, event: GpuEvent) -> None:
        """Add an event to the sums."""
        self.events += 1
        self.latest[node_key(event)] = event
        self.gpu_tracker.add(event)
        self._cover(event)
        pods = PodIndex(event)
        self.gap_ns += sum(gpu.gap_ns or 0 for gpu in event.gpus)
        self.entries += sum(len(gpu.entries) for gpu in event.gpus)
        # Late adjustments book processes that ended between two ticks, outside the rows of GPUs.
        for books in (*event.gpus, *(event.late_adjustments or ())):
            for entry in books.entries:
                if entry.category is Category.POD:
                    self._book(entry, pods.user_of(entry), event)
                elif entry.category in _WITHOUT_POD:
                    self.without_pod_ns += entry.busy_ns or 0
                elif entry.category is Category.IDLE:
                    self._book_unused(entry, pods.allocatee_of(entry), event.cluster)
                else:
                    other = entry.category.value
                    self.other_ns[other] = self.other_ns.get(other, 0) + (entry.busy_ns or 0)
        errors = [off.ratio for off in imbalances(event.gpus, event.interval_ns)]
        self.conservation_error_max_ratio = max([self.conservation_error_max_ratio, *errors])
        if self.first_named_seconds is None and any(pod.name for pod in event.pods):
            self.first_named_seconds = time.clock_gettime(time.CLOCK_BOOTTIME)

    def _book(self, entry: Entry, user: PodOfEntry, event: GpuEvent) -> None:
        description, uid = user.pod, user.described.uid or user.container_id or ""
        # Usage that a node reports for a pod of another node is counted apart from that pod.
        is_foreign = description is not None and description.state is PodState.FOREIGN
        key = f"{node_key(event)}/{uid}" if is_foreign else key_in(event.cluster, uid)
        total = self.pods.setdefault(key, PodTotal(cluster=event.cluster, uid=uid))
        total.add(entry, interval_ns=event.interval_ns)
        if description:
            total.name(description)

    def _book_unused(self, entry: Entry, allocatee: PodOfEntry, cluster: str) -> None:
        if entry.allocation is None:
            self.free_ns += entry.busy_ns or 0
        pod = allocatee.pod
        if pod is None or pod.name is None:
            return
        total = self.allocations.setdefault(
            (cluster, pod.namespace or "", pod.name), AllocationTotal()
        )
        total.owner = owner_of(pod) or total.owner
        total.unused_ns += entry.busy_ns or 0
        total.allocated_ns += entry.allocated_ns or 0

    def _cover(self, event: GpuEvent) -> None:
        stretches = self.covered_ns.setdefault(node_key(event), [])
        start = event.time_ns - event.interval_ns
        # The wall clock and the monotonic clock are read one after the other, so ticks count as
        # adjacent if the gap is at most a hundredth of the interval.
        if stretches and abs(start - stretches[-1][1]) <= event.interval_ns // 100:
            stretches[-1] = (stretches[-1][0], event.time_ns)
        else:
            stretches.append((start, event.time_ns))


def owner_of(description: PodDescription) -> str | None:
    """Return the kind and name of the workload, such as `Job/train`."""
    if description.owner_kind is None or description.owner_name is None:
        return None
    return f"{description.owner_kind}/{description.owner_name}"


_MAX_ALERTS: Final = 200


class AlertLine(BaseRecord, frozen=True, kw_only=True):
    """One alert of the run."""

    name: str
    """Its `alertname`."""
    severity: str
    """Its severity."""
    cluster: str = DEFAULT_CLUSTER
    """Cluster of the GPU."""
    node: str
    """Node of the GPU."""
    gpu_uuid: str
    """UUID of the GPU."""
    gpu_index: int | None = None
    """The driver's index of the GPU, if known."""
    text: str
    """Its summary, in one line."""
    started: str
    """When it started to fire, in RFC 3339."""

    @classmethod
    def of(cls, alert: ActiveAlert) -> "AlertLine":
        """Return the line of an alert that fires or has fired."""
        labels = dict(alert.labels)
        index = labels.get("gpu_index")
        return cls(
            name=labels["alertname"],
            severity=labels["severity"],
            cluster=labels["cluster"],
            node=labels["node"],
            gpu_uuid=labels["gpu_uuid"],
            gpu_index=None if index is None else int(index),
            text=alert.annotations["summary"],
            started=rfc3339(alert.starts_ns),
        )


class RunAlerts:
    """Follows the alerts that fire or have fired, with the sink's rules; keeps a bounded number.

    The sink stops reading while no Alertmanager responds. This class reads every event and
    incident of the run, so that the screen does not depend on the receiver.
    """

    def __init__(self, *, settings: AlertsSettings, clock: Clock) -> None:
        self._watch = PartitionAlerts()
        self._hold_ns = round(settings.incident_hold_seconds * NS_PER_SECOND)
        self._clock = clock
        self._fired: dict[Labels, ActiveAlert] = {}

    def add(self, event: GpuEvent) -> None:
        """Update the alerts about states of GPUs, such as lost GPUs, from an event."""
        self._watch.observe(event, now=Now.of(self._clock))
        self._keep()

    def add_incident(self, taken: AttributedIncident) -> None:
        """Add the alert of an incident."""
        self._watch.add_incident(taken, hold_ns=self._hold_ns, now=Now.of(self._clock))
        self._keep()

    def firing(self) -> list[AlertLine]:
        """Return the alerts that fire now, the newest first."""
        now_ns = self._clock.time_ns()
        firing = [
            alert for alert in self._watch.alerts if alert.ends_ns is None or alert.ends_ns > now_ns
        ]
        firing.sort(key=lambda alert: alert.starts_ns, reverse=True)
        return [AlertLine.of(alert) for alert in firing]

    def fired(self) -> list[AlertLine]:
        """Return the alerts of the run, over or not, the oldest first."""
        fired = sorted(self._fired.values(), key=lambda alert: alert.starts_ns)
        return [AlertLine.of(alert) for alert in fired]

    def _keep(self) -> None:
        for alert in self._watch.alerts:
            self._fired[alert.labels] = alert
        for labels in list(self._fired)[:-_MAX_ALERTS]:
            del self._fired[labels]
        self._watch.forget(now=Now.of(self._clock))


def as_line(alert: AlertLine) -> str:
    """Return an alert as a line of text."""
    return f"{alert.name} {alert.severity}  {alert.text}"
