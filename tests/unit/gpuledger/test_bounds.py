"""A reading that no hardware can give is not decoded, and the error names its field."""

from collections.abc import Callable, Iterator
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.codec import Decoder, encode, validate
from gpuledger.errors import UndecodableError
from gpuledger.records import GpuEvent, NodeReadings, NodeSample, ProcessRecord
from gpuledger.records.base import BaseRecord
from gpuledger.records.bounds import (
    MAX_BOOTTIME_NS,
    MAX_INTERVAL_NS,
    MAX_INTERVAL_SECONDS,
    MAX_PID,
)
from gpuledger_agent.settings import AgentSettings
from tests.default_topics import SAMPLES
from tests.unit.enricher.join.ticks import process, process_end, reading, sample

REPORTED_BY_NODES = (NodeSample, NodeReadings, ProcessRecord)


def numbers_in(record: type[BaseRecord]) -> Iterator[tuple[str, Any]]:
    """Yield each numeric field of a record and of its parts, with its type."""
    hints = get_type_hints(record, include_extras=True)
    for name in record.__struct_fields__:
        for part in _parts(hints[name]):
            if isinstance(part, type) and issubclass(part, BaseRecord):
                yield from numbers_in(part)
            elif part is float or get_origin(part) is Annotated:
                yield f"{record.__name__}.{name}", part


def _parts(hint: Any) -> Iterator[Any]:  # noqa: ANN401 - any type annotation
    origin = get_origin(hint)
    if origin is None or (origin is Annotated and get_origin(get_args(hint)[0]) is None):
        yield hint
    elif origin is Annotated:  # a list with its length
        yield from _parts(get_args(hint)[0])
    else:
        for part in get_args(hint):
            yield from _parts(part)


@pytest.mark.parametrize("record", REPORTED_BY_NODES)
def test_every_number_that_a_node_reports_is_bounded_on_both_sides(
    record: type[BaseRecord],
) -> None:
    """A float without bounds would accept anything."""
    for name, hint in numbers_in(record):
        kind, limits = get_args(hint) or (hint, msgspec.Meta())
        if kind in {int, float}:
            assert limits.ge is not None, name
            assert limits.le is not None, name


WRONG = [
    ("utilization_ratio", -3.0),
    ("utilization_ratio", 1.0000001),
    ("memory_utilization_ratio", 2.0),
    ("power_milliwatts", -1),
    ("power_milliwatts", 3_000_001),
    ("power_milliwatts", 0.5),
    ("energy_millijoules", -1),
    ("energy_millijoules", 10**12),
    ("energy_total_millijoules", -1),
    ("energy_total_millijoules", 2**62 + 1),
    ("idle_draw_milliwatts", -1),
    ("temperature_celsius", -274),
    ("temperature_celsius", 151),
    ("sm_clock_hertz", 10**12),
    ("memory_total_bytes", 2**49),
    ("tensor_active_ratio", -0.1),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_an_impossible_reading_is_refused_and_named(field: str, value: float) -> None:
    """The same value cannot be encoded, so it does not come from an agent of ours."""
    right, wrong = (sample(gpus=[reading(**{field: one})]) for one in (0, value))
    refuse(_forge(right, wrong), field)


OF_A_TICK = [
    ("interval_ns", lambda value: sample(interval_ns=value), MAX_INTERVAL_NS),
    ("pid", lambda value: sample(processes=[process(pid=value)]), MAX_PID),
    (
        "started_boottime_ns",
        lambda value: sample(processes=[process(started_boottime_ns=value)]),
        MAX_BOOTTIME_NS,
    ),
    ("pid", lambda value: sample(ended_processes=[process_end(pid=value)]), MAX_PID),
    (
        "started_boottime_ns",
        lambda value: sample(ended_processes=[process_end(started_boottime_ns=value)]),
        MAX_BOOTTIME_NS,
    ),
]
SIZES = st.integers(-(2**63), 2**63 - 1)


@pytest.mark.parametrize(("field", "made", "most"), OF_A_TICK)
@given(data=st.data())
def test_a_tick_is_accepted_at_its_bounds_and_beyond_them_rejected_with_the_fields_name(
    field: str, made: Callable[[int], NodeSample], most: int, data: st.DataObject
) -> None:
    value = data.draw(st.one_of(SIZES, st.integers(0, most), st.sampled_from([0, most, most + 1])))
    if 0 <= value <= most:
        tick = made(value)
        assert Decoder(topic=SAMPLES.name, record=NodeSample).decode(encode(tick)) == tick
    else:
        refuse(_forge(made(0), made(value)), field)


@pytest.mark.parametrize("record", [GpuEvent, NodeReadings])
def test_records_derived_from_a_tick_have_the_bounds_of_its_interval(record: type) -> None:
    hints = dict(numbers_in(record))
    (limits,) = get_args(hints[f"{record.__name__}.interval_ns"])[1:]
    assert (limits.ge, limits.le) == (0, MAX_INTERVAL_NS)


def test_no_agent_can_be_configured_to_make_a_tick_longer_than_the_bound() -> None:
    """If no GPU answers, the agent waits that long, and one tick covers all of it."""
    longest_seconds = sum(
        _maximum(AgentSettings, name) for name in ("watchdog_seconds", "sampling_interval_seconds")
    )
    assert longest_seconds < MAX_INTERVAL_SECONDS


UNBOUNDED = {
    # Positions, checked against their tables when the tick is booked.
    "GpuProcess.gpu",
    "GpuProcess.container",
    "ProcessExit.gpu",
    "ProcessExit.container",
    # Wall-clock times, because anyone can set a clock.
    "NodeSample.time_ns",
    "ProcessExit.from_time_ns",
    "ProcessExit.until_time_ns",
}


def test_the_fields_of_a_tick_that_may_be_any_number_are_known() -> None:
    wide = {name for name, hint in numbers_in(NodeSample) if _limit(hint) == 2**63 - 1}
    assert wide == UNBOUNDED


def _limit(hint: Any) -> float | None:  # noqa: ANN401 - any type annotation
    return next((note.le for note in get_args(hint)[1:] if isinstance(note, msgspec.Meta)), None)


def _maximum(settings: type, name: str) -> float:
    found = _limit(get_type_hints(settings, include_extras=True)[name])
    assert found is not None
    return found


@pytest.mark.parametrize("written", [b"1e999", b"-1e999", b"NaN", b"Infinity"])
def test_a_number_that_is_not_finite_is_refused(written: bytes) -> None:
    """Also if it is written as a number too large for a float."""
    right = encode(sample(gpus=[reading(tensor_active_ratio=0.725)]))
    assert right.count(b"0.725") == 1
    with pytest.raises(UndecodableError):
        Decoder(topic=SAMPLES.name, record=NodeSample).decode(right.replace(b"0.725", written))


def test_the_reported_use_of_a_process_is_bounded_too() -> None:
    """In a tick and at the end of the process."""
    right = sample(processes=[process(sm_utilization_ratio=0.0)])
    refuse(_forge(right, sample(processes=[process(sm_utilization_ratio=-3.0)])), "sm_utilization")
    right = sample(ended_processes=[process_end(busy_ns=0)])
    refuse(_forge(right, sample(ended_processes=[process_end(busy_ns=-1)])), "busy_ns")


def refuse(value: bytes, field: str) -> None:
    """Decode the record and check that the error names the field."""
    with pytest.raises(UndecodableError, match=field):
        Decoder(topic=SAMPLES.name, record=NodeSample).decode(value)


def _forge(right: NodeSample, wrong: NodeSample) -> bytes:
    """Return a record that our encoder rejects; the valid one passes."""
    validate(right)
    with pytest.raises(msgspec.ValidationError):
        validate(wrong)
    return encode(wrong)
