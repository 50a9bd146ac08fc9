"""A record is a frozen value; what it does not know is not in it."""

import copy
import dataclasses
import inspect

import pytest

from gpuledger import records
from gpuledger.docstrings import class_docstring, field_docstrings
from gpuledger.records import ContainerRef, GpuReading

RECORDS = [
    one for name in records.__all__ if dataclasses.is_dataclass(one := getattr(records, name))
]
each_record = pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)


@each_record
def test_a_record_and_each_of_its_fields_say_what_they_are(record: type) -> None:
    names = [field.name for field in dataclasses.fields(record)]

    assert class_docstring(record)
    assert list(field_docstrings(record)) == names


@each_record
def test_a_record_is_frozen_and_takes_keywords_only(record: type) -> None:
    parameters = inspect.signature(record).parameters.values()

    assert {one.kind for one in parameters} <= {
        inspect.Parameter.KEYWORD_ONLY,
        inspect.Parameter.VAR_KEYWORD,
    }
    assert record.__dataclass_params__.frozen  # type: ignore[attr-defined]  # set by `dataclass`


def test_a_record_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        GpuReading(uuid="u", index=0).index = 1  # type: ignore[misc]  # the mistake that is tested


@each_record
def test_an_optional_field_is_absent_by_default_and_by_nothing_else(record: type) -> None:
    defaults = [f.default for f in dataclasses.fields(record)]

    assert set(defaults) <= {None, dataclasses.MISSING}
    assert all(f.default_factory is dataclasses.MISSING for f in dataclasses.fields(record))


def test_absent_and_none_are_the_same_value() -> None:
    given, left_out = ContainerRef(container_id=None, pod_uid="u"), ContainerRef(pod_uid="u")

    assert given == left_out
    assert hash(given) == hash(left_out)
    assert given.__dict__ == {"pod_uid": "u"}


def test_copies_keep_what_is_absent_absent() -> None:
    reading = GpuReading(uuid="u", index=0, power_watts=1.0)

    for made in (copy.copy(reading), copy.deepcopy(reading), dataclasses.replace(reading)):
        assert made == reading
        assert made.__dict__ == reading.__dict__
    assert dataclasses.replace(reading, power_watts=None).__dict__ == {"uuid": "u", "index": 0}
