"""Bursts of XIDs: one fault of a GPU makes the driver report several XIDs, one of them the root.

According to NVIDIA, a burst lasts until the GPU has had no XID for three minutes. Its root is the
XID with the highest severity. Among XIDs of equal severity, the highest class decides. Pure.
"""

from typing import Final

from gpuledger.clock import NS_PER_MINUTE
from gpuledger.records import Incident, Severity

SILENCE_NS: Final = 3 * NS_PER_MINUTE
"""Time without an XID of the GPU after which a burst is over, by the node's clock."""
_SEVERITIES: Final = tuple(severity.value for severity in Severity)
"""The severities of XIDs, in ascending order."""
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
"""The classes of XIDs (`gpuledger.xids`), in ascending order."""
_APP: Final = "app"
_CONTEXT: Final = frozenset({"context", "detail"})

Rank = tuple[int, int]


def rank_of(incident: Incident) -> Rank:
    """Return the rank of an XID: the root of a burst is the XID with the highest rank.

    An unknown severity or class ranks above the known ones; a missing class ranks as `unknown`.
    """
    severity, category = incident.severity.value, incident.category or "unknown"
    return (
        _SEVERITIES.index(severity) if severity in _SEVERITIES else len(_SEVERITIES),
        _CLASSES.index(category) if category in _CLASSES else len(_CLASSES),
    )


def is_of_an_app(incident: Incident) -> bool:
    """Return whether an application caused an XID; such XIDs form separate bursts per pod."""
    return incident.category == _APP


def is_context(incident: Incident) -> bool:
    """Return whether an XID only accompanies another XID, as 45 and 154 do."""
    return incident.category in _CONTEXT


def is_same_burst(incident: Incident, *, last_ns: int) -> bool:
    """Return whether an XID belongs to the burst whose newest XID was at `last_ns`."""
    return abs(incident.time_ns - last_ns) <= SILENCE_NS
