"""What the events of a run add up to: per pod, per node, GPUs that are lost, and alerts.

Pure sums over events, but for the clock by which alerts end; nothing is drawn or printed here.

An event lists its node's GPUs, those that did not answer as `unresponsive`. One that answered
before and is unresponsive or missing in its node's newest event is lost: it stays in sight until it
answers again, or another GPU answers at its index.
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
"""An XID at most so long before a GPU's last reading is taken for the cause of its loss."""


@dataclass(frozen=True, kw_only=True)
class LostGpu:
    """A GPU that no longer answers."""

    index: int
    """The driver's index of it, as of its last reading."""
    since_ns: int
    """When it was lost, nanoseconds since the epoch; where nobody said, its last reading."""
    cause: str | None
    """The XID that came with it."""
    allocatees: tuple[str, ...]
    """The pods to whom the kubelet still gives it, as `namespace/pod`."""


@dataclass(frozen=True, kw_only=True)
class _Seen:
    node: str
    """The key of its node."""
    index: int
    time_ns: int


class GpuTracker:
    """Follows the GPUs of all nodes; bounded by them, and in the incidents that it keeps."""

    def __init__(self) -> None:
        self.incidents: deque[AttributedIncident] = deque(maxlen=_MAX_INCIDENTS)
        self._seen: dict[str, _Seen] = {}

    def add(self, event: GpuEvent) -> None:
        """Record which GPUs answered."""
        readings = (gpu.reading for gpu in event.gpus if not gpu.reading.unresponsive)
        physical_gpus = [reading for reading in readings if reading.parent_uuid is None]
        node = node_key(event)
        here = {(node, reading.index) for reading in physical_gpus}
        # Whatever had its place before was taken out.
        self._seen = {
            uuid: seen for uuid, seen in self._seen.items() if (seen.node, seen.index) not in here
        }
        for reading in physical_gpus:
            self._seen[reading.uuid] = _Seen(node=node, index=reading.index, time_ns=event.time_ns)

    def add_incident(self, incident: AttributedIncident) -> None:
        """Record what has happened to a GPU; that it is well at the agent's start is nothing."""
        reported = incident.incident
        if not (reported.present_at_start and reported.ended_kinds):
            self.incidents.append(incident)

    def lost(self, newest: GpuEvent) -> list[LostGpu]:
        """Return the GPUs of a node that did not answer in its newest event."""
        here = {gpu.reading.uuid for gpu in newest.gpus if not gpu.reading.unresponsive}
        gone = [
            (uuid, seen)
            for uuid, seen in self._seen.items()
            if seen.node == node_key(newest) and uuid not in here
        ]
        lost = []
        for uuid, seen in gone:
            # What was reported of it about its last reading, or since: earlier incidents are of a
            # time when it still worked.
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
    """What one pod has used in the run so far."""

    uid: str
    """The pod's UID, or its container's id while no UID is known."""
    cluster: str = DEFAULT_CLUSTER
    """Its cluster."""
    namespace: str | None = None
    """Its namespace, once known."""
    pod: str | None = None
    """Its name, once known."""
    owner: str | None = None
    """Kind and name of its workload, once known."""
    busy_ns: int = 0
    """Busy time booked on it."""
    memory_byte_ns: int = 0
    """Memory times time booked on it."""
    energy_millijoules: int = 0
    """Energy booked on it."""

    def add(self, entry: Entry, *, interval_ns: int) -> None:
        """Add one entry of a tick of that length."""
        self.busy_ns += entry.busy_ns or 0
        self.memory_byte_ns += (entry.memory_bytes or 0) * interval_ns
        self.energy_millijoules += entry.energy_millijoules or 0

    def name(self, description: PodDescription) -> None:
        """Take over what a description knows."""
        self.namespace = description.namespace or self.namespace
        self.pod = description.name or self.pod
        self.owner = owner_of(description) or self.owner


@dataclass
class Tally:
    """The sums of a run; bounded by its pods and nodes."""

    events: int = 0
    """Events counted."""
    entries: int = 0
    """Entries in them."""
    pods: dict[str, PodTotal] = field(default_factory=dict)
    """What each pod used, by its key: cluster and UID."""
    unused_ns: dict[tuple[str, str, str], int] = field(default_factory=dict)
    """For each cluster, namespace and pod, time in which GPUs that it held ran no kernel."""
    allocated_ns: dict[tuple[str, str, str], int] = field(default_factory=dict)
    """For each of these, how much of GPUs it held, whatever it used."""
    free_ns: int = 0
    """Time in which GPUs that nobody held ran no kernel."""
    gap_ns: int = 0
    """Time in which GPUs did not answer."""
    without_pod_ns: int = 0
    """Busy time booked on the host or on nobody."""
    other_ns: dict[str, int] = field(default_factory=dict)
    """Busy time booked on each category that has no place of its own here, such as a job's."""
    gpu_tracker: GpuTracker = field(default_factory=GpuTracker)
    """Which GPUs are there, and what has happened to them."""
    latest: dict[str, GpuEvent] = field(default_factory=dict)
    """The last event of each node, by its key."""
    covered_ns: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """For each node, by its key, the covered stretches of time, adjacent ticks merged."""
    conservation_error_max_ratio: float = 0.0
    """The worst difference between a device and the sum of its entries, over the device."""
    first_named_seconds: float | None = None
    """When the first entry on a pod known by name came in, in seconds since the machine's boot."""

    def add(self, event: GpuEvent) -> None:
        """Add one event."""
        self.events += 1
        self.latest[node_key(event)] = event
        self.gpu_tracker.add(event)
        self._cover(event)
        pods = PodIndex(event)
        self.gap_ns += sum(gpu.gap_ns or 0 for gpu in event.gpus)
        self.entries += sum(len(gpu.entries) for gpu in event.gpus)
        # Settlements are of processes that ended between two ticks: booked, though of no GPU's row.
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
        # What one node says of another one's pod is not that pod's.
        is_foreign = description is not None and description.state is PodState.FOREIGN
        key = f"{node_key(event)}/{uid}" if is_foreign else key_in(event.cluster, uid)
        total = self.pods.setdefault(key, PodTotal(cluster=event.cluster, uid=uid))
        total.add(entry, interval_ns=event.interval_ns)
        if description:
            total.name(description)

    def _book_unused(self, entry: Entry, allocatee: PodOfEntry, cluster: str) -> None:
        if entry.allocation is None:
            self.free_ns += entry.busy_ns or 0
        if allocatee.described.name is None:
            return
        name = (cluster, allocatee.described.namespace or "", allocatee.described.name)
        self.unused_ns[name] = self.unused_ns.get(name, 0) + (entry.busy_ns or 0)
        self.allocated_ns[name] = self.allocated_ns.get(name, 0) + (entry.allocated_ns or 0)

    def _cover(self, event: GpuEvent) -> None:
        stretches = self.covered_ns.setdefault(node_key(event), [])
        start = event.time_ns - event.interval_ns
        # Wall and monotonic clock are read one after the other: ticks that meet within a
        # hundredth of their length are adjacent.
        if stretches and abs(start - stretches[-1][1]) <= event.interval_ns // 100:
            stretches[-1] = (stretches[-1][0], event.time_ns)
        else:
            stretches.append((start, event.time_ns))


def owner_of(description: PodDescription) -> str | None:
    """Return the workload as people write it: `Job/train`."""
    if description.owner_kind is None or description.owner_name is None:
        return None
    return f"{description.owner_kind}/{description.owner_name}"


_MAX_ALERTS: Final = 200


class AlertLine(BaseRecord, frozen=True, kw_only=True):
    """One alert of the run."""

    name: str
    """Its `alertname`."""
    severity: str
    """How loud it is."""
    cluster: str = DEFAULT_CLUSTER
    """The cluster of its GPU."""
    node: str
    """The node of its GPU."""
    gpu_uuid: str
    """Its GPU."""
    gpu_index: int | None = None
    """The driver's index of that GPU, where it is known."""
    text: str
    """What it says, in one line."""
    started: str
    """Since when it fires, RFC 3339."""

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
    """Follows what fires and what has fired, as the alerts sink has it; bounded in both.

    The sink reads nothing further while no Alertmanager answers. Here every event and incident of
    the run counts, so that the screen says the same whoever the receiver is.
    """

    def __init__(self, *, settings: AlertsSettings, clock: Clock) -> None:
        self._watch = PartitionAlerts()
        self._hold_ns = round(settings.incident_hold_seconds * NS_PER_SECOND)
        self._clock = clock
        self._fired: dict[Labels, ActiveAlert] = {}

    def add(self, event: GpuEvent) -> None:
        """Hold states against an event."""
        self._watch.observe(event, now=Now.of(self._clock))
        self._keep()

    def add_incident(self, taken: AttributedIncident) -> None:
        """Let an incident's alert stand."""
        self._watch.add_incident(taken, hold_ns=self._hold_ns, now=Now.of(self._clock))
        self._keep()

    def firing(self) -> list[AlertLine]:
        """Return the alerts that fire now, the youngest first."""
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
    """Return what people read of an alert."""
    return f"{alert.name} {alert.severity}  {alert.text}"
