"""Bursts of XIDs: one fault of a GPU makes the driver report several, and one of them is its root.

As NVIDIA has it, a burst lasts until the GPU has been without an XID for three minutes. Its root is
the XID of the highest severity, and among equals of the highest class. Pure.
"""

from typing import Final

from gpuledger.clock import NS_PER_MINUTE
from gpuledger.records import Incident, Severity

SILENCE_NS: Final = 3 * NS_PER_MINUTE
"""After so long without an XID of the GPU, by the node's clock, a burst is over."""
_SEVERITIES: Final = tuple(severity.value for severity in Severity)
"""The highest last."""
_CLASSES: Final = (
    "context",
    "detail",
    "info",
    "app",
    "maintenance",
    "trend",
    "unknown",
    "software",
    "support",
    "nvlink5",
    "nvlink",
    "reset",
    "mechanical",
    "hardware",
    "vm",
    "node",
)
"""The classes of `gpuledger.xids`, the highest last."""
_APP: Final = "app"
_CONTEXT: Final = frozenset({"context", "detail"})

Rank = tuple[int, int]


def rank_of(incident: Incident) -> Rank:
    """Return how much an XID says of the fault's root; one unknown here ranks above all known."""
    severity, category = incident.severity.value, incident.category or "unknown"
    return (
        _SEVERITIES.index(severity) if severity in _SEVERITIES else len(_SEVERITIES),
        _CLASSES.index(category) if category in _CLASSES else len(_CLASSES),
    )


def is_of_an_app(incident: Incident) -> bool:
    """Return whether an XID is the business of the pod's owner: each pod has bursts of its own."""
    return incident.category == _APP


def is_context(incident: Incident) -> bool:
    """Return whether an XID only goes with another one, such as 45 and 154."""
    return incident.category in _CONTEXT


def is_same_burst(incident: Incident, *, last_ns: int) -> bool:
    """Return whether an XID comes before a burst is over whose newest was at `last_ns`."""
    return abs(incident.time_ns - last_ns) <= SILENCE_NS
