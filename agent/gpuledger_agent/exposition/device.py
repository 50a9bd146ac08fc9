"""A GPU or MIG instance with its latest values, and the history of its events.

The tables of metrics name each value by a path such as `health.fan_speed_ratio`. `read_at` returns
a function that reads the value of a path. This module computes values that depend on several
readings, and converts values of records to DCGM's units (MiB, percent, MHz) or base units.
`node_state` decides which readings are too old.

Events (XIDs, incidents, starts of throttling) are counted in total and over a window, with limited
memory. DCGM exports rates of NVLinks under names of counters, in KiB per second divided by 1000.
This module computes these rates from byte counters. Our own metrics export the byte counters.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final, TypeVar

from gpuledger.clock import NS_PER_SECOND
from gpuledger.ledger.health import THROTTLE_REASONS, of_all_links
from gpuledger.records import (
    GpuDetails,
    GpuFacts,
    GpuHealth,
    GpuLimits,
    GpuProfiling,
    GpuReading,
    GpuThrottling,
    GpuTraffic,
    Incident,
    Inventory,
)
from gpuledger_agent.core.incidents import severities_of

K = TypeVar("K")
_DCGMS_UNIT_BYTES: Final = 1024 * 1000
_ALL: Final = ""
_MAX_RECENT: Final = 1000
_MAX_KINDS: Final = 100
# Kinds whose incidents have a series from the start. The other kinds would add a dozen series per
# GPU that hardly ever change.
COUNTED_FROM_ZERO: Final = ("xid", "gpu_lost")
_NO_INCIDENTS: Final = {
    (kind, severity.value): 0 for kind in COUNTED_FROM_ZERO for severity in severities_of(kind)
}


class GpuEventHistory:
    """Counts the events of one GPU since the agent started."""

    def __init__(self) -> None:
        self.last_xid = 0
        """The newest XID; 0 if there was none."""
        self.xids: Counter[int] = Counter()
        """Number of occurrences of each XID."""
        self.incidents: Counter[tuple[str, str]] = Counter(_NO_INCIDENTS)
        """Number of incidents by kind and severity. The kinds `xid` and `gpu_lost` start at 0, so
        that an alert on an increase detects the first incident."""
        self._recent_xids: deque[tuple[int, int]] = deque(maxlen=_MAX_RECENT)
        self._recent_reasons: deque[tuple[int, int]] = deque(maxlen=_MAX_RECENT)
        self._reasons = 0

    def record_incident(self, incident: Incident, *, at_ns: int) -> None:
        """Count an incident that occurred at `at_ns` on the monotonic clock.

        An incident that only reports which states were absent at the agent's start is not counted.
        """
        if incident.present_at_start and incident.ended_kinds:
            return
        _count(self.incidents, (incident.kind, incident.severity.value))
        if incident.xid is not None:
            self.last_xid = incident.xid
            _count(self.xids, incident.xid)
            self._recent_xids.append((at_ns, incident.xid))

    def record_reasons(self, reasons: int, *, at_ns: int) -> None:
        """Record a tick's throttle reasons, given as NVML's bits.

        Each reason that was not set in the previous tick counts as an event.
        """
        begun, self._reasons = reasons & ~self._reasons, reasons
        if begun:
            for bit in THROTTLE_REASONS:
                if begun & bit:
                    self._recent_reasons.append((at_ns, bit))

    def recent_xids(self, since_ns: int) -> Counter[str]:
        """Return the number of times that each XID occurred since `since_ns` (monotonic clock)."""
        return Counter(str(xid) for at_ns, xid in self._recent_xids if at_ns >= since_ns)

    def recent_clock_events(self, since_ns: int) -> Counter[str]:
        """Return the number of times that each throttle reason started since `since_ns`.

        `since_ns` is a time on the monotonic clock.
        """
        recent: Iterable[tuple[int, int]] = self._recent_reasons
        return Counter(THROTTLE_REASONS[bit] for at_ns, bit in recent if at_ns >= since_ns)


def _count(counts: Counter[K], key: K) -> None:
    # Each key stays a series forever, so limit their number in case a driver reports random codes.
    if key in counts or len(counts) < _MAX_KINDS:
        counts[key] += 1


def nvlink_bytes_total(traffic: GpuTraffic | None) -> int | None:
    """Return the total bytes over all NVLinks, sent and received; `None` if one is unknown."""
    if traffic is None or traffic.nvlink_sent_bytes_total is None:
        return None
    received = traffic.nvlink_received_bytes_total
    return None if received is None else traffic.nvlink_sent_bytes_total + received


def nvlink_link_bytes_totals(health: GpuHealth | None) -> dict[str, int]:
    """Return the total bytes over each NVLink, sent and received, by link number.

    Links for which one of the two is unknown are left out.
    """
    sent = (health and health.nvlink_link_sent_bytes_totals) or {}
    received = (health and health.nvlink_link_received_bytes_totals) or {}
    return {link: sent[link] + received[link] for link in sent if link in received}


@dataclass(slots=True)
class _Counter:
    """A byte counter's last value, and its rate between the last two readings."""

    total: int
    at_ns: int
    rate: float | None = None

    def update(self, total: int, at_ns: int) -> None:
        """Record a new reading of the counter and compute the rate.

        If the counter has restarted, the rate is unknown.
        """
        elapsed_seconds = (at_ns - self.at_ns) / NS_PER_SECOND
        # Two readings at the same time give no rate.
        if elapsed_seconds <= 0:
            return
        risen = total - self.total
        per_second = risen / elapsed_seconds / _DCGMS_UNIT_BYTES
        self.rate = None if risen < 0 else round(per_second, 3)
        self.total, self.at_ns = total, at_ns


@dataclass(slots=True)
class NvlinkRates:
    """The rates of one GPU's NVLinks, in DCGM's unit: KiB per second divided by 1000."""

    _counters: dict[str, _Counter] = field(default_factory=dict)

    def update(self, traffic: GpuTraffic | None, health: GpuHealth | None, *, at_ns: int) -> None:
        """Record counters that were read at `at_ns` on the monotonic clock."""
        total = nvlink_bytes_total(traffic)
        totals: Mapping[str, int] = {} if total is None else {_ALL: total}
        for link, value in {**totals, **nvlink_link_bytes_totals(health)}.items():
            counter = self._counters.setdefault(link, _Counter(value, at_ns))
            counter.update(value, at_ns)

    @property
    def total(self) -> float | None:
        """The rate of all links together; `None` if it is unknown, as before the second reading."""
        counter = self._counters.get(_ALL)
        return counter.rate if counter else None

    @property
    def links(self) -> Mapping[str, float | None]:
        """The rates by link number; `None` for a link without a known rate."""
        return {link: counter.rate for link, counter in self._counters.items() if link != _ALL}


_RECOVERY_CODES: Final = {
    "none": 0,
    "reset": 1,
    "reboot": 2,
    "drain_p2p": 3,
    "drain_and_reset": 4,
}
Converted = float | str | None
Unit = Callable[[Any], Converted]


def unit_of(name: str) -> Unit:
    """Return the function that converts a record's value to the unit that a table names.

    `link N` and `item N` select one value from values by link and from a list. Raise `KeyError` if
    the unit is unknown.
    """
    kind, _, argument = name.partition(" ")
    if kind == "link":
        return lambda values: values.get(argument)
    if kind == "item":
        index = int(argument)
        return lambda values: values[index] if index < len(values) else None
    return UNITS[name]


UNITS: Final[dict[str, Unit]] = {
    "": lambda value: int(value) if isinstance(value, bool) else value,
    "MiB": lambda value: value // (1 << 20),
    "%": lambda value: round(value * 100, 4),
    "MHz": lambda value: value // 1_000_000,
    "W": lambda value: value / 1_000,
    "J": lambda value: value / 1_000,
    "s": lambda value: value / 1_000_000_000,
    "recovery": _RECOVERY_CODES.get,
    "text": str,
    "multi_series": lambda value: value,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownDevice:
    """The latest data about one device for the page; unknown or outdated parts are `None`."""

    reading: GpuReading
    """The newest tick's row of the device."""
    details: GpuDetails | None = None
    """The newest readings that are neither in `reading` nor in the parts below."""
    profiling: GpuProfiling | None = None
    """The newest values of the chip's own counters."""
    traffic: GpuTraffic | None = None
    """The newest byte counters."""
    throttling: GpuThrottling | None = None
    """The newest throttle reasons and times."""
    health: GpuHealth | None = None
    """The newest health readings."""
    limits: GpuLimits | None = None
    """The newest limits."""
    facts: GpuFacts | None = None
    """Hardware and configuration of the GPU or, for a MIG instance, of its GPU."""
    node: Inventory | None = None
    """The node's inventory."""
    events: GpuEventHistory | None = None
    """The GPU's events; `None` for an instance."""
    rates: NvlinkRates | None = None
    """The rates of the device's NVLinks."""
    is_unresponsive: bool = False
    """Whether the GPU no longer answers. Then only the UUID, index and model of `reading`, `facts`,
    `node` and `events` are set."""
    is_lost: bool = False
    """Whether the driver has lost the GPU."""

    @property
    def gpu_uuid(self) -> str:
        """The UUID of the GPU or, for an instance, of the GPU that contains it."""
        return self.reading.parent_uuid or self.reading.uuid

    @property
    def gpu_instance(self) -> tuple[str, int | None]:
        """The GPU's UUID and the device's GPU instance id, which is `None` for a whole GPU."""
        return self.gpu_uuid, self.reading.gpu_instance


Read = Callable[[ShownDevice], Converted]


def read_at(path: str, unit: str = "") -> Read:
    """Return a function that returns a device's value at `path`, converted to `unit`.

    `path` is a part of `ShownDevice` and a field of that part, such as `health.fan_speed_ratio`, or
    `derived.` and the name of a derived value. The function returns `None` if the value is missing.
    Raise `KeyError` if the unit or the derived value is unknown.
    """
    part_name, _, name = path.partition(".")
    convert = unit_of(unit)
    if part_name == "derived":
        part_of: Callable[[ShownDevice], Any] = lambda device: device  # noqa: E731  # one of two
        get: Callable[[Any], Any] = DERIVED[name]
    else:
        part_of, get = attrgetter(part_name), attrgetter(name)

    def read(device: ShownDevice) -> Converted:
        part = part_of(device)
        value = None if part is None else get(part)
        # Sum the values of all links, except derived values, which stay separate for each link.
        if part_name != "derived" and isinstance(value, dict):
            value = of_all_links(name, value)
        return None if value is None else convert(value)

    return read


_FABRIC_CODES: Final = {"not_supported": 0, "not_started": 1, "in_progress": 2}
_FABRIC_SUCCESS: Final = 3
_FABRIC_FAILURE: Final = 4


class Derived:
    """Functions that compute a value to show from several values of a device."""

    @staticmethod
    def memory_free_bytes(device: ShownDevice) -> int | None:
        """Return the memory that is neither used nor reserved by the driver; `None` if unknown."""
        reading = device.reading
        if reading.memory_total_bytes is None or reading.memory_used_bytes is None:
            return None
        reserved = reading.memory_reserved_bytes or 0
        return max(0, reading.memory_total_bytes - reading.memory_used_bytes - reserved)

    @staticmethod
    def memory_used_ratio(device: ShownDevice) -> float | None:
        """Return the used part of the memory that the driver does not reserve.

        Return `None` if it is unknown or no memory is used.
        """
        free, used = Derived.memory_free_bytes(device), device.reading.memory_used_bytes
        return None if not used or free is None else used / (used + free)

    @staticmethod
    def nvlink_rate(device: ShownDevice) -> float | None:
        """Return the rate over all NVLinks in DCGM's unit.

        Return `None` if it is unknown or the byte counters are outdated.
        """
        return device.rates.total if device.rates and device.traffic else None

    @staticmethod
    def nvlink_link_rates(device: ShownDevice) -> Mapping[str, float | None]:
        """Return the rate of each NVLink in DCGM's unit, by link number; `None` if it is unknown.

        Links whose byte counters are missing or outdated are left out.
        """
        rates = device.rates.links if device.rates else {}
        return {link: rates.get(link) for link in nvlink_link_bytes_totals(device.health)}

    @staticmethod
    def vgpu_license_status(device: ShownDevice) -> int | None:
        """Return the vGPU license status; as in DCGM, 0 if the GPU does not support licensing.

        Return `None` if there are no health readings.
        """
        return None if device.health is None else device.health.vgpu_license_status or 0

    @staticmethod
    def fabric_code(device: ShownDevice) -> int | None:
        """Return DCGM's code for the state of the GPU's registration with the NVLink fabric.

        Return `None` if the state is unknown.
        """
        health = device.health
        if health is None or health.fabric_state is None:
            return None
        if health.fabric_state == "completed":
            return _FABRIC_FAILURE if health.fabric_status else _FABRIC_SUCCESS
        return _FABRIC_CODES.get(health.fabric_state)


DERIVED: Final[dict[str, Callable[[ShownDevice], float | Mapping[str, float | None] | None]]] = {
    "memory_free_bytes": Derived.memory_free_bytes,
    "memory_used_ratio": Derived.memory_used_ratio,
    "nvlink_rate": Derived.nvlink_rate,
    "nvlink_link_rates": Derived.nvlink_link_rates,
    "vgpu_license_status": Derived.vgpu_license_status,
    "fabric_code": Derived.fabric_code,
}
"""The functions that compute derived values, by the name after `derived.` in a path."""
