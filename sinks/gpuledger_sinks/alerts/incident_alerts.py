"""The alerts made from incidents: which incidents form one alert, and how long it is active.

An event's alert is active for a fixed time, its hold; equal events during the hold form one alert.
The XIDs of one fault form one alert (`bursts`). A state's alert is active until the end of the
state is reported or proven (`states`). An alert keeps the labels of the incident with which it
began; later information changes only its annotations. Pure.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from msgspec.structs import replace

from gpuledger.clock import NS_PER_DAY, NS_PER_MINUTE
from gpuledger.keys import node_key
from gpuledger.records import (
    AttributedIncident,
    GpuBooks,
    GpuEvent,
    Incident,
    PodDescription,
    PodState,
)
from gpuledger_sinks.alerts.active_alerts import ActiveAlerts, Now
from gpuledger_sinks.alerts.bursts import is_context, is_of_an_app, is_same_burst, rank_of
from gpuledger_sinks.alerts.incident_words import IncidentWords, known_pod
from gpuledger_sinks.alerts.slots import Labels
from gpuledger_sinks.alerts.states import (
    State,
    ended_by,
    is_only_an_end,
    recovery_action_of,
    state_of,
)

_XID: Final = "xid"
_OF_GPU: Final = ""
_MAX_XIDS: Final = 32
"""Maximum number of XIDs named per burst; a GPU has fewer at a time."""
_MAX_UNCONFIRMED: Final = 10_000
"""Maximum number of restored incidents; limited because their writers are untrusted."""
_CONFIRMED_AFTER_NS: Final = 2 * NS_PER_MINUTE
"""Time after which a restored state's alert is active even without a tick of its GPU. Shorter than
the time after which an Alertmanager ends an alert that is not sent again."""
_SKEW_NS: Final = NS_PER_MINUTE
"""Normal clock difference by which a node's clock may be ahead of this machine's."""
STATE_UNRESPONSIVE_NS: Final = NS_PER_DAY
"""Default time for which a state lasts while no tick names its GPU."""

_Gpu = tuple[str, str]
_Subject = tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class _Standing:
    """The incidents that form one alert."""

    root: AttributedIncident
    """The incident from which the alert's labels come."""
    labels: Labels
    last_ns: int
    """The time of its newest incident, by the node's clock."""
    xids: dict[int, int] = field(default_factory=dict)
    """Number of incidents with each XID, in the order in which the XIDs first came."""
    action: str | None = None
    """The driver's recovery action."""
    states: dict[str, State] = field(default_factory=dict)
    """The states that have not ended, by kind; the alert is active until all have ended."""
    unconfirmed_since_ns: int | None = None
    """When it was restored, by the monotonic clock; `None` once it is sent."""

    def count(self, incident: Incident) -> None:
        """Count an incident of this alert."""
        self.last_ns = max(self.last_ns, incident.time_ns)
        if incident.xid is not None and (incident.xid in self.xids or len(self.xids) < _MAX_XIDS):
            self.xids[incident.xid] = self.xids.get(incident.xid, 0) + 1
        self.action = recovery_action_of(incident) or self.action
        if state := state_of(incident):
            self.states[state.kind] = state

    def name_pods(self, pods: Iterable[PodDescription]) -> bool:
        """Replace unknown pods of the root by known ones; return whether any was replaced."""
        by_uid = {pod.uid: pod for pod in pods if pod.uid and pod.state is PodState.KNOWN}
        named = [
            by_uid.get(pod.uid, pod) if pod.uid and pod.state is not PodState.KNOWN else pod
            for pod in self.root.pods
        ]
        is_news = named != self.root.pods
        if is_news:
            self.root = replace(self.root, pods=named)
        return is_news


class IncidentAlerts:
    """The alerts of the incidents of one partition."""

    def __init__(
        self,
        alerts: ActiveAlerts,
        *,
        words: IncidentWords | None = None,
        state_unresponsive_ns: int = STATE_UNRESPONSIVE_NS,
    ) -> None:
        """Activate alerts in `alerts`; a state ends after `state_unresponsive_ns` without ticks."""
        self._alerts, self._words = alerts, words or IncidentWords()
        self._state_unresponsive_ns = state_unresponsive_ns
        self._standing: dict[_Gpu, dict[_Subject, _Standing]] = {}
        self._unconfirmed = 0

    def add(self, attributed: AttributedIncident, *, hold_ns: int, now: Now) -> None:
        """Activate an incident's alert from now for at least `hold_ns`."""
        incident = attributed.incident
        self._end_reported(incident, now=now)
        if is_only_an_end(incident):
            return
        subject, known = self._find(attributed)
        if known is None or self._is_another(known, attributed, now=now):
            known = self._begin(subject, attributed)
        elif incident.kind == _XID and rank_of(incident) > rank_of(known.root.incident):
            # The alert of the lesser root ends; its XIDs and states move to this one.
            self._alerts.end(known.labels, at_ns=incident.time_ns, now=now)
            self._replace_root(known, subject, attributed)
        else:
            known.name_pods(attributed.pods)
        known.count(incident)
        known.unconfirmed_since_ns = None
        self._stand(known, at_ns=incident.time_ns, hold_ns=hold_ns, now=now)

    def restore(self, attributed: AttributedIncident, *, now: Now) -> bool:
        """Restore an incident that was reported before; return whether it begins or ends a state.

        The restored state is sent once a tick shows that it continues. It is also sent if no tick
        of its GPU comes for two minutes.
        """
        incident = attributed.incident
        self._end_reported(incident, now=now)
        if is_only_an_end(incident):
            return True
        subject, known = self._find(attributed)
        if known is None:
            if state_of(incident) is None and incident.kind != _XID:
                return False
            if self._unconfirmed >= _MAX_UNCONFIRMED:
                self._alerts.leave_out(node_key(incident))
                return False
            known = self._begin(subject, attributed)
            known.unconfirmed_since_ns = now.monotonic_ns
            self._unconfirmed += 1
        elif known.unconfirmed_since_ns is None:
            return state_of(incident) is not None
        elif incident.kind == _XID and rank_of(incident) > rank_of(known.root.incident):
            self._replace_root(known, subject, attributed)
        known.count(incident)
        return state_of(incident) is not None

    def observe(self, event: GpuEvent, *, now: Now) -> None:
        """Update the alerts of the GPUs in a tick, which must be the newest one of its node."""
        self._words.observe(event)
        node = node_key(event)
        for books in event.gpus:
            for subject, standing in list(
                self._standing.get((node, books.reading.uuid), {}).items()
            ):
                self._observe_gpu(subject, standing, event, books, now=now)

    def forget(self, *, now: Now) -> None:
        """Drop alerts that are over; activate restored states that had no tick for some time."""
        self._unconfirmed = 0
        for gpu, subjects in list(self._standing.items()):
            for subject, standing in list(subjects.items()):
                if standing.unconfirmed_since_ns is not None:
                    self._unconfirmed += 1
                    self._confirm_late(gpu, subject, standing, now=now)
                elif not self._alerts.stands(standing.labels):
                    self._drop(gpu, subject)

    def _is_another(self, standing: _Standing, attributed: AttributedIncident, *, now: Now) -> bool:
        """Return whether an incident needs a new alert, although its GPU or pod already has one.

        True for an event if the previous alert is over or belongs to another known pod. XIDs and
        states always continue their alert.
        """
        if standing.states or attributed.incident.kind == _XID:
            return False
        pods = (known_pod(standing.root), known_pod(attributed))
        is_elsewhere = None not in pods and pods[0] != pods[1]
        return is_elsewhere or not self._alerts.fires(standing.labels, now=now)

    def _begin(self, subject: _Subject, attributed: AttributedIncident) -> _Standing:
        standing = _Standing(
            root=attributed,
            labels=self._alerts.identity_of(self._words.labels_of(attributed)),
            last_ns=attributed.incident.time_ns,
        )
        self._put(_gpu_of(attributed.incident), subject, standing)
        return standing

    def _put(self, gpu: _Gpu, subject: _Subject, standing: _Standing) -> None:
        """Make `standing` the alert of a subject on a GPU.

        A subject is a burst of XIDs of the GPU or of one of its pods, or all incidents of one kind,
        severity and MIG instance. A previous alert of the subject stays active if it has states. A
        burst is over after minutes, but a state that began with it may last for days.
        """
        subjects = self._standing.setdefault(gpu, {})
        before = subjects.pop(subject, None)
        # Entries with the same labels are the same alert, which ends once all their states end.
        keys = [key for key, other in subjects.items() if other.labels == standing.labels]
        same = [subjects.pop(key) for key in keys]
        if before is not None and before.labels == standing.labels:
            same.append(before)
        elif before is not None and before.states:
            subjects[(*subject, *chain.from_iterable(before.labels))] = before
        for other in same:
            standing.states = other.states | standing.states
        subjects[subject] = standing

    def _replace_root(
        self, standing: _Standing, subject: _Subject, attributed: AttributedIncident
    ) -> None:
        """Make an incident the root of a burst, and move the burst to the incident's subject."""
        subjects = self._standing[_gpu_of(attributed.incident)]
        for before in [before for before, known in subjects.items() if known is standing]:
            del subjects[before]
        standing.root = attributed
        standing.labels = self._alerts.identity_of(self._words.labels_of(attributed))
        self._put(_gpu_of(attributed.incident), subject, standing)

    def _find(self, attributed: AttributedIncident) -> tuple[_Subject, _Standing | None]:
        """Return an incident's subject, and the existing alert for the incident if there is one."""
        incident = attributed.incident
        subjects = self._standing.get(_gpu_of(incident), {})
        if incident.kind != _XID:
            severity, instance = incident.severity.value, str(incident.gpu_instance)
            subject: _Subject = (incident.kind, severity, instance)
            return subject, subjects.get(subject)
        bursts = {
            subject: standing
            for subject, standing in subjects.items()
            if subject[0] == _XID and is_same_burst(incident, last_ns=standing.last_ns)
        }
        subject = _burst_of(attributed)
        known = bursts.get(subject)
        of_gpu = bursts.get((_XID, _OF_GPU))
        if known is None and is_context(incident):
            return subject, next(iter(bursts.values()), None)
        if known is None and of_gpu is not None and is_context(of_gpu.root.incident):
            # The accompanying XID came before the one that it accompanies.
            return subject, of_gpu
        return subject, known

    def _stand(self, standing: _Standing, *, at_ns: int, hold_ns: int, now: Now) -> None:
        labels, words = dict(standing.labels), self._describe(standing)
        if standing.states:
            self._alerts.stand(
                labels,
                words,
                at_ns=min(state.time_ns for state in standing.states.values()),
                hold_ns=hold_ns,
                unresponsive_ns=self._state_unresponsive_ns,
                now=now,
            )
        else:
            self._alerts.hold(labels, words, at_ns=at_ns, hold_ns=hold_ns, now=now)

    def _describe(self, standing: _Standing) -> dict[str, str]:
        words = self._words.annotations_of(standing.root)
        if standing.action is not None:
            words["action"] = standing.action
        if others := _show_others(standing):
            words["other_xids"] = others
        return words

    def _end_reported(self, incident: Incident, *, now: Now) -> None:
        """End the states on an incident's GPU whose end this incident reports."""
        if not (ended := ended_by(incident)):
            return
        gpu = _gpu_of(incident)
        for subject, standing in list(self._standing.get(gpu, {}).items()):
            self._end(gpu, subject, standing, ended, at_ns=incident.time_ns, now=now)

    def _end(
        self,
        gpu: _Gpu,
        subject: _Subject,
        standing: _Standing,
        ended: Iterable[str],
        *,
        at_ns: int,
        now: Now,
    ) -> None:
        """End the states of these kinds; the alert ends with its last state."""
        ended = [kind for kind in ended if kind in standing.states]
        for kind in ended:
            del standing.states[kind]
        if not ended or standing.states:
            return
        if standing.unconfirmed_since_ns is not None:
            # An Alertmanager may have received it before the restart, so its end must be sent.
            self._stand_restored(standing, now=now)
        self._alerts.end_state(standing.labels, at_ns=at_ns, now=now)
        if subject[0] != _XID:
            self._drop(gpu, subject)

    def _observe_gpu(
        self,
        subject: _Subject,
        standing: _Standing,
        event: GpuEvent,
        books: GpuBooks,
        *,
        now: Now,
    ) -> None:
        if standing.name_pods(event.pods):
            self._alerts.reword(standing.labels, self._describe(standing))
        if not standing.states:
            return
        latest_ns = now.time_ns + _SKEW_NS
        ended = [
            kind
            for kind, state in standing.states.items()
            if state.observe(event, books, latest_ns=latest_ns)
        ]
        gpu = (node_key(event), books.reading.uuid)
        self._end(gpu, subject, standing, ended, at_ns=event.time_ns, now=now)
        is_undecided = any(state.answers for state in standing.states.values())
        if standing.states and standing.unconfirmed_since_ns is not None and not is_undecided:
            self._stand_restored(standing, now=now)
        elif standing.states:
            self._alerts.confirm(standing.labels, now=now)

    def _stand_restored(self, standing: _Standing, *, now: Now) -> None:
        standing.unconfirmed_since_ns = None
        self._alerts.stand(
            dict(standing.labels),
            self._describe(standing),
            at_ns=min(
                (state.time_ns for state in standing.states.values()), default=standing.last_ns
            ),
            hold_ns=0,  # it was active before and needs no further hold
            unresponsive_ns=self._state_unresponsive_ns,
            now=now,
        )

    def _confirm_late(self, gpu: _Gpu, subject: _Subject, standing: _Standing, *, now: Now) -> None:
        """Activate a restored incident whose GPU had no tick for two minutes.

        Drops it instead if it has no states or is too old.
        """
        since_ns = standing.unconfirmed_since_ns or 0
        if now.monotonic_ns - since_ns < _CONFIRMED_AFTER_NS:
            return
        if standing.states and now.time_ns - standing.last_ns < self._state_unresponsive_ns:
            self._stand_restored(standing, now=now)
        else:
            self._drop(gpu, subject)

    def _drop(self, gpu: _Gpu, subject: _Subject) -> None:
        subjects = self._standing[gpu]
        del subjects[subject]
        if not subjects:
            del self._standing[gpu]


def _gpu_of(incident: Incident) -> _Gpu:
    return node_key(incident), incident.gpu_uuid


def _burst_of(attributed: AttributedIncident) -> _Subject:
    """Return the subject of a burst: the GPU, or one pod that uses it."""
    incident = attributed.incident
    if not is_of_an_app(incident):
        return (_XID, _OF_GPU)
    pod: PodDescription | None = next(iter(attributed.pods), None)
    return (_XID, str(incident.gpu_instance), (pod and (pod.uid or pod.name)) or _OF_GPU)


def _show_others(standing: _Standing) -> str:
    """Return the XIDs of a burst except its root, such as `45, 154 (3 times)`."""
    others: Sequence[str] = [
        f"{xid} ({times} times)" if times > 1 else str(xid)
        for xid, times in standing.xids.items()
        if xid != standing.root.incident.xid
    ]
    return ", ".join(others)
