"""The encoder, held against protobuf."""

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinks.remote_write.active_series import (
    STALE_VALUE,
    pack_value,
    series_prefix,
    timestamp_suffix,
    varint,
)
from tests.unit.sinks.remote_write.oracle import Series, WriteRequest, parse

FIRST_MS, LAST_MS = 2**35, 2**42 - 1
names = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,20}", fullmatch=True)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)
samples = st.tuples(
    st.dictionaries(names, texts, max_size=12),
    st.floats(allow_nan=False),
    st.integers(FIRST_MS, LAST_MS),
)


@given(st.lists(samples, max_size=5))
def test_protobuf_reads_what_was_encoded(wanted: list[tuple[dict[str, str], float, int]]) -> None:
    body = b"".join(
        series_prefix(labels.items()) + pack_value(value) + timestamp_suffix(time_ms)
        for labels, value, time_ms in wanted
    )

    assert parse(body) == [
        Series(tuple(sorted((n, v) for n, v in labels.items() if v)), value, time_ms)
        for labels, value, time_ms in wanted
    ]
    # Byte for byte too: nothing is encoded in a longer form than protobuf's own.
    assert WriteRequest.FromString(body).SerializeToString(deterministic=True) == body or any(
        value == 0 and math.copysign(1, value) > 0 for _, value, _ in wanted
    )


def test_labels_are_sorted_by_name_and_empty_values_left_out() -> None:
    body = series_prefix([("pod", "p"), ("__name__", "m"), ("container", "")])

    (series,) = parse(body + pack_value(1.0) + timestamp_suffix(FIRST_MS))

    assert series.labels == (("__name__", "m"), ("pod", "p"))


def test_a_label_that_comes_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="a label comes twice"):
        series_prefix([("a", "1"), ("a", "2")])


@pytest.mark.parametrize("time_ms", [-1, 0, FIRST_MS - 1, LAST_MS + 1])
def test_a_time_that_would_not_fill_its_bytes_is_refused(time_ms: int) -> None:
    with pytest.raises(ValueError, match="not between 1971 and 2109"):
        timestamp_suffix(time_ms)


def test_a_stale_marker_is_prometheus_own_nan_to_the_bit() -> None:
    assert struct.unpack("<Q", STALE_VALUE) == (0x7FF0000000000002,)


@pytest.mark.parametrize(
    ("number", "encoded"), [(0, "00"), (127, "7f"), (128, "8001"), (300, "ac02")]
)
def test_varints_are_those_of_protobuf(number: int, encoded: str) -> None:
    assert varint(number).hex() == encoded
