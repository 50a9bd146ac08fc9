"""The timelines and the alerts of one partition's nodes. Pure.

The current time is passed in and is used only for sending. The node's time since boot decides
whether a tick is new.
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
        """Use alert slots that all partitions share.

        A state's alert stays active for `state_unresponsive_ns` while no tick names its GPU.
        """
        self._timelines = Timelines()
        self.alerts = ActiveAlerts(slots=slots)
        self._incidents = IncidentAlerts(
            self.alerts, words=words, state_unresponsive_ns=state_unresponsive_ns
        )

    def observe(self, event: GpuEvent, *, now: Now) -> TickOrder:
        """Update the alerts if the tick is its node's newest; return the tick's order."""
        order = self._timelines.observe(event, received_ns=now.monotonic_ns).order
        if order is TickOrder.CURRENT:
            self._incidents.observe(event, now=now)
        return order

    def age_ns(self, attributed: AttributedIncident, *, now: Now) -> int:
        """Return the age of an incident in nanoseconds; negative if its node's clock is ahead.

        If the node's clock is behind by a known time, this time is subtracted from the age.
        """
        incident = attributed.incident
        return now.time_ns - incident.time_ns - self._timelines.behind_ns(node_key(incident))

    def add_incident(self, attributed: AttributedIncident, *, hold_ns: int, now: Now) -> None:
        """Activate the incident's alert for `hold_ns` from now, or until the end of its state.

        This time does not start at the incident's time, for two reasons. Alertmanager sends no
        notification of an alert that is over when it is first sent. If the node's clock was ahead,
        the alert would be active for too long.
        """
        self._incidents.add(attributed, hold_ns=hold_ns, now=now)

    def restore_incident(self, attributed: AttributedIncident, *, now: Now) -> bool:
        """Restore an incident reported before; return whether it begins or ends a state."""
        return self._incidents.restore(attributed, now=now)

    def forget(self, *, now: Now) -> int:
        """Drop alerts that are over; return how many of them were still firing."""
        over = self.alerts.forget(now=now)
        self._incidents.forget(now=now)
        return sum(alert.ends_ns is None for alert in over)
