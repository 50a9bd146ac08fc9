"""Remote-write encoding in samples per second and core, against protobuf in the same run."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import cramjam
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from benchmarks.events import booked
from benchmarks.figure import Figure
from gpuledger.bus.protocol import Record
from gpuledger.clock import NS_PER_MS
from gpuledger.keys import node_key
from gpuledger.ledger.series import values_of
from gpuledger.records import GpuEvent
from sinks.remote_write.active_series import ActiveSeries
from sinks.remote_write.node_intervals import IntervalSamples
from sinks.remote_write.wire import TimedSamples, Version, encode_request

NAME = "remote_write"
_TICKS: Final = 300
_RECORD: Final = Record("events", 0, 0, 0, None, None)
_TICKS_PER_REQUEST: Final = 10  # some 2000 samples, `samples_per_request`
_RUNS: Final = 3


def run() -> Iterator[Figure]:
    """Yield the rates from an event to its request, with and without compression."""
    events = [booked(tick) for tick in range(_TICKS)]
    samples = _count(events)
    for name, compress in (("event_to_request", True), ("event_to_protobuf", False)):
        reference = _best(partial(_with_protobuf, events, compress=compress))
        ours = _best(partial(_encode, events, Version.V1, compress=compress))
        yield Figure(
            name=f"{NAME}.{name}",
            value=samples / ours,
            unit="samples/s/core",
            reference=samples / reference,
        )
        yield Figure(
            name=f"{NAME}.{name}_2_0",
            value=samples / _best(partial(_encode, events, Version.V2, compress=compress)),
            unit="samples/s/core",
        )
    for name, version in (("request", Version.V1), ("request_2_0", Version.V2)):
        size = _encode(events, version, compress=True) / samples
        yield Figure(name=f"{NAME}.{name}", value=size, unit="bytes/sample")


def _best(work: Callable[[], object]) -> float:
    """Return the CPU seconds of the fastest run."""
    fastest = float("inf")
    for _ in range(_RUNS):
        began = time.process_time()
        work()
        fastest = min(fastest, time.process_time() - began)
    return fastest


def _encode(events: list[GpuEvent], version: Version, *, compress: bool) -> int:
    series, size = ActiveSeries(), 0
    for together in _requests(events):
        body = encode_request(version, _timed(series, together))
        size += len(cramjam.snappy.compress_raw(body) if compress else body)
    return size


def _with_protobuf(events: list[GpuEvent], *, compress: bool) -> int:
    """Do the same as a sender that builds messages does."""
    make, size = _write_request(), 0
    for together in _requests(events):
        request = make()
        for event in together:
            _add_series(request, event)
        body = request.SerializeToString()
        size += len(cramjam.snappy.compress_raw(body) if compress else body)
    return size


def _add_series(request: Any, event: GpuEvent) -> None:  # noqa: ANN401  # a class made at run time
    time_ms = event.time_ns // NS_PER_MS
    for group, values in values_of(event).items():
        labels = [
            ("cluster", event.cluster),
            ("node", event.node),
            *zip(group.family.labels, group.label_values, strict=True),
        ]
        for metric, value in zip(group.family.metrics, values, strict=True):
            if value is None:
                continue
            series = request.timeseries.add()
            for name, text in sorted([("__name__", metric.name), *labels]):
                if text:
                    series.labels.add(name=name, value=text)
            series.samples.add(value=value, timestamp=time_ms)


def _requests(events: list[GpuEvent]) -> Iterator[list[GpuEvent]]:
    """Yield the events that travel together."""
    for first in range(0, len(events), _TICKS_PER_REQUEST):
        yield events[first : first + _TICKS_PER_REQUEST]


def _count(events: list[GpuEvent]) -> int:
    series = ActiveSeries()
    return sum(series.encode(_samples_of(event)).samples for event in events)


def _write_request() -> Any:  # noqa: ANN401  # a class made at run time
    """Make protobuf's `WriteRequest`, of what is used of prometheus/prometheus prompb/*.proto."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="bench.proto", package="p", syntax="proto3")
    fields = [
        ("WriteRequest", "timeseries", 1, kinds.TYPE_MESSAGE, ".p.TimeSeries"),
        ("TimeSeries", "labels", 1, kinds.TYPE_MESSAGE, ".p.Label"),
        ("TimeSeries", "samples", 2, kinds.TYPE_MESSAGE, ".p.Sample"),
        ("Label", "name", 1, kinds.TYPE_STRING, ""),
        ("Label", "value", 2, kinds.TYPE_STRING, ""),
        ("Sample", "value", 1, kinds.TYPE_DOUBLE, ""),
        ("Sample", "timestamp", 2, kinds.TYPE_INT64, ""),
    ]
    names = dict.fromkeys(field[0] for field in fields)
    messages = {name: file.message_type.add(name=name) for name in names}
    for message, name, number, kind, of in fields:
        label = kinds.LABEL_REPEATED if of else kinds.LABEL_OPTIONAL
        field = messages[message].field.add(name=name, number=number, type=kind, label=label)
        if of:
            field.type_name = of
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("p.WriteRequest"))


def _timed(series: ActiveSeries, events: list[GpuEvent]) -> list[TimedSamples]:
    return [timed for event in events for timed in series.encode(_samples_of(event)).timed]


def _samples_of(event: GpuEvent) -> IntervalSamples:
    return IntervalSamples(
        node=node_key(event), time_ns=event.time_ns, values=values_of(event), record=_RECORD
    )
