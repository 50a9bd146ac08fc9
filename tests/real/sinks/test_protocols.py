"""Which version of remote-write is used with real receivers, and what arrives with each."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest
from prometheus_client import REGISTRY

from gpuledger.bus.protocol import Message
from gpuledger.codec import encode
from gpuledger.keys import node_key
from gpuledger.ledger.families import POD
from gpuledger.records import GpuEvent
from gpuledger.runtime import Readiness
from gpuledger_sinks.registry import REMOTE_WRITE
from gpuledger_sinks.remote_write.active_series import metrics_of
from gpuledger_sinks.remote_write.wire import (
    LabelSet,
    Metric,
    MetricSet,
    SampleGroup,
    TimedSamples,
    Version,
    encode_request,
    encode_start,
    encode_time,
    encode_value,
)
from gpuledger_sinks.remote_write.write_client import open_client
from gpuledger_sinks.settings import RemoteWriteSettings
from tests.real.sinks.running_sinks import sending
from tests.unit.sinks.builders import (
    SECOND_NS,
    bus,
    committed,
    dead_letters,
    entry,
    event,
    eventually,
    place_of,
    publish,
)
from tests.unit.sinks.receiver import Received, receiving
from tests.unit.sinks.remote_write.oracle import Described, decompress, parse_v2

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.real.services.prometheus import Prometheus, Prometheus2, PrometheusApi

ACCEPTED = "--web.remote-write-receiver.accepted-protobuf-messages"
BUSY = "gpuledger_pod_gpu_busy_ratio"


RELAYING = """
remote_write:
- url: {url}
  protobuf_message: io.prometheus.write.v2.Request
  queue_config: {{batch_send_deadline: 100ms}}
"""


def metadata_in(received: list[Received]) -> dict[str, Described]:
    """Return what requests of 2.0 contain about metrics."""
    return {
        one.series.name: one.described
        for request in received
        for one in parse_v2(decompress(request.body))
    }


def ticks(node: str, *, count: int = 5) -> list[GpuEvent]:
    # Prometheus forwards only samples from after its start.
    first_ns = time.time_ns()
    return [
        event(n, node=node, time_ns=first_ns + n * 10**7, entries=[entry()]) for n in range(count)
    ]


async def send(to: PrometheusApi, node: str, *, protocol: str = "auto") -> str:
    """Send five ticks of a node through the sink; return what it reports about the protocol."""
    on = bus()
    await publish(on, *ticks(node))
    settings = RemoteWriteSettings(url=to.remote_write_url, protocol=protocol, interval_seconds=0)  # type: ignore[arg-type]  # one of three
    async with sending(on, settings) as readiness:
        await eventually(lambda: committed(on, REMOTE_WRITE.group, place_of(node)) == 5)
        shown = readiness.check("remote_write.protocol").detail
    assert await dead_letters(on) == []
    return shown


async def has_all(prometheus: PrometheusApi, node: str) -> bool:
    """Query until a node's five ticks are there."""
    query = f'count_over_time({BUSY}{{node="{node}"}}[1m]) == 5'
    return bool(await asyncio.to_thread(prometheus.await_query, query))


@pytest.mark.parametrize("protocol", ["auto", "2.0"])
async def test_prometheus_3_gets_2_0_and_has_values_and_metadata(
    start_prometheus: Callable[..., Prometheus], protocol: str
) -> None:
    """It returns metadata only for series that it scrapes, but forwards all that it received."""
    async with receiving() as next_receiver:
        prometheus = start_prometheus(config=RELAYING.format(url=next_receiver.url))

        shown = await send(prometheus, "node-2-0", protocol=protocol)

        assert shown == "remote-write 2.0: the receiver reports written samples"
        assert await has_all(prometheus, "node-2-0")
        (busy, *_), sent_on = metrics_of(POD), next_receiver.received
        await eventually(lambda: busy.name in metadata_in(sent_on), within_seconds=120)
    assert metadata_in(sent_on)[busy.name] == Described(busy.kind, busy.help, busy.unit)


@pytest.mark.parametrize(
    ("receiver", "because"),
    [
        ("prometheus 3 that accepts only 1.0", "415"),
        ("prometheus 2.42", "204 without a report of written samples"),
        ("victoriametrics", "204 without a report of written samples"),
    ],
)
async def test_a_receiver_of_1_0_gets_1_0_and_loses_no_sample(
    start_prometheus: Callable[..., Prometheus],
    start_prometheus_2: Callable[[], Prometheus2],
    victoria_metrics: PrometheusApi,
    receiver: str,
    because: str,
) -> None:
    api: PrometheusApi = victoria_metrics
    if receiver == "prometheus 3 that accepts only 1.0":
        api = start_prometheus(arguments=[f"{ACCEPTED}=prometheus.WriteRequest"])
    elif receiver == "prometheus 2.42":
        api = start_prometheus_2()

    shown = await send(api, "node-1-0")

    assert shown.startswith(f"remote-write 1.0: {because}")
    assert await has_all(api, "node-1-0")


async def test_the_sink_waits_for_a_receiver_of_only_2_0_if_1_0_is_configured(
    start_prometheus: Callable[..., Prometheus],
) -> None:
    prometheus = start_prometheus(arguments=[f"{ACCEPTED}=io.prometheus.write.v2.Request"])
    on, readiness = bus(), Readiness()
    await publish(on, *ticks("node-only"))
    settings = RemoteWriteSettings(
        url=prometheus.remote_write_url, protocol="1.0", interval_seconds=0
    )
    async with sending(on, settings, readiness=readiness):
        await eventually(lambda: not readiness.check("remote_write.receiver").is_ok)
        await eventually(lambda: "415" in readiness.check("remote_write.receiver").detail)
    assert committed(on, REMOTE_WRITE.group, place_of("node-only")) is None
    assert (await send(prometheus, "node-only")).startswith("remote-write 2.0")


async def test_if_2_0_is_configured_a_receiver_of_1_0_loses_nothing_and_the_check_names_the_setting(
    start_prometheus_2: Callable[[], Prometheus2],
) -> None:
    on, readiness = bus(), Readiness()
    await publish(on, *ticks("node-strict"))
    settings = RemoteWriteSettings(
        url=start_prometheus_2().remote_write_url, protocol="2.0", interval_seconds=0
    )
    async with sending(on, settings, readiness=readiness):
        check = readiness.check("remote_write.receiver")
        await eventually(lambda: "check remote_write.protocol" in check.detail)
    assert committed(on, REMOTE_WRITE.group, place_of("node-strict")) is None


async def test_duty_28_samples_that_prometheus_3_did_not_write_are_counted_and_rejected(
    start_prometheus: Callable[..., Prometheus],
) -> None:
    """Another sender has already written a later sample of one of two nodes."""
    prometheus, on, labels = start_prometheus(), bus(), {"sink": REMOTE_WRITE.name}
    *nodes, others = [f"n{n}" for n in range(99) if place_of(f"n{n}").partition == 0][:3]
    at = place_of(nodes[0])
    await send_later(prometheus, nodes[0])
    before = (
        REGISTRY.get_sample_value("gpuledger_sink_remote_write_unwritten_samples_total", labels)
        or 0
    )
    settings = RemoteWriteSettings(url=prometheus.remote_write_url, interval_seconds=0)
    async with sending(on, settings):
        # Records before that may be repetitions.
        await publish(on, *ticks(others))
        await eventually(lambda: committed(on, REMOTE_WRITE.group, at) == 5)
        together = [*ticks(nodes[0]), *ticks(nodes[1])]
        messages = [
            Message(
                key=node_key(one).encode(),
                value=encode(one),
                timestamp_ms=time.time_ns() // 1_000_000,
            )
            for one in together
        ]
        async with on.producer() as producer:
            await producer.publish(at.topic, at.partition, messages)
        await eventually(lambda: committed(on, REMOTE_WRITE.group, at) == 15)
    after = (
        REGISTRY.get_sample_value("gpuledger_sink_remote_write_unwritten_samples_total", labels)
        or 0
    )

    assert after > before
    assert await has_all(prometheus, nodes[1])
    found_dead_letters = await dead_letters(on)
    assert {dead_letter.reason for dead_letter in found_dead_letters} == {"partial"}
    assert all(
        "samples were written: 400" in dead_letter.detail for dead_letter in found_dead_letters
    )


async def send_later(to: PrometheusApi, node: str) -> None:
    on, later_ns = bus(), time.time_ns() + 60 * SECOND_NS
    await publish(on, event(0, node=node, time_ns=later_ns, entries=[entry()]))
    async with sending(on, RemoteWriteSettings(url=to.remote_write_url, interval_seconds=0)):
        await eventually(lambda: committed(on, REMOTE_WRITE.group, place_of(node)) == 1)


class Counter:
    """A counter that started before its first sample."""

    samples, tenant = 1, ""

    def __init__(self, *, time_ms: int, start_ms: int) -> None:
        metric = Metric(name="gpuledger_test_seconds_total", kind="counter", help="What counts.")
        group = SampleGroup(
            LabelSet([("node", "begun")]),
            MetricSet([metric]),
            [encode_start(start_ms)],
        )
        self._timed = TimedSamples(encode_time(time_ms), [group], [encode_value(7.0)])

    def encode(self, version: Version) -> bytes:
        return encode_request(version, [self._timed])


async def test_duty_23_prometheus_3_reads_when_a_counter_started(
    start_prometheus: Callable[..., Prometheus],
) -> None:
    """It writes a zero at that time, because a feature flag enables this."""
    prometheus, now_ms = start_prometheus(), time.time_ns() // 10**6
    async with open_client(
        RemoteWriteSettings(url=prometheus.remote_write_url, interval_seconds=0)
    ) as client:
        await client.write(Counter(time_ms=now_ms, start_ms=now_ms - 5000), attempt=0)

    (found,) = await asyncio.to_thread(prometheus.await_query, "gpuledger_test_seconds_total[1m]")
    assert [(round(at * 1000), value) for at, value in found["values"]] == [
        (now_ms - 5000, "0"),
        (now_ms, "7"),
    ]
