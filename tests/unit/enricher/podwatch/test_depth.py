"""JSON that is cut below a depth: all above it stays, and what is no JSON becomes none."""

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
def test_what_lies_deeper_is_null_and_all_else_is_as_it_was(value: object, depth: int) -> None:
    found = json.loads(cut(json.dumps(value).encode(), max_depth=depth))
    assert found == shallow(value, depth)


@pytest.mark.parametrize("data", [b"[" * 200_000, b'"' * 200_001, b'{"a":' * 99 + b'"', b"]]]"])
def test_what_is_no_json_is_none_afterwards(data: bytes) -> None:
    with pytest.raises(json.JSONDecodeError):
        json.loads(cut(data))
