"""What the log says of incidents: a line each, and of a storm of equal ones a line a minute."""

import logging
from typing import Final

import structlog

from gpuledger.records import Incident, Severity
from gpuledger.runtime.logs import Repeats

_LEVELS: Final = {
    Severity.INFO: logging.INFO,
    Severity.WARNING: logging.WARNING,
    Severity.CRITICAL: logging.ERROR,
}
_log = structlog.get_logger(__name__)


class IncidentLog:
    """The lines of one node."""

    def __init__(self, repeats: Repeats | None = None) -> None:
        self._repeats = repeats or Repeats()

    def tell(self, incident: Incident) -> None:
        """Write a line, as loud as the incident; `count` is how many equal ones it stands for."""
        count = self._repeats.count((incident.gpu_uuid, incident.kind, incident.xid))
        if not count:
            return
        facts = {
            "kind": incident.kind,
            "gpu": incident.gpu_uuid,
            "gpu_index": incident.gpu_index,
            "xid": incident.xid,
            "action": incident.action,
            "pods": _pods_of(incident) or None,
            "source": incident.source,
            "detail": incident.message,
            "count": count,
        }
        known = {key: value for key, value in facts.items() if value is not None}
        _log.log(_LEVELS[incident.severity], "incident_seen", **known)


def _pods_of(incident: Incident) -> list[str]:
    """Return who held the GPU by name, as the kubelet said; else the UIDs of who was on it."""
    held = {f"{one.namespace}/{one.pod}" for one in incident.allocations or ()}
    return sorted(held or {one.pod_uid for one in incident.processes if one.pod_uid})
