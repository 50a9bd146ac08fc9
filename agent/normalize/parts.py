"""From the driver's values to the parts of a reading, by the catalogue. Pure.

Every value is judged by its unit, a counter also by what it was before.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from msgspec.structs import fields

from agent.core.raw import CallGroup, RawGpuSample
from agent.core.readings import READINGS, ReadingSpec
from agent.core.units import Unit
from agent.normalize.counters import CounterTracker
from agent.normalize.validation import Validator, all_numbers, converter
from gpuledger.records import (
    GpuHealth,
    GpuLimits,
    GpuProfiling,
    GpuReading,
    GpuThrottling,
    GpuTraffic,
)

_PARTS: Final = {
    "profiling": GpuProfiling,
    "traffic": GpuTraffic,
    "throttling": GpuThrottling,
    "health": GpuHealth,
    "limits": GpuLimits,
}
_BOOKED: Final = frozenset(one.name for one in fields(GpuReading))
_MEASURED: Final = frozenset(one.name for one in fields(GpuProfiling)) & _BOOKED
# Longer than this many ticks apart, two samples are not of this tick.
_LONGEST_PROFILING: Final = 1.5
_NUMBERS: Final = frozenset({int, float})


class Parts(NamedTuple):
    """What the catalogue gives of one GPU in one tick."""

    reading: dict[str, Any]
    """Fields of `GpuReading`."""
    details: dict[str, Any]
    """Fields of `GpuDetails`, its parts included."""


class _PartRow(NamedTuple):
    name: str
    part: str
    """`reading`, `details`, or the part of the details that has the field."""
    field: str
    unit: Unit
    low: float
    high: float
    convert: Callable[[Any], Any]
    is_list: bool
    is_of_links: bool


def _row(name: str, spec: ReadingSpec) -> _PartRow:
    part, _, field = name.rpartition(".")
    part = part or ("reading" if field in _BOOKED else "details")
    unit = spec.unit
    low, high = (math.inf, -math.inf) if unit.choices else (unit.low, unit.high)
    return _PartRow(
        name, part, field, unit, low, high, converter(unit), spec.is_list, spec.is_by_link
    )


_ROWS: Final = {
    group: {name: _row(name, spec) for name, spec in specs.items()}
    for group, specs in READINGS.items()
}


def read_parts(
    answers: RawGpuSample, *, interval_ns: int, ledger: CounterTracker, sieve: Validator
) -> Parts:
    """Return what comes from the catalogue, each once; what is booked of profiling twice."""
    found: dict[str, dict[str, Any]] = {}
    for group, raw in _raw(answers, interval_ns).items():
        rows = _ROWS[group]
        for name, value in raw.items():
            row = rows.get(name)
            if row is None or value is None:
                continue
            ours = _read(row, value, ledger, sieve)
            if ours is not None:
                found.setdefault(row.part, {})[row.field] = ours
    reading, details = found.pop("reading", {}), found.pop("details", {})
    _correct_memory(reading, sieve)
    _correct_fabric(found.get("health", {}))
    measured = found.get("profiling", {})
    reading |= {name: measured[name] for name in _MEASURED & measured.keys()}
    details |= {part: _PARTS[part](**values) for part, values in found.items() if values}
    return Parts(reading, details)


def _raw(answers: RawGpuSample, interval_ns: int) -> Mapping[CallGroup, Mapping[str, Any]]:
    books = {
        "memory_total_bytes": answers.memory_total_bytes,
        "memory_used_bytes": answers.memory_used_bytes,
        "memory_reserved_bytes": answers.memory_reserved_bytes,
        "power_watts": answers.power_milliwatts,
        "energy_total_joules": answers.energy_millijoules,
    }
    is_of_this_tick = (answers.profiling_ns or 0) <= _LONGEST_PROFILING * interval_ns
    return {
        CallGroup.BOOKS: books,
        CallGroup.READINGS: answers.readings,
        CallGroup.PROFILING: answers.profiling if is_of_this_tick else {},
        CallGroup.HEALTH: answers.health,
    }


def _read(row: _PartRow, value: Any, ledger: CounterTracker, sieve: Validator) -> Any:  # noqa: ANN401  # of the field's type
    if row.is_list:
        return _read_list(row, all_numbers(value), sieve)
    if row.is_of_links:
        return _read_links(row, value, ledger, sieve)
    return _read_one(row, row.field, value, ledger, sieve)


def _read_one(
    row: _PartRow,
    entry: str,
    value: Any,  # noqa: ANN401  # of the field's type
    ledger: CounterTracker,
    sieve: Validator,
) -> Any:  # noqa: ANN401  # as above
    # Nearly all pass this; the sieve says why one does not, and knows those that are no quantities.
    is_true = type(value) in _NUMBERS and row.low <= value <= row.high
    if not is_true and not sieve.believe(value, row.unit, reading=row.name):
        return None
    if row.unit.is_total:
        value = ledger.enter(entry, int(value), row.unit)
        if value is None:
            sieve.drop(row.name, "leap")
            return None
    return row.convert(value)


def _read_list(row: _PartRow, values: Iterable[Any], sieve: Validator) -> list[Any] | None:
    """Return the values before the first that cannot be true, as a place is an engine's number."""
    kept = []
    for value in values:
        is_true = type(value) in _NUMBERS and row.low <= value <= row.high
        if not is_true and not sieve.believe(value, row.unit, reading=row.name):
            break
        kept.append(row.convert(value))
    return kept or None


def _read_links(
    row: _PartRow, values: Mapping[int, Any], ledger: CounterTracker, sieve: Validator
) -> dict[str, Any] | None:
    """Return what can be true by the link's number; each link's counter has its own life."""
    read = {
        str(link): _read_one(row, f"{row.field}.{link}", value, ledger, sieve)
        for link, value in values.items()
    }
    return {link: value for link, value in read.items() if value is not None} or None


def _correct_memory(found: dict[str, Any], sieve: Validator) -> None:
    """Leave out more memory than there is."""
    total = found.get("memory_total_bytes")
    for name in ("memory_used_bytes", "memory_reserved_bytes"):
        if total is not None and found.get(name, 0) > total:
            sieve.drop(name, "out_of_range")
            del found[name]


def _correct_fabric(found: dict[str, Any]) -> None:
    """Leave out what only a GPU that has joined its fabric can say."""
    if found.get("fabric_state") != "completed":
        found.pop("fabric_status", None)
        found.pop("fabric_health_mask", None)
