"""Rules over time: pending, firing, resolved, by the events' own time.

Here lives what a partition's watch remembers: since when each condition holds, and the alerts that
stand. A replay of the same events gives the same alerts. Pure; the clock's time is given, and used
for sending alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gpuledger.records import AttributedIncident, GpuBooks, GpuEvent
from sinks.alerts.incidents import annotations_of, labels_of
from sinks.alerts.rules import Rule
from sinks.alerts.standing import Labels, StandingAlerts

_Key = tuple[str, str, str]


@dataclass(slots=True)
class _Condition:
    since_ns: int
    """Event time of the first tick in which it held."""
    alert: Labels | None = None
    """The identity of its alert, once it fires."""


class Watch:
    """The rules' state for the nodes of one partition."""

    def __init__(self, *, rules: Sequence[Rule]) -> None:
        self._rules = rules
        self._marks: dict[str, int] = {}
        self._conditions: dict[_Key, _Condition] = {}
        self.alerts = StandingAlerts()

    def judge(self, event: GpuEvent, *, now_ns: int) -> bool:
        """Hold the rules against one tick; False where it is not newer than the node's last."""
        if event.time_ns <= self._marks.get(event.node, -1):
            return False
        self._marks[event.node] = event.time_ns
        for books in event.gpus:
            for rule in self._rules:
                measure = rule.measure(books, event.interval_ns / 1e9)
                if measure is None:
                    # What could not be measured neither begins nor ends anything.
                    continue
                key = (rule.name, event.node, books.reading.uuid)
                if measure >= rule.threshold:
                    self._holds(rule, key, event, books, measure=measure, now_ns=now_ns)
                else:
                    self._ends(key, event, now_ns)
        return True

    def take_incident(self, taken: AttributedIncident, *, hold_ns: int, now_ns: int) -> None:
        """Let the incident's alert stand for `hold_ns`.

        Counted from now where the incident comes late: an alert that is over when it is first sent
        is never notified.
        """
        at_ns = taken.incident.time_ns
        self.alerts.hold(
            labels_of(taken),
            annotations_of(taken),
            at_ns=at_ns,
            until_ns=max(at_ns, now_ns) + hold_ns,
            now_ns=now_ns,
        )

    def _holds(
        self,
        rule: Rule,
        key: _Key,
        event: GpuEvent,
        books: GpuBooks,
        *,
        measure: float,
        now_ns: int,
    ) -> None:
        condition = self._conditions.setdefault(key, _Condition(since_ns=event.time_ns))
        if condition.alert is not None:
            self.alerts.confirm(condition.alert, now_ns=now_ns)
        elif event.time_ns - condition.since_ns >= rule.for_ns:
            condition.alert = self.alerts.fire(
                _labels(rule, event, books),
                _annotations(rule, event, books, measure),
                since_ns=event.time_ns,
                now_ns=now_ns,
            )

    def _ends(self, key: _Key, event: GpuEvent, now_ns: int) -> None:
        condition = self._conditions.pop(key, None)
        if condition is not None and condition.alert is not None:
            self.alerts.end(condition.alert, at_ns=event.time_ns, now_ns=now_ns)

    def forget(self, *, now_ns: int, silent_ns: int) -> int:
        """Drop alerts that are over; give how many of them were still firing."""
        over = self.alerts.forget(now_ns=now_ns, silent_ns=silent_ns)
        silent = {alert.labels for alert in over if alert.ends_ns is None}
        for key in [key for key, one in self._conditions.items() if one.alert in silent]:
            del self._conditions[key]
        return len(silent)


def _labels(rule: Rule, event: GpuEvent, books: GpuBooks) -> dict[str, str]:
    return {
        "alertname": rule.name,
        "severity": rule.severity.value,
        "node": event.node,
        "gpu_uuid": books.reading.uuid,
        "gpu_index": str(books.reading.index),
    }


def _annotations(rule: Rule, event: GpuEvent, books: GpuBooks, measure: float) -> dict[str, str]:
    words = {
        "gpu": books.reading.index,
        "node": event.node,
        "measure": measure,
        "threshold": rule.threshold,
    }
    return {
        "summary": rule.summary.format(**words),
        "description": rule.description.format(**words),
    }
