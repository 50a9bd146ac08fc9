"""The encoder, compared with protobuf."""

import math
import struct
from collections.abc import Iterable
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.ledger.families import FAMILIES
from gpuledger_sinks.remote_write.active_series import metrics_of
from gpuledger_sinks.remote_write.wire import (
    STALE_VALUE,
    LabelSet,
    Metric,
    MetricSet,
    SampleGroup,
    TimedSamples,
    Version,
    encode_metadata,
    encode_request,
    encode_start,
    encode_time,
    encode_value,
    varint,
)
from tests.unit.sinks.remote_write.oracle import (
    KINDS,
    Described,
    RequestV2,
    Series,
    SeriesV2,
    WriteRequest,
    parse,
    parse_metadata,
    parse_v2,
)

FIRST_MS, LAST_MS = 2**35, 2**42 - 1
# Names that sort before and after `__name__`, which no label of a series may be.
names = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,20}", fullmatch=True).filter("__name__".__ne__)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)
times = st.integers(FIRST_MS, LAST_MS)
metrics = st.builds(
    Metric,
    name=st.sampled_from(["a", "b_bytes", "c_joules_total"]),
    kind=st.sampled_from(KINDS),
    help=texts,
)


class Given(NamedTuple):
    """A metric, its value and the start of its series; both may be absent."""

    metric: Metric
    value: float | None
    start_ms: int | None


samples = st.builds(
    Given,
    metrics,
    st.none() | st.floats(allow_nan=False),
    st.none() | times,
)
groups = st.tuples(
    st.dictionaries(names, texts, max_size=12),
    st.lists(samples, max_size=3, unique_by=lambda g: g.metric.name),
)
ticks = st.lists(st.tuples(times, st.lists(groups, max_size=3)), max_size=4)
Ticks = list[tuple[int, list[tuple[dict[str, str], list[Given]]]]]


def timed(wanted: Ticks) -> Iterable[TimedSamples]:
    for time_ms, things in wanted:
        groups, values = list[SampleGroup](), list[bytes]()
        for labels, of_thing in things:
            present = [(g, g.value) for g in of_thing if g.value is not None]
            for has_start in (False, True):
                chosen = [(g, v) for g, v in present if (g.start_ms is not None) == has_start]
                if chosen:
                    starts = [encode_start(g.start_ms) for g, _ in chosen] if has_start else None
                    metric_set = MetricSet(g.metric for g, _ in chosen)
                    groups.append(SampleGroup(LabelSet(labels.items()), metric_set, starts))
                    values += [encode_value(value) for _, value in chosen]
        yield TimedSamples(encode_time(time_ms), groups, values)


def in_order(of_thing: list[Given]) -> list[Given]:
    """Return the series without a start, followed by those with one."""
    return sorted(of_thing, key=lambda g: g.start_ms is not None)


def expected(wanted: Ticks) -> list[SeriesV2]:
    """Return the expected series, by the rules of the protocol."""
    found = []
    for time_ms, things in wanted:
        for labels, of_thing in things:
            for metric, value, start_ms in in_order(of_thing):
                if value is None:
                    continue
                pairs = {**labels, "__name__": metric.name}.items()
                series = Series(tuple(sorted(p for p in pairs if p[1])), value, time_ms)
                described = Described(metric.kind, metric.help, metric.unit)
                found.append(SeriesV2(series, start_ms or 0, described))
    return found


def has_zero(wanted: Ticks) -> bool:
    """Return whether a value is 0, which protobuf omits and the encoder writes."""
    values = [one.series.value for one in expected(wanted)]
    return any(value == 0 and math.copysign(1, value) > 0 for value in values)


@given(ticks)
def test_protobuf_reads_encoded_requests_of_1_0(wanted: Ticks) -> None:
    body = encode_request(Version.V1, timed(wanted))

    assert parse(body) == [one.series for one in expected(wanted)]
    # Equal bytes too: nothing is encoded in a longer form than protobuf's own.
    again = WriteRequest.FromString(body).SerializeToString(deterministic=True)
    assert again == body or has_zero(wanted)


@given(ticks)
def test_protobuf_reads_encoded_requests_of_2_0(wanted: Ticks) -> None:
    body = encode_request(Version.V2, timed(wanted))

    assert parse_v2(body) == expected(wanted)
    again = RequestV2.FromString(body).SerializeToString(deterministic=True)
    assert again == body or has_zero(wanted)


@given(ticks)
def test_samples_have_the_same_bytes_whatever_version_they_were_encoded_in_before(
    wanted: Ticks,
) -> None:
    """A receiver may switch to the other version while samples wait for it."""
    given_samples = list(timed(wanted))
    labels = [group.labels for one in given_samples for group in one.groups]

    made = [
        (encode_request(version, given_samples), sum(one.size_bytes for one in labels))
        for version in (Version.V2, Version.V1, Version.V2, Version.V1)
    ]

    assert made[:2] == made[2:]
    assert made[0][1] == made[1][1]


@given(ticks)
def test_duty_20_symbols_start_with_the_empty_string_and_contain_each_used_string_once(
    wanted: Ticks,
) -> None:
    symbols = list(RequestV2.FromString(encode_request(Version.V2, timed(wanted))).symbols)

    used = {""}
    for series, _, described in expected(wanted):
        used |= {text for label in series.labels for text in label}
        used |= {described.help, described.unit}
    assert symbols[0] == ""
    assert len(set(symbols)) == len(symbols)
    assert set(symbols) == used


@given(ticks)
def test_duty_20_references_are_to_symbols_and_in_pairs(wanted: Ticks) -> None:
    request = RequestV2.FromString(encode_request(Version.V2, timed(wanted)))

    for series in request.timeseries:
        references = [*series.labels_refs, series.metadata.help_ref, series.metadata.unit_ref]
        assert max(references) < len(request.symbols)
        assert len(series.labels_refs) % 2 == 0


@given(ticks)
def test_duty_21_each_series_has_a_sample(wanted: Ticks) -> None:
    for request, version in ((WriteRequest, Version.V1), (RequestV2, Version.V2)):
        body = encode_request(version, timed(wanted))
        assert [len(one.samples) for one in request.FromString(body).timeseries] == [1] * len(
            expected(wanted)
        )


def one_series(labels: Iterable[tuple[str, str]], value: bytes) -> list[TimedSamples]:
    metrics = MetricSet([Metric(name="m", kind="gauge", help="What.")])
    group = SampleGroup(LabelSet(labels), metrics)
    return [TimedSamples(encode_time(FIRST_MS), [group], [value])]


def test_duty_9_labels_are_sorted_by_name_and_empty_values_omitted() -> None:
    wanted = one_series([("pod", "p"), ("Replica", "r"), ("container", "")], encode_value(1.0))

    (first,) = parse(encode_request(Version.V1, wanted))
    (second,) = parse_v2(encode_request(Version.V2, wanted))

    sorted_labels = (("Replica", "r"), ("__name__", "m"), ("pod", "p"))
    assert first.labels == second.series.labels == sorted_labels


@pytest.mark.parametrize("labels", [[("a", "1"), ("a", "2")], [("__name__", "m")]])
def test_duty_9_a_repeated_label_is_rejected(labels: list[tuple[str, str]]) -> None:
    with pytest.raises(ValueError, match="duplicate label"):
        LabelSet(labels)


def test_duty_10_invalid_utf_8_is_rejected_before_it_is_sent() -> None:
    with pytest.raises(ValueError, match="surrogates not allowed"):
        LabelSet([("a", "\ud800")])


@pytest.mark.parametrize("encode", [encode_time, encode_start])
@pytest.mark.parametrize("time_ms", [-1, 0, FIRST_MS - 1, LAST_MS + 1])
def test_duty_7_a_time_outside_the_encoded_range_is_rejected(encode: object, time_ms: int) -> None:
    with pytest.raises(ValueError, match="not between 1971 and 2109"):
        encode(time_ms)  # type: ignore[operator]  # one of the two


def test_duty_18_a_stale_marker_equals_the_nan_of_prometheus_bit_by_bit() -> None:
    wanted = one_series([], STALE_VALUE)
    assert struct.unpack("<Q", STALE_VALUE) == (0x7FF0000000000002,)
    for version in Version:
        assert STALE_VALUE in encode_request(version, wanted)


def test_duty_23_a_series_without_a_start_has_no_start_field() -> None:
    (series,) = parse_v2(encode_request(Version.V2, one_series([], encode_value(1.0))))
    assert series.start_ms == 0


@pytest.mark.parametrize(
    ("number", "encoded"), [(0, "00"), (127, "7f"), (128, "8001"), (300, "ac02")]
)
def test_varints_equal_those_of_protobuf(number: int, encoded: str) -> None:
    assert varint(number).hex() == encoded


def test_a_negative_number_is_rejected() -> None:
    with pytest.raises(ValueError, match="-1 is negative"):
        varint(-1)


@given(st.lists(metrics, max_size=5, unique_by=lambda metric: metric.name))
def test_protobuf_reads_encoded_metadata(reported: list[Metric]) -> None:
    body = encode_metadata(reported)

    assert parse_metadata(body) == {
        metric.name: Described(metric.kind, metric.help, metric.unit) for metric in reported
    }
    assert WriteRequest.FromString(body).SerializeToString(deterministic=True) == body


WITHOUT = ("_info", "_up", "_requested")
"""Suffixes of metrics without a unit: values of 1 or 0, and amounts in their own units."""


@pytest.mark.parametrize("metric", [one for family in FAMILIES for one in metrics_of(family)])
def test_duty_22_every_metric_has_a_type_a_help_and_a_unit(metric: Metric) -> None:
    assert metric.kind in KINDS[1:]
    assert metric.help
    assert metric.name.removesuffix("_total").endswith(
        f"_{metric.unit}" if metric.unit else WITHOUT
    )
