"""Remote-write encoding in samples per second and core, against protobuf in the same run."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

import cramjam
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from benchmarks.figure import Figure
from gpuledger.records import (
    Account,
    ContainerRef,
    Entry,
    GpuBooks,
    GpuEvent,
    GpuReading,
    Method,
    PodDescription,
    PodState,
)
from sinks.remote_write.live import LiveSeries
from sinks.remote_write.values import values_of

NAME = "remote_write"
_GPUS: Final = 8
_CONTAINERS_A_GPU: Final = 2
_TICKS: Final = 300
_RUNS: Final = 3


def run() -> Iterator[Figure]:
    """Yield the rates from an event to its request, with and without compression."""
    events = [_event(tick) for tick in range(_TICKS)]
    samples = _count(events)
    for name, compress in (("event_to_request", True), ("event_to_protobuf", False)):
        reference = _best(partial(_with_protobuf, events, compress=compress))
        ours = _best(partial(_with_prefixes, events, compress=compress))
        yield Figure(
            name=f"{NAME}.{name}",
            value=samples / ours,
            unit="samples/s/core",
            reference=samples / reference,
        )
    size = _with_prefixes(events, compress=True) / samples
    yield Figure(name=f"{NAME}.request", value=size, unit="bytes/sample")


def _best(work: Callable[[], object]) -> float:
    """Give the CPU seconds of the fastest run."""
    fastest = float("inf")
    for _ in range(_RUNS):
        began = time.process_time()
        work()
        fastest = min(fastest, time.process_time() - began)
    return fastest


def _with_prefixes(events: list[GpuEvent], *, compress: bool) -> int:
    series, size = LiveSeries(), 0
    for event in events:
        encoded = series.encode(event)
        if encoded is None:
            raise AssertionError(event.seq)
        size += len(cramjam.snappy.compress_raw(encoded.body) if compress else encoded.body)
    return size


def _with_protobuf(events: list[GpuEvent], *, compress: bool) -> int:
    """Do the same as a sender that builds messages does."""
    make, size = _write_request(), 0
    for event in events:
        request, time_ms = make(), event.time_ns // 1_000_000
        for group, values in values_of(event).items():
            labels = [
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
        body = request.SerializeToString()
        size += len(cramjam.snappy.compress_raw(body) if compress else body)
    return size


def _count(events: list[GpuEvent]) -> int:
    series = LiveSeries()
    encoded = (series.encode(event) for event in events)
    return sum(one.samples for one in encoded if one is not None)


def _event(tick: int) -> GpuEvent:
    """Give a node's tick: 8 GPUs with two containers, the host and idle each."""
    pods = [_pod(number) for number in range(_GPUS * _CONTAINERS_A_GPU)]
    return GpuEvent(
        node="gpu-node-0017.cluster.example",
        boot_id="0f2f3c1e-5a86-4a0a-9a52-8d3b0a6d3f11",
        seq=1000 * (tick + 1),
        time_ns=1_790_000_000_000_000_000 + tick * 1_000_000_000,
        interval_ns=1_000_000_000,
        gpus=[_books(number, tick) for number in range(_GPUS)],
        containers=[
            ContainerRef(container_id=f"{one:064x}", pod_uid=f"uid-{one}")
            for one in range(_GPUS * _CONTAINERS_A_GPU)
        ],
        pods=pods,
        allocations=[],
    )


def _books(number: int, tick: int) -> GpuBooks:
    share = (tick * 37 + number) % 1000 / 1000
    entry = Entry(
        account=Account.IDLE,
        busy_seconds=1 - share,
        memory_byte_seconds=2.0**34 + tick,
        joules=90.0 + share,
        method=Method.PROCESS_UTILIZATION,
    )
    containers = range(number * _CONTAINERS_A_GPU, (number + 1) * _CONTAINERS_A_GPU)
    booked = [replace(entry, account=Account.POD, container=one) for one in containers]
    reading = GpuReading(
        uuid=f"GPU-{number:08d}-2222-3333-4444-555555555555",
        index=number,
        model="NVIDIA H100 80GB HBM3",
        utilization_ratio=share,
        memory_utilization_ratio=share / 2,
        memory_total_bytes=80 * 2**30,
        memory_used_bytes=20 * 2**30 + tick,
        memory_reserved_bytes=600 * 2**20,
        power_watts=350.5 + share,
        energy_total_joules=1e9 + 350.0 * tick,
        temperature_celsius=61,
        sm_clock_hertz=1_980_000_000,
        memory_clock_hertz=2_619_000_000,
    )
    host = replace(entry, account=Account.HOST)
    return GpuBooks(reading=reading, entries=[*booked, host, entry])


def _pod(number: int) -> PodDescription:
    return PodDescription(
        uid=f"uid-{number}",
        container_ids=[f"{number:064x}"],
        state=PodState.KNOWN,
        namespace=f"research-{number % 5}",
        name=f"train-{number}-7c9d8f6b5-x2x4z",
        owner_kind="Deployment",
        owner_name=f"train-{number}",
        container_names={f"{number:064x}": "trainer"},
    )


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
