"""The agent's limits of plausible values fit into the records, which use the same table."""

from typing import get_args, get_type_hints

import msgspec

from gpuledger.records import GpuDetails, GpuReading
from gpuledger_agent.core.readings import converter
from gpuledger_agent.gpu.nvidia.catalogue import CATALOGUE, MetricSpec
from tests.tables import for_each

ALL = [
    reading for readings in CATALOGUE.values() for reading in readings if not reading.unit.choices
]


def field_type(name: str) -> object:
    """Return the type of a reading's field, which may be in a nested record."""
    *parts, field = name.split(".")
    of: object = GpuReading if field in get_type_hints(GpuReading) and not parts else GpuDetails
    for part in parts:
        (of,) = (
            argument
            for argument in get_args(get_type_hints(of)[part])
            if argument is not type(None)
        )
    hints = get_type_hints(of, include_extras=True)
    return hints[field]


@for_each("requested", ALL)
def test_the_limits_of_each_reading_fit_in_its_field(requested: MetricSpec) -> None:
    """As a single value, in a list or by link, whichever the field has."""
    kind = field_type(requested.name)
    for value in (requested.unit.low, requested.unit.high):
        made = converter(requested.unit)(value)
        assert any(is_taken(shape, kind) for shape in (made, [made], {"0": made}, {"0": [made]})), (
            made
        )


def is_taken(value: object, kind: object) -> bool:
    """Return whether a field of this type accepts a value."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True
