"""What goes over NVLink in a time, of byte counters that are read again and again. Pure.

DCGM gives rates under names of counters: KiB a second, divided by 1000. Our own names have the
counters themselves.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from gpuledger.records import GpuHealth, GpuTraffic

_DCGMS_UNIT_BYTES: Final = 1024 * 1000
_ALL: Final = ""


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
        if elapsed_seconds <= 0:
            return
        risen = total - self.total
        per_second = risen / elapsed_seconds / _DCGMS_UNIT_BYTES
        self.rate = None if risen < 0 else round(per_second, 3)
        self.total, self.at_ns = total, at_ns


@dataclass(slots=True)
class NvlinkRates:
    """How fast the counters of one GPU's links rise, in DCGM's unit."""

    _of: dict[str, _Counter] = field(default_factory=dict)

    def update(self, traffic: GpuTraffic | None, health: GpuHealth | None, *, at_ns: int) -> None:
        """Record what was read at `at_ns` of a clock that never goes back."""
        total = nvlink_bytes_total(traffic)
        totals: Mapping[str, int] = {} if total is None else {_ALL: total}
        for link, value in {**totals, **nvlink_link_bytes_totals(health)}.items():
            counter = self._of.setdefault(link, _Counter(value, at_ns))
            counter.update(value, at_ns)

    @property
    def total(self) -> float | None:
        """The rate of all links together; `None` until it was read twice."""
        return self._rate_of(_ALL)

    @property
    def links(self) -> Mapping[str, float | None]:
        """The rate of each link, by its number."""
        return {link: self._rate_of(link) for link in self._of if link != _ALL}

    def _rate_of(self, link: str) -> float | None:
        counter = self._of.get(link)
        return counter.rate if counter else None
