"""Protobuf's own reading of remote-write 1.0: what the encoder is held against.

The messages are those of prometheus/prometheus `prompb/remote.proto` and `prompb/types.proto`,
as far as a sender of samples uses them.
"""

from typing import Any, NamedTuple

import cramjam
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_FIELD = descriptor_pb2.FieldDescriptorProto
_MESSAGES: dict[str, list[tuple[str, int, int, str | None, bool]]] = {
    "WriteRequest": [("timeseries", 1, _FIELD.TYPE_MESSAGE, "TimeSeries", True)],
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
}


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


def _write_request() -> Any:  # noqa: ANN401  # a class made at run time
    file = descriptor_pb2.FileDescriptorProto(name="remote.proto", package="prom", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind, of, repeated in fields:
            label = _FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL
            made = message.field.add(name=field, number=number, type=kind, label=label)
            if of is not None:
                made.type_name = f".prom.{of}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("prom.WriteRequest"))


WriteRequest = _write_request()


def parse(body: bytes) -> list[Series]:
    """Parse a request body as protobuf does; each series must have exactly one sample."""
    series = []
    for one in WriteRequest.FromString(body).timeseries:
        (sample,) = one.samples
        labels = tuple((label.name, label.value) for label in one.labels)
        series.append(Series(labels, sample.value, sample.timestamp))
    return series


def parse_compressed(body: bytes) -> list[Series]:
    return parse(bytes(cramjam.snappy.decompress_raw(body)))
