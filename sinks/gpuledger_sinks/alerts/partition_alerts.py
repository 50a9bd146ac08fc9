"""What is known of the nodes of one partition: where their time stands, and their alerts. Pure.

This machine's time is given, and used for sending; what is new, a node's own time since boot says.
"""

from gpuledger.keys import node_key
from gpuledger.records import AttributedIncident, GpuEvent
from gpuledger_sinks.alerts.active_alerts import ActiveAlerts, Now
from gpuledger_sinks.alerts.incident_alerts import STATE_UNRESPONSIVE_NS, IncidentAlerts
from gpuledger_sinks.alerts.incident_words import IncidentWords
from gpuledger_sinks.alerts.slots import AlertSlots
from gpuledger_sinks.timelines import TickOrder, Timelines


class PartitionAlerts:
    """The alerts of the nodes of one partition."""

    def __init__(
        self,
        *,
        slots: AlertSlots | None = None,
        words: IncidentWords | None = None,
        state_unresponsive_ns: int = STATE_UNRESPONSIVE_NS,
    ) -> None:
        """Take the slots for alerts that all partitions share.

        A state stands for `state_unresponsive_ns` if no tick names its GPU.
        """
        self._timelines = Timelines()
        self.alerts = ActiveAlerts(slots=slots)
        self._incidents = IncidentAlerts(
            self.alerts, words=words, state_unresponsive_ns=state_unresponsive_ns
        )

    def observe(self, event: GpuEvent, *, now: Now) -> TickOrder:
        """Hold states against a tick that is its node's newest; return where the tick stands."""
        order = self._timelines.observe(event, received_ns=now.monotonic_ns).order
        if order is TickOrder.CURRENT:
            self._incidents.observe(event, now=now)
        return order

    def age_ns(self, attributed: AttributedIncident, *, now: Now) -> int:
        """Return how long ago an incident was; below zero if its node's clock is ahead.

        The time by which the node's clock was seen to be set back is not counted as age.
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

    def forget(self, *, now: Now) -> int:
        """Drop alerts that are over; return how many of them were still firing."""
        over = self.alerts.forget(now=now)
        self._incidents.forget(now=now)
        return sum(alert.ends_ns is None for alert in over)
