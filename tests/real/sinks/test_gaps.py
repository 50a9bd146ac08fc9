"""Events that were removed before a sink read them, on a real Kafka: reported everywhere."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import duckdb
import pytest

from gpuledger.bus.protocol import TopicPartition
from gpuledger.keys import key_in
from gpuledger.settings import KafkaSettings
from gpuledger.store.query import count_rows, entries_sql, gaps_sql
from gpuledger.topics import partition_of_node
from tests.default_topics import EVENTS
from tests.real.changed_topics import recreate, remove_before, spans
from tests.real.services import web
from tests.real.sinks.running_sinks import NODES, make_topics, publish, ticks

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from tests.real.services.kafka import Kafka
    from tests.real.sinks.running_sinks import Sink

    Begin = Callable[..., Awaitable[Sink]]

NODE = NODES[0]
AT = TopicPartition(
    EVENTS.name, partition_of_node(key_in("default", NODE), partitions=EVENTS.partitions)
)
FEW, MANY = 5, 20


def settings_of(broker: Kafka) -> KafkaSettings:
    return KafkaSettings(bootstrap_servers=broker.bootstrap_servers)


def of_one_node(count: int, *, first: int = 0) -> list[Any]:
    return [event for event in ticks(count, first=first) if event.node == NODE]


def store_into(folder: Path, **others: str) -> dict[str, str]:
    return {
        "store__uri": str(folder),
        "store__entries": "true",
        "store__flush_seconds": "0.05",
        **others,
    }


def query(relation: str, columns: str) -> list[tuple[Any, ...]]:
    with duckdb.connect() as connection:
        return connection.sql(f"FROM {relation}").project(columns).order("ALL").fetchall()


def metric(sink: Sink, name: str) -> float:
    lines = web.fetch(f"{sink.health}/metrics").body.decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))


@pytest.fixture
def begin(broker: Kafka, start_sink: Callable[..., Sink]) -> Begin:
    """Start a sink on a broker with a few events, and wait until its receiver has them."""

    async def begin(kind: str, **settings: str) -> Sink:
        await make_topics(broker)
        await publish(broker, of_one_node(FEW))
        sink = start_sink(kind, broker, **settings)
        sink.wait_until(
            lambda: metric(sink, "gpuledger_sink_sent_total") >= FEW, deadline_seconds=120
        )
        return sink

    return begin


@pytest.mark.extended
async def test_the_store_does_not_write_if_a_topic_was_recreated_while_it_was_stopped(
    broker: Kafka, tmp_path: Path, begin: Begin, start_sink: Callable[..., Sink]
) -> None:
    """The new topic is already longer than the stored offsets, so that no offset looks wrong."""
    folder = tmp_path / "store"
    sink = await begin("store", **store_into(folder))
    assert sink.stop(deadline_seconds=120) == 0
    await recreate(settings_of(broker), EVENTS)
    await publish(broker, of_one_node(MANY, first=100))

    sink.start()
    sink.wait_exit(deadline_seconds=120)

    assert sink.exit_status() == 2
    assert "up to offset 4 of another topic of that name" in sink.log_tail()
    assert "store.generation" in sink.log_tail()
    assert count_rows(str(folder)) == FEW
    wanted = "kafka_partition, reason, first_offset, next_offset"
    assert query(gaps_sql(str(folder)), wanted) == [(AT.partition, "topic_recreated", FEW, None)]

    again = start_sink("store", broker, **store_into(folder, store__generation="second"))
    again.wait_until(lambda: count_rows(str(folder)) >= FEW + MANY, deadline_seconds=120)


async def test_the_store_stops_before_it_writes_if_a_topic_is_recreated_while_it_runs(
    broker: Kafka, tmp_path: Path, begin: Begin
) -> None:
    folder = tmp_path / "store"
    sink = await begin("store", **store_into(folder))

    await recreate(settings_of(broker), EVENTS)
    await publish(broker, of_one_node(MANY, first=100))
    sink.wait_exit(deadline_seconds=120)

    assert sink.exit_status() == 2
    assert "of another topic of that name" in sink.log_tail()
    assert count_rows(str(folder)) == FEW


async def test_records_removed_while_the_store_was_stopped_are_logged_counted_shown_and_stored(
    broker: Kafka, tmp_path: Path, begin: Begin
) -> None:
    folder = tmp_path / "store"
    sink = await begin("store", **store_into(folder))
    assert sink.stop(deadline_seconds=120) == 0
    await publish(broker, of_one_node(MANY, first=FEW))
    await remove_before(settings_of(broker), AT, FEW + 12)

    sink.start()
    left = MANY - 12
    sink.wait_until(lambda: count_rows(str(folder)) >= FEW + left, deadline_seconds=120)
    sink.wait_until(sink.is_ready, deadline_seconds=120)

    assert metric(sink, "gpuledger_records_missed_total") == 12
    lines = [json.loads(line) for line in sink.log_tail().splitlines() if "records_missed" in line]
    (line,) = lines
    assert (line["partition"], line["first_offset"], line["count"]) == (AT.partition, FEW, 12)
    check = web.fetch(f"{sink.health}/readyz").json()["checks"]["store.gaps"]
    assert (check["ok"], check["severity"]) == (False, "warning")
    assert f"from offset {FEW}: 12 offsets (retention)" in check["detail"]
    wanted = "kafka_partition, first_offset, next_offset, missed_offsets, time_before < time_after"
    assert query(gaps_sql(str(folder)), wanted) == [(AT.partition, FEW, FEW + 12, 12, True)]
    offsets = {offset for (offset,) in query(entries_sql(str(folder)), "kafka_offset")}
    assert offsets == {*range(FEW), *range(FEW + 12, FEW + MANY)}


async def test_records_removed_while_a_sink_is_suspended_are_reported(
    broker: Kafka, begin: Begin
) -> None:
    sink = await begin("rows")
    sink.send(signal.SIGSTOP)
    await publish(broker, of_one_node(MANY, first=FEW))
    # Responses that were requested before the suspension may still arrive.
    await remove_before(settings_of(broker), AT, FEW + MANY)
    sink.send(signal.SIGCONT)
    await publish(broker, of_one_node(1, first=FEW + MANY))

    sink.wait_until(
        lambda: (
            metric(sink, "gpuledger_sink_sent_total")
            + metric(sink, "gpuledger_records_missed_total")
            >= FEW + MANY + 1
        ),
        deadline_seconds=120,
    )


@pytest.mark.extended
async def test_records_removed_by_retention_are_reported(broker: Kafka, begin: Begin) -> None:
    """Even if all records that the sink missed are gone."""
    short = {**EVENTS.extra, "retention.ms": "2000", "segment.ms": "300"}
    await make_topics(broker)
    await recreate(settings_of(broker), replace(EVENTS, extra=short))
    sink = await begin("rows")
    assert sink.stop(deadline_seconds=120) == 0
    await publish(broker, of_one_node(MANY, first=FEW))
    deadline = time.monotonic() + 60
    # A segment is closed by the next write.
    while (await spans(settings_of(broker), EVENTS.name))[AT].first <= FEW:
        assert time.monotonic() < deadline, "retention has removed nothing"
        await publish(broker, of_one_node(1, first=1000))
        await asyncio.sleep(0.5)

    sink.start()
    missed = "gpuledger_records_missed_total"
    sink.wait_until(lambda: metric(sink, missed) > 0, deadline_seconds=120)
    check = web.fetch(f"{sink.health}/readyz").json()["checks"]["rows.gaps"]
    assert not check["ok"]
