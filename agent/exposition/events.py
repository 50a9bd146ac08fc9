"""What happened to one GPU: its XIDs, its incidents, the reasons for which its clocks went down.

Here they are counted, for ever and over a window. Bounded, whatever happens to the GPU.
"""

from collections import Counter, deque
from collections.abc import Iterable
from typing import Final, TypeVar

from agent.incidents.builder import severities_of
from gpuledger.records import Incident

K = TypeVar("K")
_MAX_RECENT: Final = 1000
_MAX_KINDS: Final = 100
CLOCK_EVENTS: Final = {
    0x1: "gpu_idle",
    0x2: "clocks_setting",
    0x4: "power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display_clocks",
}
# Of the others a page would carry a dozen lines for each GPU that hardly ever change.
COUNTED_FROM_ZERO: Final = ("xid", "gpu_lost")
_NO_INCIDENTS: Final = {
    (kind, severity.value): 0 for kind in COUNTED_FROM_ZERO for severity in severities_of(kind)
}


class GpuEvents:
    """The events of one GPU since the agent's start."""

    def __init__(self) -> None:
        self.last_xid = 0
        """The newest XID; 0 where there was none."""
        self.xids: Counter[int] = Counter()
        """How often each XID came."""
        self.incidents: Counter[tuple[str, str]] = Counter(_NO_INCIDENTS)
        """How many incidents of each kind and severity there were; XIDs and losses from 0, so that
        a rule over the increase sees the first."""
        self._recent_xids: deque[tuple[int, int]] = deque(maxlen=_MAX_RECENT)
        self._recent_reasons: deque[tuple[int, int]] = deque(maxlen=_MAX_RECENT)
        self._reasons = 0

    def note_incident(self, incident: Incident, *, at_ns: int) -> None:
        """Count an incident that came at `at_ns` of a clock that never goes back."""
        _count(self.incidents, (incident.kind, incident.severity.value))
        if incident.xid is not None:
            self.last_xid = incident.xid
            _count(self.xids, incident.xid)
            self._recent_xids.append((at_ns, incident.xid))

    def note_reasons(self, reasons: int, *, at_ns: int) -> None:
        """Take the reasons of a tick: one that was not there before is an event."""
        begun, self._reasons = reasons & ~self._reasons, reasons
        if begun:
            for bit in CLOCK_EVENTS:
                if begun & bit:
                    self._recent_reasons.append((at_ns, bit))

    def recent_xids(self, since_ns: int) -> Counter[str]:
        """Return how often each XID came since then."""
        return Counter(str(xid) for at_ns, xid in self._recent_xids if at_ns >= since_ns)

    def recent_clock_events(self, since_ns: int) -> Counter[str]:
        """Return how often each reason began since then."""
        recent: Iterable[tuple[int, int]] = self._recent_reasons
        return Counter(CLOCK_EVENTS[bit] for at_ns, bit in recent if at_ns >= since_ns)


def _count(counts: Counter[K], key: K) -> None:
    if key in counts or len(counts) < _MAX_KINDS:
        counts[key] += 1
