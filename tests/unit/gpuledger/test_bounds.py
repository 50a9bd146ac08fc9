"""No reading beyond what hardware does is decoded, and the error names its field."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
import pytest

from gpuledger.codec import Decoder, encode
from gpuledger.errors import UndecodableError
from gpuledger.records import NodeReadings, NodeSample, ProcessRecord
from gpuledger.records.base import is_array
from gpuledger.topics import SAMPLES
from tests.unit.enricher.join.ticks import process, process_end, reading, sample

SAID_BY_NODES = (NodeSample, NodeReadings, ProcessRecord)


def numbers_in(record: type) -> Iterator[tuple[str, Any]]:
    """Yield each field of a record, or of a part of it, that is a number, with its type."""
    hints = get_type_hints(record, include_extras=True)
    for field in fields(record):
        for part in _parts(hints[field.name]):
            if is_dataclass(part):
                yield from numbers_in(part)  # type: ignore[arg-type]  # a class, not an instance
            elif part is float or get_origin(part) is Annotated:
                yield f"{record.__name__}.{field.name}", part


def _parts(hint: Any) -> Iterator[Any]:  # noqa: ANN401 - any type annotation
    if get_origin(hint) is None or get_origin(hint) is Annotated:
        yield hint
    else:
        for part in get_args(hint):
            yield from _parts(part)


@pytest.mark.parametrize("record", SAID_BY_NODES)
def test_every_number_that_a_node_says_is_bounded_on_both_sides(record: type) -> None:
    """A float without bounds would take anything."""
    for name, hint in numbers_in(record):
        kind, limits = get_args(hint) or (hint, msgspec.Meta())
        if kind in {int, float}:
            assert limits.ge is not None, name
            assert limits.le is not None, name


WRONG = [
    ("utilization_ratio", -3.0),
    ("utilization_ratio", 1.0000001),
    ("memory_utilization_ratio", 2.0),
    ("power_watts", -5.0),
    ("power_watts", 3001.0),
    ("energy_joules", -1e-9),
    ("energy_joules", 1e9),
    ("energy_total_joules", -1.0),
    ("temperature_celsius", -274),
    ("temperature_celsius", 151),
    ("sm_clock_hertz", 10**12),
    ("memory_total_bytes", 2**49),
    ("tensor_active_ratio", -0.1),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_reading_that_no_hardware_gives_is_refused_by_its_name(field: str, value: float) -> None:
    """Whoever wrote it; the same value cannot be encoded, so that no agent sends it."""
    right, wrong = (sample(gpus=[reading(**{field: one})]) for one in (0, value))
    refuse(_forge(right, wrong), field)


@pytest.mark.parametrize("written", [b"1e999", b"-1e999", b"NaN", b"Infinity"])
def test_what_is_no_finite_number_is_refused(written: bytes) -> None:
    """Also where it is spelt as a number that no float holds."""
    right = encode(sample(gpus=[reading(power_watts=7.25)]))
    assert right.count(b"7.25") == 1
    with pytest.raises(UndecodableError):
        Decoder(topic=SAMPLES.name, record=NodeSample).decode(right.replace(b"7.25", written))


def test_what_processes_are_said_to_have_used_is_bounded_too() -> None:
    """In a tick and at an end."""
    right = sample(processes=[process(sm_utilization_ratio=0.0)])
    refuse(_forge(right, sample(processes=[process(sm_utilization_ratio=-3.0)])), "sm_utilization")
    right = sample(ended_processes=[process_end(busy_seconds=0.0)])
    refuse(_forge(right, sample(ended_processes=[process_end(busy_seconds=-1.0)])), "busy_seconds")


def refuse(value: bytes, field: str) -> None:
    """Have it decoded, and see that the error names the field."""
    with pytest.raises(UndecodableError, match=field):
        Decoder(topic=SAMPLES.name, record=NodeSample).decode(value)


def _forge(right: NodeSample, wrong: NodeSample) -> bytes:
    """Return what no encoder of ours writes; the right one it does write."""
    assert encode(right)
    with pytest.raises(msgspec.ValidationError):
        encode(wrong)
    return msgspec.json.encode(_as_written(wrong))


def _as_written(value: Any) -> Any:  # noqa: ANN401 - any part of a record
    """Return a record as its plain JSON, arrays where records are written so."""
    if is_dataclass(value):
        named = {one.name: _as_written(getattr(value, one.name)) for one in fields(value)}
        if is_array(type(value)):
            return list(named.values())
        return {name: one for name, one in named.items() if one is not None}
    return [_as_written(one) for one in value] if isinstance(value, list) else value
