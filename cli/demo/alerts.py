"""The alerts of a run, by the alerts sink's own rules, whichever Alertmanager the sink tells.

The sink judges nothing further while no Alertmanager answers; here every event and incident of the
run is judged, so that the screen says the same whoever the receiver is. Pure but for the clock.
"""

from typing import Final

from gpuledger.clock import Clock
from gpuledger.records import AttributedIncident, GpuEvent
from gpuledger.records.base import BaseRecord
from sinks.alerts.active_alerts import ActiveAlert, Now, rfc3339
from sinks.alerts.engine import RuleEvaluator
from sinks.alerts.rules import rules_of
from sinks.alerts.slots import Labels
from sinks.settings import AlertsSettings

_MAX_ALERTS: Final = 200


class AlertLine(BaseRecord, frozen=True, kw_only=True):
    """One alert of the run."""

    name: str
    """Its rule."""
    severity: str
    """How loud it is."""
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


class RunAlerts:
    """Follows what fires and what has fired; bounded in both."""

    def __init__(self, *, settings: AlertsSettings, clock: Clock) -> None:
        self._watch = RuleEvaluator(rules=rules_of(settings))
        self._hold_ns = round(settings.incident_hold_seconds * 1e9)
        self._silent_ns = round(settings.stale_after_seconds * 1e9)
        self._clock = clock
        self._fired: dict[Labels, ActiveAlert] = {}

    def add(self, event: GpuEvent) -> None:
        """Hold the rules against an event."""
        self._watch.evaluate(event, now=Now.of(self._clock))
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
        return [_line(alert) for alert in sorted(firing, key=_began, reverse=True)]

    def fired(self) -> list[AlertLine]:
        """Return the alerts of the run, over or not, the oldest first."""
        return [_line(alert) for alert in sorted(self._fired.values(), key=_began)]

    def _keep(self) -> None:
        for alert in self._watch.alerts:
            self._fired[alert.labels] = alert
        for labels in list(self._fired)[:-_MAX_ALERTS]:
            del self._fired[labels]
        self._watch.forget(now=Now.of(self._clock), silent_ns=self._silent_ns)


def as_line(alert: AlertLine) -> str:
    """Return what people read of an alert."""
    return f"{alert.name} {alert.severity}  {alert.text}"


def _began(alert: ActiveAlert) -> int:
    return alert.starts_ns


def _line(alert: ActiveAlert) -> AlertLine:
    labels = dict(alert.labels)
    index = labels.get("gpu_index")
    return AlertLine(
        name=labels["alertname"],
        severity=labels["severity"],
        node=labels["node"],
        gpu_uuid=labels["gpu_uuid"],
        gpu_index=None if index is None else int(index),
        text=alert.annotations["summary"],
        started=rfc3339(alert.starts_ns),
    )
