"""The sinks as their users run them: separate processes over a real Kafka."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import duckdb
import pytest

from gpuledger.store.query import count_rows, entries_sql
from tests.default_topics import DEAD_LETTERS, EVENTS
from tests.real.services import web
from tests.real.services.ports import free_ports
from tests.real.services.process import Process
from tests.real.sinks.running_sinks import NODES, SINK, Sink, make_topics, publish, ticks
from tests.unit.sinks.builders import SECOND_NS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.real.services.kafka import Kafka
    from tests.real.services.kcat import Kcat
    from tests.real.services.prometheus import PrometheusApi


def metric(sink: Sink, name: str) -> float:
    lines = web.fetch(f"{sink.health}/metrics").body.decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))


def stored(folder: Path) -> tuple[Any, ...]:
    sql = "select count(*), count(distinct (kafka_partition, kafka_offset)), sum(busy_ns) from "
    with duckdb.connect() as connection:
        row = connection.execute(sql + entries_sql(str(folder))).fetchone()
    assert row is not None
    return row


async def test_the_store_has_each_row_once_after_repeated_kills_during_its_work(
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
        store__entries="true",
        store__flush_seconds="0.01",
        store__max_poll_records="7",
    )
    for rows in (1, 60, 150):
        sink.wait_until(lambda least=rows: count_rows(str(folder)) >= least, deadline_seconds=120)  # type: ignore[misc]  # bound at once
        sink.kill()
        sink.start()
    assert count_rows(str(folder)) < count

    sink.wait_until(lambda: count_rows(str(folder)) >= count, deadline_seconds=120)
    sink.wait_until(sink.is_ready, deadline_seconds=120)
    assert sink.stop(deadline_seconds=120) == 0

    assert stored(folder) == (count, count, count * SECOND_NS // 2)
    dead_letters = kcat.consume(broker.bootstrap_servers, DEAD_LETTERS.name)
    assert dead_letters
    assert all(b"bm8gZXZlbnQ=" in (dead_letter.value or b"") for dead_letter in dead_letters)


async def test_samples_reach_prometheus_from_kafka(
    broker: Kafka, prometheus: PrometheusApi, start_sink: Callable[..., Sink]
) -> None:
    await make_topics(broker)
    await publish(broker, ticks(10))
    sink = start_sink(
        "remote_write",
        broker,
        remote_write__url=prometheus.remote_write_url,
        remote_write__interval_seconds="0",
    )

    promql = 'count(count_over_time(gpuledger_pod_gpu_busy_ratio{node=~"node-[0-7]"}[5m]) == 10)'
    found = prometheus.await_query(promql, deadline_seconds=120)
    assert float(found[0]["value"][1]) >= 1
    sink.wait_until(
        lambda: (one := prometheus.query(promql)) != [] and float(one[0]["value"][1]) == len(NODES),
        deadline_seconds=120,
    )
    assert sink.is_ready()
    metrics = web.fetch(f"{sink.health}/metrics").body.decode()
    assert 'gpuledger_sink_lag_seconds{sink="remote_write"}' in metrics
    assert sink.stop(deadline_seconds=120) == 0


async def test_an_outage_of_the_receiver_is_one_line_when_it_starts_and_the_lag_shows_it(
    broker: Kafka, start_sink: Callable[..., Sink]
) -> None:
    await make_topics(broker)
    await publish(broker, ticks(3))
    url = f"http://user:secret@127.0.0.1:{free_ports(1)[0]}/api/v1/write"
    sink = start_sink(
        "remote_write", broker, remote_write__url=url, remote_write__interval_seconds="0"
    )

    sink.wait_until(lambda: metric(sink, "gpuledger_sink_retries_total") >= 5, deadline_seconds=120)
    before = metric(sink, "gpuledger_sink_lag_seconds")
    assert before > 0
    sink.wait_until(
        lambda: metric(sink, "gpuledger_sink_lag_seconds") > before, deadline_seconds=120
    )
    assert sink.stop(deadline_seconds=120) == 0

    assert "secret" not in sink.log_tail()
    lines = [json.loads(line) for line in sink.log_tail().splitlines()]
    first = lines[0]
    assert (first["event"], first["sink"]) == ("service_started", "remote_write")
    assert first["brokers"] == broker.bootstrap_servers
    (started,) = [
        line
        for line in lines
        if line["event"] == "sink_started" and not line["group"].endswith("-replay")
    ]
    assert (started["sink"], started["group"]) == ("remote_write", "gpuledger-remote-write")
    assert started["receiver"] == url.replace("user:secret@", "")
    (assigned,) = [
        line
        for line in lines
        if line["event"] == "partitions_assigned" and EVENTS.name in line["partitions"]
    ]
    assert len(assigned["partitions"][EVENTS.name]) == EVENTS.partitions
    own = [line for line in lines if line["logger"].startswith("gpuledger")]
    loud = [line for line in own if line["level"] in ("warning", "error")]
    assert [(line["event"], line.get("check")) for line in loud] == [
        ("check_failed", "remote_write.receiver")
    ]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["stor"], "gpuledger sink: kind: unknown sink: 'stor'; did you mean 'store'?"),
        ([], "kind: missing value; run gpuledger sink remote_write|alerts|store|rows"),
    ],
)
def test_a_wrong_kind_is_one_line_that_names_the_right_one(
    arguments: list[str], line: str, tmp_path: Path
) -> None:
    sink = Process(name="sink", argv=[*SINK, *arguments], folder=tmp_path)
    sink.start()
    assert sink.wait_exit(deadline_seconds=120) == 2
    (message,) = sink.log_tail().splitlines()
    assert line in message
