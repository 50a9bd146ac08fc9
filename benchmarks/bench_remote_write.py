"""Remote-write in samples per second and core: encoding against protobuf, sending against vmagent.

Samples are sent from Kafka to a receiver that is 20 ms away, tick by tick (`interval_seconds: 0`),
by the sink's own process; its CPU time covers everything from JSON to the wire. `live` are nodes
that tick each second; `backlog` are events that wait when the sink starts. vmagent relays the same
samples.
"""

import asyncio
import re
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import cramjam
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from benchmarks.events import booked
from benchmarks.figure import Figure
from benchmarks.parts import run_kafka
from benchmarks.processes import cpu_seconds
from benchmarks.remote_write_load import NODES, publish, run_receiver, run_vmagent
from benchmarks.remote_write_memory import measure_memory
from gpuledger.bus.administration import create_topics
from gpuledger.bus.protocol import Record
from gpuledger.clock import NS_PER_MS
from gpuledger.errors import UnavailableError
from gpuledger.keys import node_key
from gpuledger.ledger.series import values_of
from gpuledger.records import GpuEvent
from gpuledger.settings import KafkaSettings
from gpuledger_sinks.remote_write.active_series import ActiveSeries
from gpuledger_sinks.remote_write.node_intervals import IntervalSamples
from gpuledger_sinks.remote_write.wire import TimedSamples, Version, encode_request
from tests.real.end_to_end.components import Component

NAME = "remote_write"
_TICKS: Final = 300
_RECORD: Final = Record("events", 0, 0, 0, None, None)
_TICKS_PER_REQUEST: Final = 10  # about 2000 samples, `samples_per_request`
_RUNS: Final = 3
_BACKLOG_TICKS: Final = 120
_WARM_SECONDS: Final = 5
_LIVE_SECONDS: Final = 20
_FLUSH_SECONDS: Final = 3.0
_DEADLINE_SECONDS: Final = 300.0
_SENT: Final = re.compile(r'gpuledger_sink_sent_total\{sink="remote_write"\} (\S+)')


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
    yield from _measure_sending()
    for name, version in (
        ("memory_of_a_million_series", Version.V2),
        ("memory_of_a_million_series_1_0", Version.V1),
    ):
        memory = measure_memory(version)
        value = memory.grown_bytes / memory.series * 1_000_000
        yield Figure(name=f"{NAME}.{name}", value=value, unit="bytes")
    for name, version in (("request", Version.V1), ("request_2_0", Version.V2)):
        size = _encode(events, version, compress=True) / samples
        yield Figure(name=f"{NAME}.{name}", value=size, unit="bytes/sample")


def _measure_sending() -> Iterator[Figure]:
    """Yield the rates of the sink as a process, and vmagent's."""
    with run_receiver() as receiver, tempfile.TemporaryDirectory(prefix="gpuledger-bench-") as name:
        folder = Path(name)
        relayed = _relay(receiver, folder)
        with run_kafka() as kafka:
            settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
            asyncio.run(create_topics(settings))
            for mode, rate in (
                # First, because its sink would otherwise start with the backlog.
                ("live", _send_live(settings, receiver, folder)),
                ("backlog", _send_backlog(settings, receiver, folder)),
            ):
                yield Figure(
                    name=f"remote_write_{mode}_samples_per_core_second",
                    value=rate,
                    unit="samples/s/core",
                    reference=relayed,
                )


def _sink(settings: KafkaSettings, receiver: str, folder: Path, group: str) -> Component:
    return Component(
        name=group,
        command=["gpuledger", "sink", "remote_write"],
        folder=folder / group,
        environment={
            "KAFKA__BOOTSTRAP_SERVERS": settings.bootstrap_servers,
            "REMOTE_WRITE__URL": receiver,
            "REMOTE_WRITE__INTERVAL_SECONDS": "0",
            # The backlog's times are in the next two minutes.
            "REMOTE_WRITE__MAX_FUTURE_SECONDS": "3600",
            "GROUP": group,
        },
    )


class _Progress(NamedTuple):
    samples: float
    cpu_seconds: float

    @classmethod
    def of(cls, sink: Component) -> "_Progress":
        found = _SENT.search(sink.metrics())
        return cls(float(found[1]) if found else 0.0, cpu_seconds(sink.pid))

    def rate_to(self, end: "_Progress") -> float:
        return (end.samples - self.samples) / (end.cpu_seconds - self.cpu_seconds)


def _send_backlog(settings: KafkaSettings, receiver: str, folder: Path) -> float:
    """Return samples per second and core of the backlog when the sink started."""
    first = _WARM_SECONDS + _LIVE_SECONDS
    ticks = range(first, first + _BACKLOG_TICKS)
    asyncio.run(publish(settings, ticks, start_ns=time.time_ns()))
    sink = _sink(settings, receiver, folder, "bench-backlog")
    sink.start()
    try:
        sink.wait_until_ready()
        begun = _Progress.of(sink)
        last = begun
        deadline = time.monotonic() + _DEADLINE_SECONDS
        # It is done once it sends nothing more.
        while (now := _Progress.of(sink)).samples > last.samples or not last.samples:
            if time.monotonic() > deadline:
                raise UnavailableError(f"the backlog is not sent: {sink.log_tail()}")
            last = now
            time.sleep(1.0)
        return begun.rate_to(last)
    finally:
        sink.stop()


def _send_live(settings: KafkaSettings, receiver: str, folder: Path) -> float:
    """Return samples per second and core while nodes tick each second."""
    sink = _sink(settings, receiver, folder, "bench-live")
    sink.start()
    try:
        sink.wait_until_ready()
        start_ns = time.time_ns()

        async def tick_for(first: int, seconds: int) -> None:
            for tick in range(first, first + seconds):
                await publish(settings, [tick], start_ns=start_ns)
                await asyncio.sleep(1.0)

        asyncio.run(tick_for(0, _WARM_SECONDS))
        begun = _Progress.of(sink)
        asyncio.run(tick_for(_WARM_SECONDS, _LIVE_SECONDS))
        return begun.rate_to(_Progress.of(sink))
    finally:
        sink.stop()


def _relay(receiver: str, folder: Path) -> float:
    """Return samples per second and core of vmagent, which is sent the same ticks."""
    series = {node: ActiveSeries() for node in NODES}
    start_ns = time.time_ns()
    with run_vmagent(receiver, folder) as (address, pid):
        samples, begun = 0, 0.0
        for tick in range(_WARM_SECONDS + _LIVE_SECONDS):
            if tick == _WARM_SECONDS:
                samples, begun = 0, cpu_seconds(pid)
            for node in NODES:
                event = booked(tick, node=node, start_ns=start_ns)
                encoded = series[node].encode(_samples_of(event))
                samples += encoded.samples
                body = bytes(cramjam.snappy.compress_raw(encoded.encode(Version.V1)))
                request = urllib.request.Request(f"{address}/api/v1/write", data=body)  # noqa: S310  # our own
                with urllib.request.urlopen(request) as answer:  # noqa: S310  # our own
                    answer.read()
        time.sleep(_FLUSH_SECONDS)
        return samples / (cpu_seconds(pid) - begun)


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
    """Do the same as a sender that builds protobuf messages."""
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
    """Yield the events that are sent together."""
    for first in range(0, len(events), _TICKS_PER_REQUEST):
        yield events[first : first + _TICKS_PER_REQUEST]


def _count(events: list[GpuEvent]) -> int:
    series = ActiveSeries()
    return sum(series.encode(_samples_of(event)).samples for event in events)


def _write_request() -> Any:  # noqa: ANN401  # a class made at run time
    """Create protobuf's `WriteRequest` from the used parts of Prometheus's prompb/*.proto."""
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
