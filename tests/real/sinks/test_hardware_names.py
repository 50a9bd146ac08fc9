"""OpenTelemetry's names of the hardware by both sinks, as a real Prometheus 3 stores them.

What the OTLP sink writes is translated by Prometheus itself, so that the names of the remote-write
sink are held to OpenTelemetry's rules by somebody else's code.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final

from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Message
from gpuledger.codec import encode
from gpuledger.keys import key_in
from gpuledger.records import GpuDetails, GpuEvent, GpuHealth, GpuTraffic, NodeReadings
from gpuledger.settings import KafkaSettings
from gpuledger.topics import Topic, partition_of_node
from gpuledger_sinks.registry import OTLP, REMOTE_WRITE
from tests.default_topics import READINGS
from tests.real.services import web
from tests.real.sinks.running_sinks import make_topics, publish
from tests.unit.sinks.builders import SECOND_NS, books, event, reading

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.real.services.kafka import Kafka
    from tests.real.services.kcat import Kcat, KcatMessage
    from tests.real.services.prometheus import Prometheus, PrometheusApi
    from tests.real.sinks.running_sinks import Sink

Stored = dict[tuple[str, frozenset[tuple[str, str]]], float]
NODE: Final = "node-a"
TICKS: Final = 15
OTLP_METRICS: Final = Topic(name="otlp_metrics", record=GpuEvent, key="node", partitions=3)


def tick_of(number: int, time_ns: int) -> GpuEvent:
    gpu = reading(energy_total_millijoules=300_000 * number)
    of_both = {"parent_uuid": "GPU-cut", "index": 1, "power_milliwatts": None}
    cut = reading(uuid="GPU-cut", index=1, mig_enabled=True, utilization_ratio=None)
    parts = [
        reading(uuid=f"MIG-{at}", gpu_instance=at, compute_instance=0, **of_both) for at in (1, 2)
    ]
    return event(number, time_ns=time_ns, gpus=[books(one) for one in (gpu, cut, *parts)], pods=[])


def readings_of(number: int, time_ns: int) -> NodeReadings:
    said = GpuDetails(
        uuid=reading().uuid,
        health=GpuHealth(ecc_corrected_volatile_total=7, ecc_uncorrected_volatile_total=1),
        traffic=GpuTraffic(pcie_sent_bytes_total=number, pcie_received_bytes_total=2 * number),
    )
    return NodeReadings(
        cluster="default",
        node=NODE,
        boot_id="boot-1",
        seq=number,
        time_ns=time_ns,
        interval_ns=SECOND_NS,
        gpus=[said],
    )


async def publish_readings(to: Kafka, told: list[NodeReadings]) -> None:
    key = key_in("default", NODE)
    at = partition_of_node(key, partitions=READINGS.partitions)
    messages = [Message(key=key.encode(), value=encode(one), timestamp_ms=0) for one in told]
    async with KafkaBus(
        KafkaSettings(bootstrap_servers=to.bootstrap_servers)
    ).producer() as producer:
        await producer.publish(READINGS.name, at, messages)


def stored(prometheus: PrometheusApi, of: str = 'hw_.*"}') -> Stored:
    """Return the last value of each series, by name and the conventions' labels."""
    found: list[dict[str, Any]] = prometheus.query(f'{{__name__=~"{of}')
    return {
        (
            one["metric"]["__name__"],
            frozenset(pair for pair in one["metric"].items() if pair[0].startswith("hw_")),
        ): float(one["value"][1])
        for one in found
    }


async def test_both_sinks_come_to_the_same_names_labels_and_values(
    broker: Kafka,
    kcat: Kcat,
    start_prometheus: Callable[..., Prometheus],
    start_sink: Callable[..., Sink],
) -> None:
    await make_topics(broker, OTLP_METRICS)
    start_ns = time.time_ns() - TICKS * SECOND_NS
    times = [start_ns + number * SECOND_NS for number in range(TICKS)]
    await publish(broker, [tick_of(number, at_ns) for number, at_ns in enumerate(times)])
    await publish_readings(broker, [readings_of(number, at) for number, at in enumerate(times)])
    by_remote_write = start_prometheus()
    by_otlp = start_prometheus(arguments=["--web.enable-otlp-receiver"])
    remote_write = start_sink(
        REMOTE_WRITE.name,
        broker,
        remote_write__url=by_remote_write.remote_write_url,
        remote_write__interval_seconds="0",
        remote_write__hw_names="true",
        remote_write__stale_after_seconds="600",
    )
    otlp = start_sink(OTLP.name, broker, otlp__hw_names="true")

    def messages() -> list[KcatMessage]:
        return kcat.consume(broker.bootstrap_servers, OTLP_METRICS.name)

    await asyncio.to_thread(otlp.wait_until, lambda: len(messages()) >= TICKS, deadline_seconds=60)
    for message in messages():
        answer = web.fetch(
            f"{by_otlp.url}/api/v1/otlp/v1/metrics",
            method="POST",
            body=message.value or b"",
            headers={"Content-Type": "application/x-protobuf"},
        )
        assert answer.status == 200, answer.body
    last = (TICKS - 1) * 300
    for prometheus in (by_remote_write, by_otlp):
        await asyncio.to_thread(prometheus.await_query, f"hw_energy_joules_total == {last}")
    # What is read of health and traffic is told every ten seconds, and is in no event.
    await asyncio.to_thread(by_remote_write.await_query, "hw_gpu_io_bytes_total")
    of_readings = stored(by_remote_write, 'hw_errors_total|hw_gpu_io_bytes_total"}')

    assert stored(by_remote_write).items() - of_readings.items() == stored(by_otlp).items()
    errors = by_remote_write.query("hw_errors_total")
    assert {one["metric"]["error_type"]: one["value"][1] for one in errors} == {
        "corrected": "7",
        "uncorrected": "1",
    }
    traffic = by_remote_write.query("hw_gpu_io_bytes_total")
    assert {one["metric"]["network_io_direction"] for one in traffic} == {"receive", "transmit"}
    # Two instances of one memory, and the whole GPU beside them.
    (used,) = by_remote_write.query("sum(hw_gpu_memory_usage_bytes)")
    assert float(used["value"][1]) == 3 * 20 * 2**30
    assert remote_write.stop(deadline_seconds=30) == otlp.stop(deadline_seconds=30) == 0
