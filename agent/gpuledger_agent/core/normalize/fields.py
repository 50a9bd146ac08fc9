"""Converts the driver's values to fields of records, and checks counters against their history.

`gpuledger_agent.core.readings` lists the fields that a source may return, with their units. Other
fields are ignored.

A counter that fell has restarted, or has overflowed if its unit allows overflows. If a counter rose
by more than possible, the value is ignored until a later value confirms it by continuing from
there. The possible rise depends on the time since the counter was last read, because not every tick
reads every counter.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec
from msgspec.structs import fields

from gpuledger.records import (
    GpuHealth,
    GpuLimits,
    GpuProfiling,
    GpuReading,
    GpuThrottling,
    GpuTraffic,
)
from gpuledger_agent.core.raw import CallGroup, RawGpuSample
from gpuledger_agent.core.readings import READINGS, ReadingSpec, Unit, Validator, converter

_PARTS: Final = {
    "profiling": GpuProfiling,
    "traffic": GpuTraffic,
    "throttling": GpuThrottling,
    "health": GpuHealth,
    "limits": GpuLimits,
}
_BOOKED: Final = frozenset(booked.name for booked in fields(GpuReading))
_MEASURED: Final = frozenset(measured.name for measured in fields(GpuProfiling)) & _BOOKED
_OF_TICK: Final = frozenset(name.removeprefix("profiling.") for name in READINGS[CallGroup.SENSORS])
# A mean over more than this many sampling intervals does not describe the current tick.
_MAX_ACTIVITY_TICKS: Final = 1.5
_NUMBERS: Final = frozenset({int, float})
_OF_FABRIC: Final = (
    "fabric_status",
    "fabric_health_mask",
    "fabric_bandwidth_degraded",
    "fabric_route_recovery",
    "fabric_route_unhealthy",
    "fabric_access_timeout",
)
# Counters of 32 bits, or of 32 bits in KiB.
_WIDTHS: Final = (1 << 32, 1 << 42)
_NS_PER_SECOND: Final = 1_000_000_000
# The driver's clock and ours differ.
_SLACK_NS: Final = 1_000_000_000


class _Field(NamedTuple):
    """The record field of a reading, with the conversion of its values.

    It is prepared once for speed, because each tick converts several hundred values.
    """

    name: str
    part: str
    """`reading`, `details`, or the nested record in the details that contains the field."""
    field: str
    unit: Unit
    low: float
    high: float
    convert: Callable[[Any], Any]
    is_list: bool
    is_by_link: bool

    @classmethod
    def of(cls, dotted: str, spec: ReadingSpec) -> "_Field":
        """Return the field for a dotted name such as `traffic.pcie_sent_bytes_total`."""
        part, _, name = dotted.rpartition(".")
        unit = spec.unit
        # Codes get empty bounds: they fail the quick check, so that the validator checks them.
        low, high = (math.inf, -math.inf) if unit.choices else (unit.low, unit.high)
        return cls(
            name=dotted,
            part=part or ("reading" if name in _BOOKED else "details"),
            field=name,
            unit=unit,
            low=low,
            high=high,
            convert=converter(unit),
            is_list=spec.is_list,
            is_by_link=spec.is_by_link,
        )


_FIELDS: Final = {
    group: {name: _Field.of(name, spec) for name, spec in specs.items()}
    for group, specs in READINGS.items()
}


class CounterTotal(msgspec.Struct, frozen=True, gc=False):
    """The history of one counter, in the driver's unit.

    This is a struct because one is created for each counter in each reading.
    """

    value: int
    """The last accepted value."""
    read_ns: int
    """When the value was read, by the monotonic clock."""
    wrapped: int = 0
    """Sum of all overflows of the counter so far."""
    suspect: "CounterTotal | None" = None
    """A later value that was not accepted because it rose too much; `None` if there is none."""


@dataclass(kw_only=True)
class CounterTracker:
    """Checks the counters of one GPU in one tick against their histories."""

    totals: dict[str, CounterTotal]
    """The counters' histories, kept from tick to tick."""
    now_ns: int
    """Time of the reading, by the monotonic clock."""
    fell: list[str] = field(default_factory=list)
    """Names of the counters that have restarted."""

    def update(self, name: str, value: int, unit: Unit) -> int | None:
        """Return a counter's value including overflows, and record it in the counter's history.

        Return `None` if the value rose by more than possible since the last accepted value.
        """
        was = self.totals.get(name)
        if was is None:
            self.totals[name] = CounterTotal(value, self.now_ns)
            return value
        if value < was.value:
            return self._fall(name, value, was, unit)
        # A value that was not accepted counts too: if the counter continues from there, it is real.
        known = (was, was.suspect) if was.suspect else (was,)
        if value != was.value and not any(
            self._can_rise(value - since.value, since, unit) for since in known
        ):
            suspect = CounterTotal(value, self.now_ns)
            self.totals[name] = msgspec.structs.replace(was, suspect=suspect)
            return None
        self.totals[name] = CounterTotal(value, self.now_ns, was.wrapped)
        return value + was.wrapped

    def _can_rise(self, risen: int, since: CounterTotal, unit: Unit) -> bool:
        if unit.max_per_second is None:
            return True
        passed_ns = self.now_ns - since.read_ns + _SLACK_NS
        return 0 <= risen <= unit.max_per_second * passed_ns // _NS_PER_SECOND

    def _fall(self, name: str, value: int, was: CounterTotal, unit: Unit) -> int:
        """Return the total of a counter that fell; decide whether it overflowed or restarted."""
        width = next((width for width in _WIDTHS if was.value < width), 0)
        risen = width - was.value + value
        # If another counter of the GPU has restarted, this counter has restarted too.
        if unit.wraps and width and not self.fell and self._can_rise(risen, was, unit):
            self.totals[name] = CounterTotal(value, self.now_ns, was.wrapped + width)
            return value + was.wrapped + width
        self.totals[name] = CounterTotal(value, self.now_ns)
        self.fell.append(name)
        return value


class ReadFields(NamedTuple):
    """The fields of one GPU's records in one tick."""

    reading: dict[str, Any]
    """Fields of `GpuReading`."""
    details: dict[str, Any]
    """Fields of `GpuDetails`, including nested records."""


def read_fields(
    raw: RawGpuSample,
    *,
    interval_ns: int,
    counters: CounterTracker,
    validator: Validator,
) -> ReadFields:
    """Return one GPU's plausible values in one tick, as fields of `GpuReading` and `GpuDetails`.

    Profiling values that `GpuReading` also contains are in both.
    """
    found: dict[str, dict[str, Any]] = {}
    for group, values in _values_by_group(raw, interval_ns).items():
        specs = _FIELDS[group]
        for name, value in values.items():
            spec = specs.get(name)
            if spec is None or value is None:
                continue
            ours = _read(spec, value, counters, validator)
            if ours is not None:
                found.setdefault(spec.part, {})[spec.field] = ours
    reading, details = found.pop("reading", {}), found.pop("details", {})
    _correct(reading, found.get("health", {}), validator)
    measured = found.get("profiling", {})
    reading |= {name: measured[name] for name in _MEASURED & measured.keys()}
    if raw.profiling_ns is not None and measured.keys() - _OF_TICK:
        measured["interval_ns"] = raw.profiling_ns
    details |= {part: _PARTS[part](**values) for part, values in found.items() if values}
    return ReadFields(reading, details)


def _values_by_group(raw: RawGpuSample, interval_ns: int) -> Mapping[CallGroup, Mapping[str, Any]]:
    core = {
        "memory_total_bytes": raw.memory_total_bytes,
        "memory_used_bytes": raw.memory_used_bytes,
        "memory_reserved_bytes": raw.memory_reserved_bytes,
        "power_milliwatts": raw.power_milliwatts,
        "energy_total_millijoules": raw.energy_millijoules,
    }
    # After a gap, the chip's counters are means over the whole gap and do not describe this tick.
    is_of_this_tick = (raw.activity_ns or 0) <= _MAX_ACTIVITY_TICKS * interval_ns
    return {
        CallGroup.USAGE: core,
        CallGroup.SENSORS: {**raw.sensors, **(raw.activity if is_of_this_tick else {})},
        CallGroup.READINGS: raw.readings,
        CallGroup.PROFILING: raw.profiling,
        CallGroup.HEALTH: raw.health,
    }


def _read(spec: _Field, value: Any, counters: CounterTracker, validator: Validator) -> Any:  # noqa: ANN401  # of the field's type
    if spec.is_by_link:
        # Each link's counter has its own history.
        by_link = {
            str(link): (_read_list if spec.is_list else _read_one)(
                spec, f"{spec.field}.{link}", item, counters, validator
            )
            for link, item in value.items()
        }
        return {link: item for link, item in by_link.items() if item is not None} or None
    if spec.is_list:
        return _read_list(spec, spec.field, value, counters, validator)
    return _read_one(spec, spec.field, value, counters, validator)


def _read_list(
    spec: _Field,
    entry: str,
    value: Any,  # noqa: ANN401  # as below
    counters: CounterTracker,
    validator: Validator,
) -> list[Any] | None:
    """Return a list's values up to the first implausible one.

    The later values are left out, because a value is identified by its position in the list.
    """
    kept: list[Any] = []
    for position, item in enumerate(value if isinstance(value, list | tuple) else ()):
        ours = _read_one(spec, f"{entry}.{position}", item, counters, validator)
        if ours is None:
            break
        kept.append(ours)
    return kept or None


def _read_one(
    spec: _Field,
    entry: str,
    value: Any,  # noqa: ANN401  # of the field's type
    counters: CounterTracker,
    validator: Validator,
) -> Any:  # noqa: ANN401  # as above
    # Nearly all values pass this quick check. The validator checks codes, and counts why a value
    # is implausible.
    is_true = type(value) in _NUMBERS and spec.low <= value <= spec.high
    if not is_true and not validator.is_plausible(value, spec.unit, reading=spec.name):
        return None
    if spec.unit.is_total:
        value = counters.update(entry, int(value), spec.unit)
        if value is None:
            validator.drop(spec.name, "leap")
            return None
    return spec.convert(value)


def _correct(reading: dict[str, Any], health: dict[str, Any], validator: Validator) -> None:
    """Remove memory values above the total memory.

    Also remove the NVLink fabric's values if the GPU has not joined a fabric.
    """
    total = reading.get("memory_total_bytes")
    for name in ("memory_used_bytes", "memory_reserved_bytes"):
        if total is not None and reading.get(name, 0) > total:
            validator.drop(name, "out_of_range")
            del reading[name]
    if health.get("fabric_state") != "completed":
        for name in _OF_FABRIC:
            health.pop(name, None)
