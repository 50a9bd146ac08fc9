"""Which GPUs of a run are there, which are lost since when, and what has happened to them.

An event lists the GPUs that answered. One that is missing in its node's newest event was there
before and is not replaced: it is lost, and stays in sight until it answers again. Pure.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final

from gpuledger.ledger.entries import name_holder
from gpuledger.records import AttributedIncident, GpuEvent, Incident

XID: Final = "xid"
_MAX_INCIDENTS: Final = 200
_SAME_CAUSE_NS: Final = 60 * 10**9
"""An XID at most so long before a GPU's last reading is taken for the cause of its loss."""


@dataclass(frozen=True, kw_only=True)
class LostGpu:
    """A GPU that no longer answers."""

    index: int
    """The driver's index of it, as of its last reading."""
    since_ns: int
    """When it was lost, nanoseconds since the epoch; where nobody said, its last reading."""
    cause: str | None
    """The XID that came with it."""
    holders: tuple[str, ...]
    """The pods to whom the kubelet still gives it, as `namespace/pod`."""


@dataclass(frozen=True, kw_only=True)
class _Seen:
    node: str
    index: int
    time_ns: int


def _holders_of(gpu_uuid: str, event: GpuEvent) -> tuple[str, ...]:
    holders = [
        name_holder(held, position, event)
        for position, held in enumerate(event.allocations)
        if held.gpu_uuid == gpu_uuid
    ]
    return tuple(f"{one.namespace}/{one.pod}" for one in holders if one.pod is not None)


class GpuPresence:
    """Follows the GPUs of all nodes; bounded by them, and in the incidents that it keeps."""

    def __init__(self) -> None:
        self.incidents: deque[AttributedIncident] = deque(maxlen=_MAX_INCIDENTS)
        self._seen: dict[str, _Seen] = {}

    def add(self, event: GpuEvent) -> None:
        """Record which GPUs answered."""
        boards = [gpu.reading for gpu in event.gpus if gpu.reading.parent_uuid is None]
        here = {(event.node, reading.index) for reading in boards}
        # Whatever had its place before was taken out.
        self._seen = {
            uuid: seen for uuid, seen in self._seen.items() if (seen.node, seen.index) not in here
        }
        for reading in boards:
            self._seen[reading.uuid] = _Seen(
                node=event.node, index=reading.index, time_ns=event.time_ns
            )

    def add_incident(self, incident: AttributedIncident) -> None:
        """Record what has happened to a GPU."""
        self.incidents.append(incident)

    def lost(self, newest: GpuEvent) -> list[LostGpu]:
        """Return the GPUs of a node that its newest event does not have."""
        here = {gpu.reading.uuid for gpu in newest.gpus}
        gone = [
            (uuid, seen)
            for uuid, seen in self._seen.items()
            if seen.node == newest.node and uuid not in here
        ]
        return [
            LostGpu(
                index=seen.index,
                since_ns=self._lost_ns(uuid, seen),
                cause=self._cause(uuid, seen),
                holders=_holders_of(uuid, newest),
            )
            for uuid, seen in gone
        ]

    def _lost_ns(self, uuid: str, seen: _Seen) -> int:
        told = (one.time_ns for one in self._told(uuid, seen) if one.kind == "gpu_lost")
        return next(told, seen.time_ns)

    def _cause(self, uuid: str, seen: _Seen) -> str | None:
        xids = [one for one in self._told(uuid, seen) if one.kind == XID]
        return f"XID {xids[-1].xid}" if xids else None

    def _told(self, uuid: str, seen: _Seen) -> list[Incident]:
        return [
            one.incident
            for one in self.incidents
            if one.incident.gpu_uuid == uuid
            and one.incident.time_ns >= seen.time_ns - _SAME_CAUSE_NS
        ]
