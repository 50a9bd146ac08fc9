"""How a real Prometheus 3 uses type, help and unit, which are sent with each series."""

from __future__ import annotations

import asyncio
import time
import urllib.parse
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from gpuledger.bus.protocol import Message
from gpuledger.codec import encode
from gpuledger.ledger.families import FAMILIES, INCIDENT_FAMILIES
from gpuledger.ledger.health import HEALTH_FAMILIES
from gpuledger.ledger.health import READINGS as HEALTH_PATHS
from gpuledger.ledger.interval_values import maxima_of
from gpuledger.ledger.usage import COUNTERS
from gpuledger.records import (
    Category,
    GpuDetails,
    GpuHealth,
    GpuLimits,
    GpuThrottling,
    GpuTraffic,
    NodeDescription,
    NodeReadings,
)
from gpuledger_sinks.registry import REMOTE_WRITE
from gpuledger_sinks.remote_write.active_series import metrics_of
from gpuledger_sinks.settings import RemoteWriteSettings
from tests.default_topics import READINGS
from tests.real.sinks.running_sinks import sending
from tests.unit.sinks.builders import (
    KEY,
    NODE,
    SECOND_NS,
    books,
    bus,
    committed,
    entry,
    event,
    eventually,
    holder,
    place_of,
    publish,
    reading,
)
from tests.unit.sinks.receiver import receiving
from tests.unit.sinks.remote_write.oracle import Described, decompress, parse_v2

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuledger.bus.memory import MemoryBus
    from gpuledger.bus.protocol import TopicPartition
    from gpuledger.records import GpuEvent
    from tests.real.services.prometheus import Prometheus, PrometheusApi

RELAYING: Final = """
remote_write:
- url: {url}
  protobuf_message: io.prometheus.write.v2.Request
  queue_config: {{batch_send_deadline: 100ms}}
"""
TICKS: Final = 12
SENT: Final = (
    *FAMILIES,
    COUNTERS,
    *INCIDENT_FAMILIES,
    *HEALTH_FAMILIES,
)
COUNTED_FROM_NOTHING: Final = {"gpuledger_gpu_incidents_total"}
"""Sent as 0 once all earlier incidents have been read, which may be after the ticks."""
KNOWN: Final = {
    metric.name: Described(metric.kind, metric.help, metric.unit)
    for family in (*SENT, *map(maxima_of, FAMILIES))
    for metric in metrics_of(family)
}
"""The help of each name, from the tables."""
PARTS_READ: Final = {
    "health": GpuHealth,
    "throttling": GpuThrottling,
    "limits": GpuLimits,
    "details": GpuDetails,
    "traffic": GpuTraffic,
}
NOT_READ: Final = {
    # Only in ticks without an answer, for deleted pods, or for instances and labels that this node
    # does not have.
    "gpuledger_pod_deleted_timestamp_seconds",
    "gpuledger_gpu_gap_seconds",
    "gpuledger_node_gap_seconds",
    "gpuledger_mig_instance_gap_seconds",
    "gpuledger_namespace_info",
    "gpuledger_pod_gpu_requested",
    "gpuledger_gpu_late_adjustment_busy_seconds_total",
    "gpuledger_gpu_xid_errors_total",
}


def tick_of(number: int, time_ns: int) -> GpuEvent:
    """Return a tick with a GPU and a MIG-partitioned one, with all existing readings."""
    all_read: dict[str, Any] = {
        "memory_reserved_bytes": 2**30,
        "memory_utilization_ratio": 0.5,
        "memory_clock_hertz": 10**9,
        "energy_total_millijoules": 1000 * number,
        "sm_active_ratio": 0.5,
        "tensor_active_ratio": 0.25,
        "dram_active_ratio": 0.125,
    }
    of_part = {"parent_uuid": "GPU-cut", "gpu_instance": 1, "compute_instance": 0}
    part = reading(uuid="MIG-1", **of_part, **all_read)
    idle = entry(Category.IDLE, allocation=0, allocated_ns=SECOND_NS)
    return event(
        number,
        time_ns=time_ns,
        gpus=[
            books(reading(**all_read), entry(), entry(Category.HOST), idle),
            books(reading(uuid="GPU-cut", index=1, mig_enabled=True)),
            books(part),
        ],
        allocated_to=[holder()],
        node_description=NodeDescription(pool="train"),
    )


def readings_of(number: int, time_ns: int) -> NodeReadings:
    parts: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for path in HEALTH_PATHS.values():
        part, _, name = path.partition(".")
        of_part = PARTS_READ[part]
        kind = str(of_part.__annotations__[name])
        one = True if "bool" in kind else 1
        parts[part][name] = {"0": one} if "dict" in kind else one
    message = GpuDetails(
        uuid=reading().uuid,
        health=GpuHealth(**parts["health"], recovery_action="none"),
        throttling=GpuThrottling(**parts["throttling"], reasons=1),
        limits=GpuLimits(**parts["limits"]),
        **parts["details"],
        traffic=GpuTraffic(**parts["traffic"]),
    )
    return NodeReadings(
        cluster="default",
        node=NODE,
        boot_id="boot-1",
        seq=number,
        time_ns=time_ns,
        interval_ns=SECOND_NS,
        gpus=[message],
    )


def has_half(on: MemoryBus, at: TopicPartition) -> bool:
    return (committed(on, REMOTE_WRITE.group, at) or 0) > TICKS / 2


async def send_all(to: PrometheusApi) -> set[str]:
    """Send series of all families; return their names at the receiver."""
    on: MemoryBus = bus()
    of_events, of_readings = place_of(NODE), place_of(NODE, READINGS.name)
    # Prometheus forwards only samples from after its start.
    times = [time.time_ns() + number * SECOND_NS for number in range(TICKS)]
    await publish(on, *(tick_of(number, at_ns) for number, at_ns in enumerate(times)))
    reported = [readings_of(number, at_ns) for number, at_ns in enumerate(times)]
    messages = [
        Message(key=KEY, value=encode(one), timestamp_ms=time.time_ns() // 1_000_000)
        for one in reported
    ]
    async with on.producer() as producer:
        await producer.publish(of_readings.topic, of_readings.partition, messages)
    settings = RemoteWriteSettings(url=to.remote_write_url, interval_seconds=5)
    async with sending(on, settings):
        for at in (of_events, of_readings):
            await eventually(partial(has_half, on, at))
    match = urllib.parse.urlencode({"match[]": '{cluster="default"}'})
    found: list[str] = to.fetch(f"/api/v1/label/__name__/values?{match}").json()["data"]
    return set(found)


async def test_prometheus_3_has_type_and_unit_as_labels_if_its_feature_is_on(
    start_prometheus: Callable[..., Prometheus],
) -> None:
    """Its `/api/v1/metadata` covers only scraped series, and so none of these."""
    prometheus = start_prometheus(arguments=["--enable-feature=type-and-unit-labels"])

    names = await send_all(prometheus)

    assert names | COUNTED_FROM_NOTHING == KNOWN.keys() - NOT_READ
    match = urllib.parse.urlencode({"match[]": '{cluster="default"}'})
    series = (await asyncio.to_thread(prometheus.fetch, f"/api/v1/series?{match}")).json()["data"]
    assert {(one["__name__"], one.get("__type__"), one.get("__unit__", "")) for one in series} == {
        (name, KNOWN[name].kind, KNOWN[name].unit) for name in names
    }
    assert prometheus.fetch("/api/v1/metadata").json()["data"] == {}


async def test_prometheus_3_forwards_type_help_and_unit_of_every_series(
    start_prometheus: Callable[..., Prometheus],
) -> None:
    async with receiving() as next_receiver:
        prometheus = start_prometheus(config=RELAYING.format(url=next_receiver.url))

        names = await send_all(prometheus)

        reported: dict[str, Described] = {}

        def are_sent() -> bool:
            while next_receiver.received:
                body = decompress(next_receiver.received.pop().body)
                reported.update({one.series.name: one.described for one in parse_v2(body)})
            return reported.keys() >= names

        await eventually(are_sent, within_seconds=120)
    assert {name: reported[name] for name in names} == {name: KNOWN[name] for name in names}
