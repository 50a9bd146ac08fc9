"""What happened to one GPU over time: XIDs, incidents, reasons of throttling, and NVLink's rates.

Here events are counted, for ever and over a window; bounded, whatever happens to the GPU. DCGM
gives rates under names of counters: KiB a second, divided by 1000, of byte counters that are read
again and again. Our own names have the counters themselves.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

from agent.core.incidents.builder import severities_of
from gpuledger.records import GpuHealth, GpuTraffic, Incident

K = TypeVar("K")
_DCGMS_UNIT_BYTES: Final = 1024 * 1000
_ALL: Final = ""
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


class GpuEventHistory:
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

    def record_incident(self, incident: Incident, *, at_ns: int) -> None:
        """Count an incident that came at `at_ns` of a clock that never goes back."""
        _count(self.incidents, (incident.kind, incident.severity.value))
        if incident.xid is not None:
            self.last_xid = incident.xid
            _count(self.xids, incident.xid)
            self._recent_xids.append((at_ns, incident.xid))

    def record_reasons(self, reasons: int, *, at_ns: int) -> None:
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


def nvlink_bytes_total(traffic: GpuTraffic | None) -> int | None:
    """Return what went both ways over all links; `None` where one of the two is not known."""
    if traffic is None or traffic.nvlink_sent_bytes_total is None:
        return None
    received = traffic.nvlink_received_bytes_total
    return None if received is None else traffic.nvlink_sent_bytes_total + received


def nvlink_link_bytes_totals(health: GpuHealth | None) -> dict[str, int]:
    """Return what went both ways over each link of which both are known, by the link's number."""
    sent = (health and health.nvlink_link_sent_bytes_totals) or {}
    received = (health and health.nvlink_link_received_bytes_totals) or {}
    return {link: sent[link] + received[link] for link in sent if link in received}


@dataclass(slots=True)
class _Counter:
    """A byte counter: what it was when it was last read, and how fast it rose until then."""

    total: int
    at_ns: int
    rate: float | None = None

    def update(self, total: int, at_ns: int) -> None:
        """Record a new reading; one that fell has begun again, and gives no rate."""
        elapsed_seconds = (at_ns - self.at_ns) / 1e9
        # Two reads of one instant give no rate.
        if elapsed_seconds <= 0:
            return
        risen = total - self.total
        per_second = risen / elapsed_seconds / _DCGMS_UNIT_BYTES
        self.rate = None if risen < 0 else round(per_second, 3)
        self.total, self.at_ns = total, at_ns


@dataclass(slots=True)
class NvlinkRates:
    """How fast the counters of one GPU's links rise, in DCGM's unit."""

    _counters: dict[str, _Counter] = field(default_factory=dict)

    def update(self, traffic: GpuTraffic | None, health: GpuHealth | None, *, at_ns: int) -> None:
        """Record what was read at `at_ns` of a clock that never goes back."""
        total = nvlink_bytes_total(traffic)
        totals: Mapping[str, int] = {} if total is None else {_ALL: total}
        for link, value in {**totals, **nvlink_link_bytes_totals(health)}.items():
            counter = self._counters.setdefault(link, _Counter(value, at_ns))
            counter.update(value, at_ns)

    @property
    def total(self) -> float | None:
        """The rate of all links together; `None` until it was read twice."""
        counter = self._counters.get(_ALL)
        return counter.rate if counter else None

    @property
    def links(self) -> Mapping[str, float | None]:
        """The rate of each link, by its number."""
        return {link: counter.rate for link, counter in self._counters.items() if link != _ALL}
