"""Counts the incidents of one node's GPUs by kind, and XIDs also by code.

**Counted before sent.** An incident is sent only after the state that includes it was committed. A
sink that resumes after a crash therefore knows everything that was sent, and counters never fall. A
lost sample needs no repetition, because the next sample contains the new total.

**A series begins with 0.** A sample of 0 precedes the first value, so that the increase includes
the first incident. Each kind has a series as soon as the GPU is in the node's ticks. An XID code
has a series from its first incident. The state includes the start of a series once it was sent;
until then, a resumed sink sends the 0 again. The 0 has its own request, so that it is not lost if
the receiver rejects other series.

**Each incident once.** The hashes of the last incidents are kept, because agents publish
unacknowledged incidents again.

Pure.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from gpuledger.clock import NS_PER_MINUTE, NS_PER_MS, NS_PER_SECOND
from gpuledger.ledger.families import INCIDENTS, XID_ERRORS
from gpuledger.ledger.health import COUNTED_KINDS, counted_kind, counted_xid, incident_hash
from gpuledger.ledger.series import SeriesGroup, SeriesValues
from gpuledger.records import (
    CountedIncidents,
    CountedKind,
    CountedXid,
    Incident,
    NodeCounters,
)
from gpuledger.records.bounds import MAX_GPUS
from gpuledger.records.counters import MAX_INCIDENT_GPUS, MAX_KNOWN_INCIDENTS

SENT_NS: Final = 10 * NS_PER_MINUTE
"""How long a GPU's series are sent after its last incident or tick."""
_GPU_BYTES: Final = 8_192
"""Approximate memory of a GPU's counters and the groups of its series."""


@dataclass(slots=True)
class _XidTotal:
    total: int = 0
    begun_ns: int | None = None


@dataclass(slots=True)
class _GpuIncidents:
    """The counters of one GPU."""

    seen_ns: int
    """Time of the last tick with this GPU, or of its last incident."""
    kinds: dict[str, int] = field(default_factory=dict)
    begun_ns: int | None = None
    """The start of the series of all kinds; `None` until they are sent."""
    xids: dict[str, _XidTotal] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class IncidentSamples:
    """The samples of a node's incidents at one time."""

    values: Mapping[SeriesGroup, SeriesValues]
    starts_ms: Mapping[SeriesGroup, Sequence[int | None]]
    """When each counter was 0, in milliseconds since the epoch."""
    begun: Sequence[SeriesGroup]
    """The groups that begin and need a sample of 0 at their start."""


class IncidentsOfNode:
    """The counters of a node's incidents."""

    def __init__(self, *, every_ns: int, counted: NodeCounters | None = None) -> None:
        """Continue from saved counters, if any; send samples at intervals of `every_ns`."""
        self._every_ns = every_ns
        self._gpus: dict[str, _GpuIncidents] = {}
        # A dict, because it keeps the order of insertion.
        self._known: dict[str, None] = {}
        self._sent_ns: int | None = None
        self._due_ns: int | None = None
        self._is_urgent = False
        if counted is not None:
            self._restore(counted)

    def _restore(self, counted: NodeCounters) -> None:
        self._known = dict.fromkeys(counted.known_incidents or ())
        for gpu in counted.incidents or ():
            self._gpus[gpu.gpu] = _GpuIncidents(
                seen_ns=gpu.seen_time_ns,
                kinds={one.kind: one.total for one in gpu.kinds},
                begun_ns=gpu.begun_time_ns,
                xids={one.xid: _XidTotal(one.total, one.begun_time_ns) for one in gpu.xids},
            )
        # A previous owner has sent no samples of the node with a later time.
        self._sent_ns, self._is_urgent = counted.time_ns, bool(self._gpus)

    @property
    def size_bytes(self) -> int:
        """The approximate memory of the counters, in bytes."""
        return len(self._gpus) * _GPU_BYTES

    def add(self, incident: Incident, *, time_ns: int) -> bool:
        """Count an incident unless it was counted before; return whether it was counted.

        `time_ns` is the node's current time.
        """
        known = incident_hash(incident)
        if known in self._known:
            return False
        self._known[known] = None
        if len(self._known) > MAX_KNOWN_INCIDENTS:
            del self._known[next(iter(self._known))]
        gpu = self._gpu(incident.gpu_uuid, time_ns)
        kind, xid = counted_kind(incident), counted_xid(incident)
        gpu.kinds[kind] = gpu.kinds.get(kind, 0) + 1
        if xid is not None:
            gpu.xids.setdefault(xid, _XidTotal()).total += 1
        self._is_urgent = True
        return True

    def samples(
        self, gpus: Iterable[str], *, time_ns: int, interval_ns: int
    ) -> IncidentSamples | None:
        """Return the samples to send at the end of an interval; `None` if none are due.

        `gpus` are the GPUs of the interval's last tick. Samples are due after `every_ns`, or at
        once after a new incident.
        """
        for uuid in gpus:
            self._gpu(uuid, time_ns)
        self._forget_gone(time_ns)
        # If the clock was set back, the wait restarts.
        if self._due_ns is None or self._due_ns - time_ns > self._every_ns:
            self._due_ns = time_ns + self._every_ns
        if time_ns < self._due_ns and not self._is_urgent:
            return None
        self._due_ns, self._is_urgent = time_ns + self._every_ns, False
        begins_ns = time_ns - max(interval_ns, NS_PER_SECOND)
        if self._sent_ns is not None and self._sent_ns < time_ns:
            # A series does not begin before the last samples, because a series with the same labels
            # may have ended there.
            begins_ns = max(begins_ns, self._sent_ns)
        self._sent_ns = time_ns
        return self._samples(time_ns, max(0, begins_ns))

    def _samples(self, time_ns: int, begins_ns: int) -> IncidentSamples:
        values: dict[SeriesGroup, SeriesValues] = {}
        starts_ms: dict[SeriesGroup, Sequence[int | None]] = {}
        begun: list[SeriesGroup] = []

        def emit(group: SeriesGroup, total: int, begun_ns: int | None) -> None:
            start_ns = begins_ns if begun_ns is None else begun_ns
            values[group] = (float(total),)
            starts_ms[group] = (start_ns // NS_PER_MS + 1,)
            # A series whose first sample is 0 needs no additional 0.
            if begun_ns is None and total:
                begun.append(group)

        for uuid, gpu in self._gpus.items():
            if abs(time_ns - gpu.seen_ns) > SENT_NS:
                continue
            for kind in COUNTED_KINDS:
                emit(SeriesGroup(INCIDENTS, (uuid, kind)), gpu.kinds.get(kind, 0), gpu.begun_ns)
            gpu.begun_ns = begins_ns if gpu.begun_ns is None else gpu.begun_ns
            for xid, of_xid in gpu.xids.items():
                emit(SeriesGroup(XID_ERRORS, (uuid, xid)), of_xid.total, of_xid.begun_ns)
                of_xid.begun_ns = begins_ns if of_xid.begun_ns is None else of_xid.begun_ns
        return IncidentSamples(values=values, starts_ms=starts_ms, begun=begun)

    def _gpu(self, uuid: str, time_ns: int) -> _GpuIncidents:
        gpu = self._gpus.get(uuid)
        if gpu is None:
            if len(self._gpus) >= MAX_GPUS:
                # Drop the GPU that was seen longest ago; a real node never has so many GPUs.
                del self._gpus[min(self._gpus, key=lambda of: self._gpus[of].seen_ns)]
            gpu = self._gpus[uuid] = _GpuIncidents(time_ns)
        gpu.seen_ns = time_ns
        return gpu

    def _forget_gone(self, time_ns: int) -> None:
        """Forget GPUs without incidents that were in no tick for `SENT_NS`."""
        self._gpus = {
            uuid: gpu
            for uuid, gpu in self._gpus.items()
            if gpu.kinds or abs(time_ns - gpu.seen_ns) <= SENT_NS
        }

    def records(self) -> list[CountedIncidents]:
        """Return the counters of GPUs with incidents, for the state topic.

        If there are too many GPUs, only those that were seen last are included.
        """
        had = [(uuid, gpu) for uuid, gpu in self._gpus.items() if gpu.kinds]
        had.sort(key=lambda one: one[1].seen_ns)
        return [
            CountedIncidents(
                gpu=uuid,
                seen_time_ns=gpu.seen_ns,
                kinds=[CountedKind(kind=kind, total=total) for kind, total in gpu.kinds.items()],
                xids=[
                    CountedXid(xid=xid, total=of_xid.total, begun_time_ns=of_xid.begun_ns)
                    for xid, of_xid in gpu.xids.items()
                ],
                begun_time_ns=gpu.begun_ns,
            )
            for uuid, gpu in had[-MAX_INCIDENT_GPUS:]
        ]

    def hashes(self) -> list[str]:
        """Return the hashes of the last incidents counted, oldest first."""
        return list(self._known)
