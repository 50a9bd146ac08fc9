"""The sinks as their users run them: processes of their own over a real Kafka."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pytest

from gpuledger.bus.administration import create_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Message
from gpuledger.codec import encode
from gpuledger.settings import KafkaSettings
from gpuledger.topics import DEAD_LETTERS, EVENTS, partition_of_node
from sinks.store.reading import count_rows, entries_sql
from tests.real.parts import web
from tests.real.parts.ports import free_ports
from tests.real.parts.process import Process
from tests.unit.sinks.given import SECOND_NS, entry, event

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from gpuledger.records import GpuEvent
    from tests.real.parts.kafka import Kafka
    from tests.real.parts.kcat import Kcat
    from tests.real.parts.prometheus import PrometheusApi

NODES = [f"node-{number}" for number in range(8)]
SINK = Path(sys.executable).with_name("gpuledger-sink")


class Sink(Process):
    def __init__(self, kind: str, kafka: Kafka, folder: Path, **settings: str) -> None:
        port = free_ports(1)[0]
        self.health = f"http://127.0.0.1:{port}"
        super().__init__(
            name=kind,
            argv=[SINK, kind],
            folder=folder,
            environment={
                "GPULEDGER_KAFKA__BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
                "GPULEDGER_KAFKA__SESSION_TIMEOUT_SECONDS": "6",
                "GPULEDGER_HTTP__LISTEN": f"127.0.0.1:{port}",
                **{f"GPULEDGER_{name.upper()}": value for name, value in settings.items()},
            },
        )

    def is_ready(self) -> bool:
        return web.fetch(f"{self.health}/readyz").status == 200


@pytest.fixture
def start_sink(tmp_path: Path) -> Iterator[Callable[..., Sink]]:
    """Start a sink that does not outlive the test."""
    started: list[Sink] = []

    def start(kind: str, kafka: Kafka, **settings: str) -> Sink:
        sink = Sink(kind, kafka, tmp_path, **settings)
        started.append(sink)
        sink.start()
        return sink

    yield start
    for sink in started:
        sink.kill()


@pytest.fixture
def broker(start_kafka: Callable[[], Kafka]) -> Kafka:
    return start_kafka()


async def publish(to: Kafka, events: Iterable[GpuEvent | bytes]) -> None:
    settings = KafkaSettings(bootstrap_servers=to.bootstrap_servers)
    async with KafkaBus(settings).producer() as producer:
        for one in events:
            node, value = (NODES[0], one) if isinstance(one, bytes) else (one.node, encode(one))
            at = partition_of_node(node, partitions=EVENTS.partitions)
            message = Message(key=node.encode(), value=value, timestamp_ms=time.time_ns() // 10**6)
            await producer.publish(EVENTS.name, at, [message])


async def make_topics(on: Kafka) -> None:
    await create_topics(KafkaSettings(bootstrap_servers=on.bootstrap_servers))


def ticks(count: int, *, first: int = 0) -> list[GpuEvent]:
    start_ns = time.time_ns() - 60 * SECOND_NS
    return [
        event(number, node=node, time_ns=start_ns + number * SECOND_NS, entries=[entry()])
        for number in range(first, first + count)
        for node in NODES
    ]


def stored(folder: Path) -> tuple[Any, ...]:
    sql = (
        "select count(*), count(distinct (kafka_partition, kafka_offset)), sum(busy_seconds) from "
    )
    with duckdb.connect() as connection:
        row = connection.execute(sql + entries_sql(str(folder))).fetchone()
    assert row is not None
    return row


async def test_killed_in_the_middle_again_and_again_the_store_has_each_row_once(
    broker: Kafka, tmp_path: Path, kcat: Kcat, start_sink: Callable[..., Sink]
) -> None:
    await make_topics(broker)
    folder = tmp_path / "store"
    count = 60 * len(NODES)
    await publish(broker, [*ticks(30), b"no event", *ticks(30, first=30)])
    sink = start_sink(
        "store",
        broker,
        store__uri=str(folder),
        store__flush_seconds="0.01",
        store__poll_records="7",
    )
    for rows in (1, 60, 150):
        sink.wait_until(lambda least=rows: count_rows(str(folder)) >= least, deadline_seconds=30)  # type: ignore[misc]  # bound at once
        sink.kill()
        sink.start()
    assert count_rows(str(folder)) < count

    sink.wait_until(lambda: count_rows(str(folder)) >= count, deadline_seconds=60)
    sink.wait_until(sink.is_ready, deadline_seconds=10)
    assert sink.stop(deadline_seconds=10) == 0

    assert stored(folder) == (count, count, count * 0.5)
    letters = kcat.consume(broker.bootstrap_servers, DEAD_LETTERS.name)
    assert letters
    assert all(b"bm8gZXZlbnQ=" in (letter.value or b"") for letter in letters)


async def test_samples_reach_prometheus_from_kafka(
    broker: Kafka, prometheus: PrometheusApi, start_sink: Callable[..., Sink]
) -> None:
    await make_topics(broker)
    await publish(broker, ticks(10))
    sink = start_sink("remote_write", broker, remote_write__url=prometheus.remote_write_url)

    promql = 'count(count_over_time(gpuledger_pod_gpu_busy_ratio{node=~"node-[0-7]"}[5m]) == 10)'
    found = prometheus.await_query(promql, deadline_seconds=30)
    assert float(found[0]["value"][1]) >= 1
    sink.wait_until(
        lambda: (one := prometheus.query(promql)) != [] and float(one[0]["value"][1]) == len(NODES),
        deadline_seconds=15,
    )
    assert sink.is_ready()
    metrics = web.fetch(f"{sink.health}/metrics").body.decode()
    assert 'gpuledger_sink_lag_seconds{sink="remote_write"}' in metrics
    assert sink.stop(deadline_seconds=10) == 0


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["stor"], "gpuledger-sink: kind: there is no sink 'stor'; did you mean 'store'?"),
        ([], "kind: say which sink to run: gpuledger-sink remote_write|alerts|store"),
    ],
)
def test_a_wrong_kind_is_one_line_that_names_the_right_one(
    arguments: list[str], line: str, tmp_path: Path
) -> None:
    sink = Process(name="sink", argv=[SINK, *arguments], folder=tmp_path)
    sink.start()
    sink._running.wait(20)  # type: ignore[union-attr]  # just started

    assert sink.exit_status() == 2
    (said,) = sink.log_tail().splitlines()
    assert line in said
