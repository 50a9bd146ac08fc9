"""Remote-write 1.0 and 2.0 as protobuf itself reads it: the reference for the encoder.

The messages are those of prometheus/prometheus `prompb/remote.proto`, `prompb/types.proto` and
`prompb/io/prometheus/write/v2/types.proto`, as far as a sender of samples uses them.
"""

from typing import Any, NamedTuple

import cramjam
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_FIELD = descriptor_pb2.FieldDescriptorProto
_Fields = list[tuple[str, int, int, str | None, bool]]
_MESSAGES: dict[str, _Fields] = {
    "WriteRequest": [
        ("timeseries", 1, _FIELD.TYPE_MESSAGE, "TimeSeries", True),
        ("metadata", 3, _FIELD.TYPE_MESSAGE, "MetricMetadata", True),
    ],
    "TimeSeries": [
        ("labels", 1, _FIELD.TYPE_MESSAGE, "Label", True),
        ("samples", 2, _FIELD.TYPE_MESSAGE, "Sample", True),
    ],
    "Label": [
        ("name", 1, _FIELD.TYPE_STRING, None, False),
        ("value", 2, _FIELD.TYPE_STRING, None, False),
    ],
    "Sample": [
        ("value", 1, _FIELD.TYPE_DOUBLE, None, False),
        ("timestamp", 2, _FIELD.TYPE_INT64, None, False),
    ],
    "MetricMetadata": [
        ("type", 1, _FIELD.TYPE_INT32, None, False),
        ("metric_family_name", 2, _FIELD.TYPE_STRING, None, False),
        ("help", 4, _FIELD.TYPE_STRING, None, False),
        ("unit", 5, _FIELD.TYPE_STRING, None, False),
    ],
}
_MESSAGES_V2: dict[str, _Fields] = {
    "Request": [
        ("symbols", 4, _FIELD.TYPE_STRING, None, True),
        ("timeseries", 5, _FIELD.TYPE_MESSAGE, "TimeSeries", True),
    ],
    "TimeSeries": [
        ("labels_refs", 1, _FIELD.TYPE_UINT32, None, True),
        ("samples", 2, _FIELD.TYPE_MESSAGE, "Sample", True),
        ("metadata", 5, _FIELD.TYPE_MESSAGE, "Metadata", False),
    ],
    "Sample": [
        ("value", 1, _FIELD.TYPE_DOUBLE, None, False),
        ("timestamp", 2, _FIELD.TYPE_INT64, None, False),
        ("start_timestamp", 3, _FIELD.TYPE_INT64, None, False),
    ],
    "Metadata": [
        ("type", 1, _FIELD.TYPE_INT32, None, False),
        ("help_ref", 3, _FIELD.TYPE_UINT32, None, False),
        ("unit_ref", 4, _FIELD.TYPE_UINT32, None, False),
    ],
}
KINDS = ("unknown", "counter", "gauge")


class Described(NamedTuple):
    """The metadata of a metric."""

    kind: str
    help: str
    unit: str


class Series(NamedTuple):
    """One series of a request, with its one sample."""

    labels: tuple[tuple[str, str], ...]
    value: float
    time_ms: int

    @property
    def name(self) -> str:
        return dict(self.labels)["__name__"]

    def label(self, name: str) -> str | None:
        return dict(self.labels).get(name)


class SeriesV2(NamedTuple):
    """The fields that 2.0 adds to a series."""

    series: Series
    start_ms: int
    described: Described


def _message(package: str, messages: dict[str, _Fields], root: str) -> Any:  # noqa: ANN401  # a class made at run time
    file = descriptor_pb2.FileDescriptorProto(name=package, package=package, syntax="proto3")
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for field, number, kind, of, repeated in fields:
            label = _FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL
            made = message.field.add(name=field, number=number, type=kind, label=label)
            if of is not None:
                made.type_name = f".{package}.{of}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{root}"))


WriteRequest = _message("prom", _MESSAGES, "WriteRequest")
RequestV2 = _message("v2", _MESSAGES_V2, "Request")


def parse(body: bytes) -> list[Series]:
    """Parse a request of 1.0 as protobuf does; each series must have exactly one sample."""
    series = []
    for one in WriteRequest.FromString(body).timeseries:
        (sample,) = one.samples
        labels = tuple((label.name, label.value) for label in one.labels)
        series.append(Series(labels, sample.value, sample.timestamp))
    return series


def parse_metadata(body: bytes) -> dict[str, Described]:
    """Parse the metadata of a request of 1.0."""
    reported = WriteRequest.FromString(body).metadata
    return {
        one.metric_family_name: Described(KINDS[one.type], one.help, one.unit) for one in reported
    }


def parse_v2(body: bytes) -> list[SeriesV2]:
    """Parse a request of 2.0 as protobuf does; each series must have exactly one sample."""
    request, found = RequestV2.FromString(body), []
    symbols = list(request.symbols)
    for one in request.timeseries:
        (sample,) = one.samples
        strings = [symbols[reference] for reference in one.labels_refs]
        labels = tuple(zip(strings[::2], strings[1::2], strict=True))
        reported = one.metadata
        described = Described(
            KINDS[reported.type], symbols[reported.help_ref], symbols[reported.unit_ref]
        )
        series = Series(labels, sample.value, sample.timestamp)
        found.append(SeriesV2(series, sample.start_timestamp, described))
    return found


def decompress(body: bytes) -> bytes:
    return bytes(cramjam.snappy.decompress_raw(body))


def parse_compressed(body: bytes) -> list[Series]:
    """Parse a request's series, whichever version it is of."""
    plain = decompress(body)
    # Field 4 is the first of every request of 2.0, and none of 1.0.
    return [one.series for one in parse_v2(plain)] if plain[:1] == b"\x22" else parse(plain)
