"""Export requests as any receiver reads them, by the official classes."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue


@dataclass(frozen=True, kw_only=True)
class Point:
    """One data point with all that it is a point of."""

    resource: frozenset[tuple[str, str]]
    name: str
    unit: str
    is_sum: bool
    attributes: frozenset[tuple[str, str]]
    time_ns: int
    value: float

    def attribute(self, name: str) -> str | None:
        return dict(self.attributes | self.resource).get(name)


def points_of(values: Iterable[bytes]) -> list[Point]:
    return [
        point
        for value in values
        for point in points_in(ExportMetricsServiceRequest.FromString(value))
    ]


def points_in(request: ExportMetricsServiceRequest) -> Iterator[Point]:
    for of_resource in request.resource_metrics:
        for scope in of_resource.scope_metrics:
            for metric in scope.metrics:
                is_sum = metric.HasField("sum")
                data = metric.sum if is_sum else metric.gauge
                for point in data.data_points:
                    yield Point(
                        resource=_texts(of_resource.resource.attributes),
                        name=metric.name,
                        unit=metric.unit,
                        is_sum=is_sum,
                        attributes=_texts(point.attributes),
                        time_ns=point.time_unix_nano,
                        value=point.as_double,
                    )


def _texts(attributes: Iterable[KeyValue]) -> frozenset[tuple[str, str]]:
    pairs = [(one.key, one.value.string_value) for one in attributes]
    assert len({key for key, _ in pairs}) == len(pairs), "an attribute comes twice"
    return frozenset(pairs)
