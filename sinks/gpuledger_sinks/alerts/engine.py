"""Rules over time: pending, firing, resolved, by the node's own time since boot.

Here lives what is remembered of a partition: for how long each condition has held, and the alerts
that are active. How long it has held is read from `seq` and from what ticks cover, so no clock that
is set makes an alert fire early, late or not at all; a tick from the future is evaluated like any
other, and time of which no tick speaks counts for nothing. A replay of the same events gives the
same alerts. Pure; this machine's time is given, and used for sending alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gpuledger.clock import NS_PER_MINUTE, NS_PER_MS
from gpuledger.keys import node_key, split_key
from gpuledger.recent import Recent
from gpuledger.records import (
    AttributedIncident,
    GpuBooks,
    GpuEvent,
    HeldCondition,
    NodeConditions,
)
from gpuledger.records.conditions import MAX_HELD_CONDITIONS
from gpuledger_sinks.alerts.active_alerts import ActiveAlerts, Now
from gpuledger_sinks.alerts.incident_alerts import STATE_SILENT_NS, IncidentAlerts
from gpuledger_sinks.alerts.rules import IncidentWords, Rule
from gpuledger_sinks.alerts.slots import AlertSlots, Labels
from gpuledger_sinks.timelines import TickOrder, Timelines

_Key = tuple[str, str, str]
MAX_CONDITIONS: Final = 10_000
"""Of how many GPUs a partition knows for how long a rule's condition has held, or twice as many:
ten times what the largest fleet has of GPUs that all work for no pod."""
_LONGEST_GAP_NS: Final = NS_PER_MINUTE
"""What held before a longer time that no tick covers says nothing of what holds after it."""


@dataclass(slots=True)
class _Condition:
    boot_id: str
    """The boot in which it was last seen to hold."""
    seq: int
    """The last tick of that boot in which it held, or which did not say whether it did."""
    held_ns: int = 0
    """What ticks have covered of the time since the first tick in which it held."""
    fired_ns: int | None = None
    """Since when its alert stands, by the node's clock; set once it fires."""
    alert: Labels | None = None
    """The identity of its alert, once it fires here."""
    is_left_out: bool = False
    """Whether there was no room for its alert at some time."""

    def has_counted(self, event: GpuEvent) -> bool:
        """Return whether a tick is counted already, as one that is read again after a restart."""
        return event.boot_id == self.boot_id and event.seq <= self.seq

    def go_on(self, event: GpuEvent) -> bool:
        """Count what a tick covers; return false where it begins anew, after a reboot or a gap.

        A tick that covers more than has passed since the one before counts what has passed.
        """
        passed_ns = (event.seq - self.seq) * NS_PER_MS
        uncovered_ns = passed_ns - event.interval_ns
        follows = event.boot_id == self.boot_id and uncovered_ns <= _LONGEST_GAP_NS
        self.held_ns = self.held_ns + min(passed_ns, event.interval_ns) if follows else 0
        self.boot_id, self.seq = event.boot_id, event.seq
        return follows


class RuleEvaluator:
    """The rules' state for the nodes of one partition.

    A replay makes other alerts in one case: of a node that rebooted with a clock that is behind,
    the new boot is believed by when its ticks arrive (`gpuledger_sinks.timelines`).
    """

    def __init__(
        self,
        *,
        rules: Sequence[Rule],
        slots: AlertSlots | None = None,
        words: IncidentWords | None = None,
        state_silent_ns: int = STATE_SILENT_NS,
    ) -> None:
        """Take the rules, and the slots for alerts that all partitions share.

        A state stands for `state_silent_ns` where no tick names its GPU.
        """
        self._rules = rules
        self._slots = slots or AlertSlots()
        self._timelines = Timelines()
        self._conditions: Recent[_Key, _Condition] = Recent(max_a_day=MAX_CONDITIONS)
        self._changed: dict[str, int] = {}
        """The nodes whose conditions have changed, and the time of the tick by which they have."""
        self.alerts = ActiveAlerts(slots=self._slots)
        self._incidents = IncidentAlerts(self.alerts, words=words, state_silent_ns=state_silent_ns)

    def evaluate(self, event: GpuEvent, *, now: Now) -> TickOrder:
        """Hold the rules against a tick that is its node's newest; return where it stands."""
        order = self._timelines.observe(event, received_ns=now.monotonic_ns).order
        if order is not TickOrder.CURRENT:
            return order
        self._incidents.see(event, now=now)
        for books in event.gpus:
            for rule in self._rules:
                self._evaluate_rule(rule, event, books, now=now)
        return order

    def _evaluate_rule(self, rule: Rule, event: GpuEvent, books: GpuBooks, *, now: Now) -> None:
        node = node_key(event)
        key = (rule.name, node, books.reading.uuid)
        condition = self._conditions.get(key)
        # Read again after a restart: what it says is in what was read back.
        if condition is not None and condition.has_counted(event):
            return
        measure = rule.measure(books, event.interval_ns)
        if measure is not None and measure >= rule.threshold:
            self._holds(rule, key, event, books, measure=measure, now=now)
        elif condition is None:
            return
        elif measure is None:
            # What could not be measured neither begins nor ends anything. Only a condition that has
            # not fired yet begins anew behind a reboot or a gap.
            if not condition.go_on(event) and condition.fired_ns is None:
                del self._conditions[key]
        else:
            # As in Prometheus: a condition that has not fired yet goes without a word.
            del self._conditions[key]
            if condition.alert is not None:
                self.alerts.end(condition.alert, at_ns=event.time_ns, now=now)
        self._changed[node] = event.time_ns

    def age_ns(self, attributed: AttributedIncident, *, now: Now) -> int:
        """Return how long ago an incident was; below zero where its node's clock is ahead.

        What the node's clock was seen to be set back by is no age.
        """
        incident = attributed.incident
        return now.time_ns - incident.time_ns - self._timelines.behind_ns(node_key(incident))

    def add_incident(self, attributed: AttributedIncident, *, hold_ns: int, now: Now) -> None:
        """Let the incident's alert stand for `hold_ns` from now on, a state's until it ends.

        Not from when it happened: an alert that is over when it is first sent is never notified,
        and one that a clock stamped that was ahead would stand until then.
        """
        self._incidents.add(attributed, hold_ns=hold_ns, now=now)

    def restore_incident(self, attributed: AttributedIncident, *, now: Now) -> bool:
        """Read back an incident that is no news; return whether a state begins or ends with it."""
        return self._incidents.restore(attributed, now=now)

    def _holds(
        self,
        rule: Rule,
        key: _Key,
        event: GpuEvent,
        books: GpuBooks,
        *,
        measure: float,
        now: Now,
    ) -> None:
        condition = self._conditions.get(key)
        if condition is None:
            condition = self._conditions[key] = _Condition(event.boot_id, event.seq)
        else:
            condition.go_on(event)
        # One that stands is about both sides of a reboot or a gap.
        if condition.alert is not None:
            if self.alerts.confirm(condition.alert, now=now):
                return
            condition.is_left_out = True  # it gave way, which is reported
        elif condition.fired_ns is None and condition.held_ns < rule.for_ns:
            return
        fired_ns = condition.fired_ns = condition.fired_ns or event.time_ns
        condition.alert = self.alerts.fire(
            rule.labels_of(event, books),
            rule.annotations_of(event, books, measure=measure),
            since_ns=fired_ns,
            now=now,
        )
        if condition.alert is None and not condition.is_left_out:
            condition.is_left_out = True
            self._slots.leave_out(node_key(event))

    def forget(self, *, now: Now, silent_ns: int) -> int:
        """Drop alerts that are over; return how many of them were still firing.

        A condition that has not fired, of a GPU of which nothing comes any more, goes by the rule
        of `gpuledger.recent`.
        """
        self._conditions.go_on(now.monotonic_ns)
        over = self.alerts.forget(now=now, silent_ns=silent_ns)
        self._incidents.forget(now=now)
        silent = {alert.labels for alert in over if alert.ends_ns is None}
        for key in [
            key for key, condition in self._conditions.items() if condition.alert in silent
        ]:
            del self._conditions[key]
            self._changed.setdefault(key[1], now.time_ns)
        return len(silent)

    def restore_conditions(self, known: NodeConditions) -> None:
        """Go on with the conditions of a node; of other rules and thresholds none is known."""
        thresholds = {rule.name: rule.threshold for rule in self._rules}
        for held in known.conditions:
            if thresholds.get(held.rule) == held.threshold:
                key = (held.rule, node_key(known), held.gpu_uuid)
                self._conditions[key] = _Condition(
                    held.boot_id, held.seq, held.held_ns, held.fired_time_ns
                )

    def take_changed(self, group: str) -> dict[str, NodeConditions | None]:
        """Return the conditions of nodes where any has changed since the last call, by node's key.

        `None` where none holds any more.
        """
        changed, self._changed = self._changed, {}
        if not changed:
            return {}
        thresholds = {rule.name: rule.threshold for rule in self._rules}
        held: dict[str, list[HeldCondition]] = {}
        for (rule, node, gpu_uuid), condition in self._conditions.items():
            if node in changed:
                held.setdefault(node, []).append(
                    HeldCondition(
                        rule=rule,
                        threshold=thresholds[rule],
                        gpu_uuid=gpu_uuid,
                        boot_id=condition.boot_id,
                        seq=condition.seq,
                        held_ns=condition.held_ns,
                        fired_time_ns=condition.fired_ns,
                    )
                )
        found: dict[str, NodeConditions | None] = dict.fromkeys(changed)
        for key, conditions in held.items():
            cluster, node = split_key(key)
            found[key] = NodeConditions(
                group=group,
                cluster=cluster,
                node=node,
                time_ns=changed[key],
                conditions=conditions[:MAX_HELD_CONDITIONS],
            )
        return found
