"""The sinks that write to Kafka, as processes over a real one: each row and each point once."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)

from gpuledger.codec import Decoder
from gpuledger.keys import key_in
from gpuledger.ledger.rows import EntryRow
from gpuledger.records import Account, GpuEvent
from gpuledger.topics import Topic, partition_of_node
from tests.default_topics import DEAD_LETTERS, EVENTS, ROWS
from tests.real.services import web
from tests.real.sinks.running_sinks import NODES, Sink, make_topics, publish, ticks
from tests.unit.sinks.builders import SECOND_NS, entry, event
from tests.unit.sinks.otlp.decoded import Point, points_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.real.services.kafka import Kafka
    from tests.real.services.kcat import Kcat, KcatMessage
    from tests.real.services.prometheus import Prometheus

# As somebody else would have made it: with another number of partitions than the events have.
OTLP_METRICS = Topic(name="otlp_metrics", record=GpuEvent, key="node", partitions=3)
BUSY = "gpuledger.pod.gpu.busy"
EAGER = {"rows__max_poll_records": "5", "rows__commit_interval_seconds": "0"}


def rows(of: Kafka, by: Kcat) -> list[KcatMessage]:
    return by.consume(of.bootstrap_servers, ROWS.name)


def identities(messages: list[KcatMessage]) -> Counter[tuple[str, str, int, int]]:
    decoder: Decoder[Any] = Decoder(topic=ROWS.name, record=EntryRow)
    decoded = [decoder.decode(message.value) for message in messages]
    return Counter((row.node, row.boot_id, row.seq, row.row) for row in decoded)


def expected(events: list[GpuEvent]) -> Counter[tuple[str, str, int, int]]:
    return Counter(
        (one.node, one.boot_id, one.seq, row)
        for one in events
        for row in range(sum(len(books.entries) for books in one.gpus))
    )


def wait_for_rows(sink: Sink, of: Kafka, by: Kcat, *, least: int, seconds: float = 60) -> None:
    def are_there() -> bool:
        time.sleep(0.1)  # each look is a process
        return len(rows(of, by)) >= least

    sink.wait_until(are_there, deadline_seconds=seconds)


async def test_killed_again_and_again_there_is_each_row_once_for_any_client(
    broker: Kafka, kcat: Kcat, start_sink: Callable[..., Sink]
) -> None:
    await make_topics(broker)
    events = ticks(40)
    await publish(broker, [*events[:160], b"no event", *events[160:]])
    sink = start_sink("rows", broker, **EAGER)
    for least in (1, 80, 160):
        wait_for_rows(sink, broker, kcat, least=least)
        sink.kill()
        sink.start()

    wait_for_rows(sink, broker, kcat, least=len(events))
    sink.wait_until(sink.is_ready, deadline_seconds=30)
    assert sink.stop(deadline_seconds=30) == 0
    found = rows(broker, kcat)
    assert identities(found) == expected(events)
    for message in found:
        node = json.loads(message.value or b"")["node"]
        assert message.key == key_in("default", node).encode()
        assert message.partition == partition_of_node(
            key_in("default", node), partitions=EVENTS.partitions
        )
    (letter,) = kcat.consume(broker.bootstrap_servers, DEAD_LETTERS.name)
    assert b"bm8gZXZlbnQ=" in (letter.value or b"")


async def test_a_sink_that_stood_still_while_another_took_over_writes_nothing_twice(
    broker: Kafka, kcat: Kcat, start_sink: Callable[..., Sink]
) -> None:
    await make_topics(broker)
    events = ticks(30)
    await publish(broker, events[:120])
    stopped = start_sink("rows", broker, **EAGER)
    wait_for_rows(stopped, broker, kcat, least=40)
    stopped.send(signal.SIGSTOP)
    other = start_sink("rows", broker, **EAGER)
    await publish(broker, events[120:200])
    wait_for_rows(other, broker, kcat, least=200)
    stopped.send(signal.SIGCONT)
    await publish(broker, events[200:])
    wait_for_rows(other, broker, kcat, least=len(events))
    for sink in (stopped, other):
        sink.wait_until(sink.is_ready, deadline_seconds=40)
        assert sink.stop(deadline_seconds=30) == 0

    assert identities(rows(broker, kcat)) == expected(events)


async def test_a_broker_that_dies_and_comes_back_costs_nothing(
    broker: Kafka, kcat: Kcat, start_sink: Callable[..., Sink]
) -> None:
    await make_topics(broker)
    events = ticks(20)
    await publish(broker, events[:120])
    sink = start_sink("rows", broker, **EAGER)
    wait_for_rows(sink, broker, kcat, least=40)
    broker.kill()
    sink.wait_until(lambda: not sink.is_ready(), deadline_seconds=60)
    broker.start()
    await publish(broker, events[120:])

    wait_for_rows(sink, broker, kcat, least=len(events), seconds=90)
    sink.wait_until(sink.is_ready, deadline_seconds=30)
    assert identities(rows(broker, kcat)) == expected(events)
    broker.kill()
    assert sink.stop(deadline_seconds=30) == 0


def decode(encoding: str, value: bytes) -> ExportMetricsServiceRequest:
    if encoding == "otlp_json":
        return json_format.Parse(value, ExportMetricsServiceRequest())
    return ExportMetricsServiceRequest.FromString(value)


CONTENT = {"otlp_proto": "application/x-protobuf", "otlp_json": "application/json"}


@pytest.mark.parametrize("encoding", CONTENT)
async def test_what_lies_in_the_otlp_topic_is_taken_by_prometheus_under_remote_writes_names(
    encoding: str,
    broker: Kafka,
    kcat: Kcat,
    start_sink: Callable[..., Sink],
    start_prometheus: Callable[..., Prometheus],
) -> None:
    await make_topics(broker, OTLP_METRICS)
    start_ns = time.time_ns() - 20 * SECOND_NS
    booked = [
        entry(),
        entry(pod_uid="uid-other", container_id="d" * 64, busy_ns=250_000_000),
        entry(Account.IDLE, busy_ns=250_000_000),
    ]
    events = [
        event(tick, node=node, time_ns=start_ns + tick * SECOND_NS, entries=booked)
        for tick in range(10)
        for node in NODES
    ]
    await publish(broker, events)
    sink = start_sink("otlp", broker, otlp__encoding=encoding)

    def messages() -> list[KcatMessage]:
        return kcat.consume(broker.bootstrap_servers, OTLP_METRICS.name)

    sink.wait_until(lambda: len(messages()) >= len(events), deadline_seconds=30)
    assert sink.stop(deadline_seconds=30) == 0
    values = [message.value or b"" for message in messages()]
    found: list[Point] = [one for value in values for one in points_in(decode(encoding, value))]
    assert len([one for one in found if one.name == BUSY]) == 2 * len(events)
    assert {one.attribute("k8s.pod.name") for one in found if one.name == BUSY} >= {"train-0"}

    prometheus = start_prometheus(arguments=["--web.enable-otlp-receiver"])
    for value in values:
        answer = web.fetch(
            f"{prometheus.url}/api/v1/otlp/v1/metrics",
            method="POST",
            body=value,
            headers={"Content-Type": CONTENT[encoding]},
        )
        assert answer.status == 200, answer.body
    await_and_check(prometheus)


def await_and_check(prometheus: Prometheus) -> None:
    """Of a resource Prometheus keeps `job` and `instance`: two pods of a GPU must stay two."""
    query = "count_over_time(gpuledger_pod_gpu_busy_ratio[5m])"
    prometheus.await_query(query)
    of_pods: list[Any] = prometheus.query(query)
    assert {one["metric"]["job"] for one in of_pods} == {"gpuledger"}
    assert len({one["metric"]["instance"] for one in of_pods}) == len(of_pods) == 2 * len(NODES)
    assert {one["value"][1] for one in of_pods} == {"10"}
    (total,) = prometheus.query(
        "sum(gpuledger_pod_gpu_busy_ratio) + sum(gpuledger_account_gpu_busy_ratio)"
    )
    assert float(total["value"][1]) == len(NODES)
    (watts,) = prometheus.query("max(gpuledger_gpu_power_watts)")
    assert float(watts["value"][1]) == 350.5


async def test_a_topic_that_is_missing_is_waited_for_and_said_with_how_to_make_it(
    broker: Kafka, start_sink: Callable[..., Sink]
) -> None:
    await make_topics(broker)
    sink = start_sink("otlp", broker)
    sink.wait_until(
        lambda: b"kafka-topics.sh --create" in web.fetch(f"{sink.health}/readyz").body,
        deadline_seconds=30,
    )
    assert not sink.is_ready()

    await make_topics(broker, OTLP_METRICS)
    sink.wait_until(sink.is_ready, deadline_seconds=60)
    assert sink.stop(deadline_seconds=30) == 0
