"""A record is a frozen value, and an unknown field is absent from it."""

import copy
import inspect

import msgspec
import pytest
from msgspec import structs

from gpuledger import records
from gpuledger.codegen import class_docstring, field_docstrings
from gpuledger.records import ContainerRef, GpuReading
from gpuledger.records.base import BaseRecord
from tests.tables import for_each
from tests.unit.record_fields import present_in

RECORDS = [one for name in records.__all__ if issubclass(one := getattr(records, name), BaseRecord)]
each_record = for_each("record", RECORDS)


@each_record
def test_a_record_and_each_of_its_fields_are_documented(record: type[BaseRecord]) -> None:
    names = list(record.__struct_fields__)

    assert class_docstring(record)
    assert list(field_docstrings(record)) == names


@each_record
def test_a_record_is_frozen_and_accepts_keywords_only(record: type[BaseRecord]) -> None:
    parameters = inspect.signature(record).parameters.values()

    assert {parameter.kind for parameter in parameters} <= {
        inspect.Parameter.KEYWORD_ONLY,
        inspect.Parameter.VAR_KEYWORD,
    }
    assert record.__struct_config__.frozen


def test_a_record_cannot_be_changed() -> None:
    with pytest.raises(AttributeError, match="immutable"):
        GpuReading(uuid="u", index=0).index = 1  # type: ignore[misc]  # the mistake that is tested


@each_record
def test_an_optional_field_is_absent_by_default(
    record: type[BaseRecord],
) -> None:
    fields = structs.fields(record)

    assert {field.default for field in fields} <= {None, msgspec.NODEFAULT}
    assert {field.default_factory for field in fields} == {msgspec.NODEFAULT}


def test_absent_and_none_are_the_same_value() -> None:
    given, left_out = ContainerRef(container_id=None, pod_uid="u"), ContainerRef(pod_uid="u")

    assert given == left_out
    assert hash(given) == hash(left_out)
    assert present_in(given) == {"pod_uid": "u"}


def test_a_copy_keeps_absent_fields_absent() -> None:
    reading = GpuReading(uuid="u", index=0, power_milliwatts=1)

    for made in (copy.copy(reading), copy.deepcopy(reading), structs.replace(reading)):
        assert made == reading
        assert present_in(made) == present_in(reading)
    assert present_in(structs.replace(reading, power_milliwatts=None)) == {"uuid": "u", "index": 0}
