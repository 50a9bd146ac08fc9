"""An event to OTLP: the series that the remote-write sink sends, as export requests.

Here lives that transformation, by the official classes. Pure; a request is a function of the event
alone, so that an event that is read again makes the same bytes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import cache, lru_cache
from math import ceil
from typing import Final

from google.protobuf.json_format import MessageToJson
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AGGREGATION_TEMPORALITY_CUMULATIVE,
    Metric,
    NumberDataPoint,
    ScopeMetrics,
)
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from gpuledger import __version__
from gpuledger.bus.limits import MAX_MESSAGE_BYTES
from gpuledger.bus.protocol import Bus, WholeBus
from gpuledger.clock import Clock
from gpuledger.keys import node_key
from gpuledger.ledger.families import Family
from gpuledger.ledger.hardware import HardwareSeries
from gpuledger.ledger.series import SeriesGroup, SeriesValues, values_of
from gpuledger.records import GpuEvent
from gpuledger.runtime import Readiness
from gpuledger_sinks import otlp_names as naming
from gpuledger_sinks.kafka_redelivery import KafkaRedelivery, open_kafka_redelivery
from gpuledger_sinks.kafka_sink import KafkaSink, open_kafka_sink
from gpuledger_sinks.registry import OTLP
from gpuledger_sinks.settings import Encoding, OtlpSettings

Names = tuple[tuple[str, str], ...]
_SCOPE: Final = InstrumentationScope(name="gpuledger", version=__version__)
_MAX_IN_MESSAGE: Final = 2_048
"""Groups that are encoded at once: so many have more bytes than a message, whatever their names."""
_MAX_KNOWN: Final = 16_384
"""How many groups are remembered, at some 2 KB each, and 5 KB at most, as names and ids are bounded
(`gpuledger.records.bounds`): 80 MB. What is forgotten is made again."""


class ExportRequests:
    """Makes the export requests of events, in one encoding."""

    def __init__(
        self, *, encoding: Encoding, attributes: Mapping[str, str], hw_names: bool = False
    ) -> None:
        self._encode = _ENCODINGS[encoding]
        self._attributes = tuple(attributes.items())
        self._hardware = HardwareSeries() if hw_names else None

    def of(self, event: GpuEvent) -> list[bytes]:
        """Return the event's requests: one, or as many as it takes for each to fit in a message.

        Raises ValueError where an entry names a container or a holder that the event does not list.
        """
        # The key's length counts as well.
        max_bytes = MAX_MESSAGE_BYTES - len(node_key(event).encode())
        groups = [
            (group, values)
            for group, values in values_of(event).items()
            if not group.family.is_description
        ]
        if self._hardware is not None:
            groups += self._hardware.values_of(event).items()
        return self._split(event, groups, max_bytes)

    def _split(
        self, event: GpuEvent, groups: Sequence[tuple[SeriesGroup, SeriesValues]], max_bytes: int
    ) -> list[bytes]:
        parts = ceil(len(groups) / _MAX_IN_MESSAGE)
        if parts <= 1:
            value = self._encode(self._request(event, groups))
            if len(value) <= max_bytes or len(groups) == 1:
                return [value]
            parts = min(len(groups), len(value) // max_bytes + 1)
        size = ceil(len(groups) / parts)
        return [
            value
            for begin in range(0, len(groups), size)
            for value in self._split(event, groups[begin : begin + size], max_bytes)
        ]

    def _request(
        self, event: GpuEvent, groups: Iterable[tuple[SeriesGroup, SeriesValues]]
    ) -> ExportMetricsServiceRequest:
        request = ExportMetricsServiceRequest()
        by_resource: dict[Names, _Points] = {}
        of_node, owners = _node_names(event), _owners(event)
        for group, values in groups:
            names = _resource_names(event.cluster, event.node, group, owners.get(_pod_uid(group)))
            points = by_resource.get(names)
            if points is None:
                added = request.resource_metrics.add(
                    resource=Resource(attributes=_attributes((*names, *of_node, *self._attributes)))
                )
                points = by_resource[names] = _Points(added.scope_metrics.add(scope=_SCOPE))
            points.add(group, values, time_ns=event.time_ns)
        return request


class _Points:
    """The points of one resource, each put to those of its metric."""

    def __init__(self, into: ScopeMetrics) -> None:
        self._into = into
        self._points: dict[str, Metric] = {}

    def add(self, group: SeriesGroup, values: SeriesValues, *, time_ns: int) -> None:
        constant = _constant_part(group)
        for instrument, value in zip(_instruments_of(group.family), values, strict=True):
            if value is None:
                continue  # what was not measured is absent, never zero
            metric = self._points.get(instrument.name)
            if metric is None:
                metric = self._points[instrument.name] = self._into.metrics.add(
                    name=instrument.name,
                    unit=instrument.unit,
                    description=instrument.description,
                )
                if instrument.is_sum:
                    # Cumulative, as the driver's counters and Prometheus' are: no state is kept
                    # here from which a difference could be made after a restart.
                    metric.sum.is_monotonic = instrument.is_counter
                    metric.sum.aggregation_temporality = AGGREGATION_TEMPORALITY_CUMULATIVE
            data = metric.sum if instrument.is_sum else metric.gauge
            point = data.data_points.add(time_unix_nano=time_ns, as_double=value)
            # The attributes are the same from tick to tick: encoded once, they are merged here
            # rather than set one by one.
            point.MergeFromString(constant)


@cache
def _instruments_of(family: Family) -> tuple[naming.Instrument, ...]:
    return tuple(map(naming.instrument_of, family.metrics))


@lru_cache(maxsize=_MAX_KNOWN)
def _constant_part(group: SeriesGroup) -> bytes:
    """Encode what all points of a group share, from tick to tick: their attributes."""
    names = _named(group, naming.NAMES_ON_POINTS)
    if "gpu_uuid" in group.family.labels:
        names = (*names, naming.HARDWARE)
    return NumberDataPoint(attributes=_attributes(names)).SerializeToString()


@lru_cache(maxsize=_MAX_KNOWN)
def _resource_names(
    cluster: str, node: str, group: SeriesGroup, owner: tuple[str, str] | None
) -> Names:
    """Return the attributes of the container's, or of the node's, resource."""
    names = _named(group, naming.RESOURCE_ATTRIBUTES)
    given = dict(names)
    whose = (given.get("k8s.pod.uid"), given.get("k8s.container.name"))
    instance = "/".join(part for part in (cluster, node, *whose) if part)
    return (
        (naming.SERVICE, "gpuledger"),
        (naming.INSTANCE, instance),
        (naming.CLUSTER, cluster),
        (naming.NODE, node),
        *names,
        *(_owner_names(*owner) if owner else ()),
    )


def _owner_names(kind: str, name: str) -> Names:
    by_kind = ((naming.OWNERS[kind], name),) if name and kind in naming.OWNERS else ()
    said = ((naming.OWNER_KIND, kind), (naming.OWNER_NAME, name))
    return (*(pair for pair in said if pair[1]), *by_kind)


def _pod_uid(group: SeriesGroup) -> str:
    labels = group.family.labels
    return group.label_values[labels.index("pod_uid")] if "pod_uid" in labels else ""


def _owners(event: GpuEvent) -> dict[str, tuple[str, str]]:
    """Return kind and name of each pod's workload, by the pod's UID."""
    return {
        pod.uid: (pod.owner_kind or "", pod.owner_name or "")
        for pod in event.pods
        if pod.uid is not None
    }


def _node_names(event: GpuEvent) -> Names:
    """Return the attributes that say what the node is; none where nothing is known of it."""
    said = event.node_description
    return tuple(
        (name, value)
        for name, field in naming.NODE_ATTRIBUTES.items()
        if said is not None and (value := getattr(said, field)) is not None
    )


def _named(group: SeriesGroup, names: Mapping[str, str]) -> Names:
    pairs = zip(group.family.labels, group.label_values, strict=True)
    return tuple((names[label], value) for label, value in pairs if value and label in names)


def _attributes(names: Names) -> list[KeyValue]:
    return [KeyValue(key=name, value=AnyValue(string_value=value)) for name, value in names]


_ENCODINGS: Final[Mapping[Encoding, Callable[[ExportMetricsServiceRequest], bytes]]] = {
    "otlp_proto": ExportMetricsServiceRequest.SerializeToString,
    # OTLP has its own rule for enumerations: numbers.
    "otlp_json": lambda request: MessageToJson(
        request, indent=None, use_integers_for_enums=True
    ).encode(),
}


def open_sink(
    *,
    bus: WholeBus,
    settings: OtlpSettings,
    readiness: Readiness,
    clock: Clock,
    group: str,
) -> AbstractAsyncContextManager[KafkaSink]:
    """Return the sink that writes the metrics of every event."""
    return open_kafka_sink(
        OTLP,
        bus=bus,
        settings=settings,
        values_of=_requests(settings).of,
        readiness=readiness,
        clock=clock,
        group=group,
    )


def open_redelivery(
    *,
    bus: Bus,
    settings: OtlpSettings,
    readiness: Readiness,  # noqa: ARG001  # as OpenRedelivery has it
    clock: Clock,
) -> AbstractAsyncContextManager[KafkaRedelivery]:
    """Return what writes the metrics of refused events."""
    values_of = _requests(settings).of
    return open_kafka_redelivery(bus=bus, settings=settings, values_of=values_of, clock=clock)


def _requests(settings: OtlpSettings) -> ExportRequests:
    return ExportRequests(
        encoding=settings.encoding,
        attributes=settings.resource_attributes,
        hw_names=settings.hw_names,
    )
