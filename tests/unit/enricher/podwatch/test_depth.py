"""JSON is cut below a depth: everything above stays, and invalid JSON stays invalid."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger_enricher.podwatch.decode import cut

VALUES = st.recursive(
    st.none() | st.integers() | st.text(alphabet='ab"{}[]\\,: '),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text('"{]\\'), values),
)


def shallow(value: object, depth: int) -> object:
    match value:
        case dict() | list() if depth == 0:
            return None
        case dict():
            return {name: shallow(one, depth - 1) for name, one in value.items()}
        case list():
            return [shallow(one, depth - 1) for one in value]
        case _:
            return value


@given(value=VALUES, depth=st.integers(1, 4))
def test_deeper_values_become_null_and_everything_else_is_unchanged(
    value: object, depth: int
) -> None:
    found = json.loads(cut(json.dumps(value).encode(), max_depth=depth))
    assert found == shallow(value, depth)


@pytest.mark.parametrize("data", [b"[" * 200_000, b'"' * 200_001, b'{"a":' * 99 + b'"', b"]]]"])
def test_invalid_json_stays_invalid(data: bytes) -> None:
    with pytest.raises(json.JSONDecodeError):
        json.loads(cut(data))
