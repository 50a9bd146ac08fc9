"""States of a GPU: which incidents begin a state, and how its end is proven.

An event, such as an XID, is over when it is reported. A state, such as a lost GPU, lasts until its
end is reported by another incident, or proven by ticks in which the GPU answers. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gpuledger.records import GpuBooks, GpuEvent, Incident
from gpuledger.xids import RECOVERY_ACTION_CHANGED

LOST: Final = "gpu_lost"
_UNAVAILABLE: Final = "gpu_unavailable"
_REMAP: Final = "row_remap_pending"
_ACTION: Final = "recovery_action"
_BY_KIND: Final[Mapping[str, str]] = {
    LOST: LOST,
    _UNAVAILABLE: _UNAVAILABLE,
    _REMAP: _REMAP,
    "page_retirement_pending": _REMAP,
    _ACTION: _ACTION,
    # The state has the name of the kind. Incidents that report the end of the state also use this
    # name.
    **{
        kind: kind
        for kind in (
            "row_remap_failed",
            "sram_threshold_exceeded",
            "fabric_bandwidth_degraded",
            "fabric_route_recovery",
            "fabric_route_unhealthy",
            "fabric_access_timeout",
            "pcie_link_degraded",
            "hardware_thermal_slowdown",
            "power_brake_slowdown",
        )
    },
}
_BY_XID: Final[Mapping[int, str]] = {63: _REMAP}
"""XIDs that begin a state, and the kind of the state. The agent reports no separate incident for
these states."""
_ENDED_BY: Final[Mapping[str, frozenset[str]]] = {
    "gpu_recovered": frozenset({LOST, _UNAVAILABLE}),
    "row_remap_done": frozenset({_REMAP}),
    "driver_reloaded": frozenset({_UNAVAILABLE}),
}
_STATE_ENDED: Final = "state_ended"
_END_KINDS: Final = frozenset({"gpu_recovered", "row_remap_done", _STATE_ENDED})
_NO_ACTION: Final = "NONE"
_CATALOGUE_ACTION: Final = "XID_154"
"""The action of an incident if the driver's log line does not contain the requested action. It
comes from NVIDIA's XID catalogue."""
ANSWERS_NEEDED: Final = 2
"""Number of successive ticks in which a GPU must answer to prove the end of a state."""


@dataclass(slots=True)
class State:
    """A state that has begun, and how far its end is proven."""

    kind: str
    """The kind of the state; related kinds of incidents share one."""
    boot_id: str
    """The boot in which it began."""
    time_ns: int
    """When it began, by the node's clock."""
    answers: int = 0
    """Number of the latest successive ticks that indicate its end."""

    def observe(self, event: GpuEvent, books: GpuBooks, *, latest_ns: int) -> bool:
        """Process a tick of the state's GPU; return whether the end of the state is now proven.

        The state `gpu_lost` ends when the GPU answers. The other states end with the boot, because
        a new boot resets the GPU. `latest_ns` is the latest time that a correct clock can show, in
        nanoseconds since the epoch.
        """
        # If the clock was ahead and was corrected, ticks would seem earlier than the state until
        # the clock has caught up.
        was_ahead = event.time_ns <= latest_ns < self.time_ns
        is_later = was_ahead or event.time_ns - event.interval_ns >= self.time_ns
        counts = self.kind == LOST or event.boot_id != self.boot_id
        self.answers = (
            self.answers + 1 if is_later and counts and not books.reading.unresponsive else 0
        )
        return self.answers >= ANSWERS_NEEDED


def recovery_action_of(incident: Incident) -> str | None:
    """Return the recovery action that the driver requests.

    Returns `None` if the incident is not about a recovery action, or does not contain the action.
    """
    if incident.kind == _ACTION or incident.xid == RECOVERY_ACTION_CHANGED:
        return None if incident.action == _CATALOGUE_ACTION else incident.action
    return None


def state_of(incident: Incident) -> State | None:
    """Return the state that an incident begins, or `None` if it begins none."""
    kind = _BY_KIND.get(incident.kind)
    action = recovery_action_of(incident)
    if incident.kind == "xid" and incident.xid is not None:
        kind = _ACTION if action is not None else _BY_XID.get(incident.xid)
    if kind is None or action == _NO_ACTION:
        return None
    return State(kind, incident.boot_id, incident.time_ns)


def ended_by(incident: Incident) -> frozenset[str]:
    """Return the kinds of state that an incident ends."""
    if recovery_action_of(incident) == _NO_ACTION:
        return frozenset({_ACTION})
    if incident.kind == _STATE_ENDED:
        named = map(_BY_KIND.get, incident.ended_kinds or ())
        return frozenset(kind for kind in named if kind is not None)
    return _ENDED_BY.get(incident.kind, frozenset())


def is_only_an_end(incident: Incident) -> bool:
    """Return whether an incident reports only the end of a state, and is not an alert."""
    return recovery_action_of(incident) == _NO_ACTION or incident.kind in _END_KINDS
