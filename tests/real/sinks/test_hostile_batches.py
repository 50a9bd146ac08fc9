"""No batch on the events topic ends or blocks a sink: the store, and one that writes to Kafka."""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import aiokafka
import duckdb
import pytest

from gpuledger.codec import encode
from gpuledger.keys import key_in, node_key
from gpuledger.store.query import count_rows, entries_sql, gaps_sql
from gpuledger.topics import partition_of_node
from tests.default_topics import DEAD_LETTERS, EVENTS, ROWS
from tests.raw_batches import Raw
from tests.real.hostile_batches import HOSTILE, LEGAL, committed, max_memory_bytes, write
from tests.real.services import web
from tests.real.sinks.running_sinks import NODES, make_topics, publish, ticks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gpuledger.records import GpuEvent
    from tests.real.services.kafka import Kafka
    from tests.real.services.kcat import Kcat
    from tests.real.sinks.running_sinks import Sink

NODE = NODES[0]
AT = aiokafka.TopicPartition(
    EVENTS.name, partition_of_node(key_in("default", NODE), partitions=EVENTS.partitions)
)
Span = tuple[int, int]


class Written:
    """The content of the topic: events that must arrive, and offsets that cannot be read."""

    def __init__(self) -> None:
        self.seqs: list[int] = []
        self.unreadable: list[Span] = []
        self.end = 0


def of_one_node(first: int, count: int) -> list[GpuEvent]:
    return [event for event in ticks(count, first=first) if event.node == NODE]


def raw(events: list[GpuEvent]) -> list[Raw]:
    return [Raw(node_key(event).encode(), encode(event)) for event in events]


async def write_everything(broker: Kafka) -> Written:
    """Write events, and between them batches that are unreadable or hard to read."""
    written, first = Written(), 0
    for name, how in {**HOSTILE, **LEGAL}.items():
        await publish(broker, good := of_one_node(first, 2))
        written.seqs += [event.seq for event in good]
        events = of_one_node(first + 2, 3)
        span = await write(broker, AT, how, raw(events))
        if name in HOSTILE:
            written.unreadable.append(span)
        else:
            written.seqs += [event.seq for event in events]
        first += 10
    await publish(broker, last := of_one_node(first, 1))
    written.seqs += [event.seq for event in last]
    written.end = len(written.seqs) + sum(last - first + 1 for first, last in written.unreadable)
    return written


async def await_committed(sink: Sink, broker: Kafka, group: str, offset: int) -> None:
    deadline = time.monotonic() + 60
    while await committed(broker, group, AT) != offset:
        assert sink.exit_status() is None, sink.log_tail()
        assert time.monotonic() < deadline, sink.log_tail()
        time.sleep(0.3)  # noqa: ASYNC251  # nothing else runs in this loop


def dead_letters(broker: Kafka, kcat: Kcat) -> list[Span]:
    """Return the offsets of the dead letters, which contain only the place and the reason."""
    found = values(broker, kcat, DEAD_LETTERS.name)
    assert {(each["topic"], each["partition"], each["reason"]) for each in found} == {
        (*AT, "unreadable")
    }
    return sorted((each["offset"], each["last_offset"]) for each in found)


def values(broker: Kafka, kcat: Kcat, topic: str) -> list[dict[str, Any]]:
    return [json.loads(each.value or b"") for each in kcat.consume(broker.bootstrap_servers, topic)]


def query(relation: str, columns: str) -> list[tuple[Any, ...]]:
    with duckdb.connect() as connection:
        return connection.sql(f"FROM {relation}").project(columns).order("ALL").fetchall()


@pytest.fixture
async def written(broker: Kafka) -> Written:
    await make_topics(broker)
    return await write_everything(broker)


async def test_the_store_has_all_events_once_and_a_row_for_each_batch_that_it_cannot_read(
    broker: Kafka, kcat: Kcat, tmp_path: Path, start_sink: Callable[..., Sink], written: Written
) -> None:
    folder = str(tmp_path / "store")
    settings = {"store__uri": folder, "store__entries": "true", "store__flush_seconds": "0.05"}
    sink = start_sink("store", broker, **settings)
    await await_committed(sink, broker, "gpuledger-store", written.end)

    assert max_memory_bytes(sink.pid) < 600 * 2**20
    checks = web.fetch(f"{sink.health}/readyz").json()["checks"]
    assert all(check["ok"] for check in checks.values()), checks
    assert sink.stop(deadline_seconds=120) == 0
    again = start_sink("store", broker, **settings)
    again.wait_until(again.is_ready, deadline_seconds=120)
    await publish(broker, more := of_one_node(900, 1))
    again.wait_until(lambda: count_rows(folder) >= len(written.seqs) + 1, deadline_seconds=120)

    seqs = [seq for (seq,) in query(entries_sql(folder), "seq")]
    assert seqs == sorted([*written.seqs, more[0].seq])
    wanted = "kafka_partition, reason, first_offset, next_offset, missed_offsets"
    assert query(gaps_sql(folder), wanted) == [
        (AT.partition, "unreadable", first, last + 1, last - first + 1)
        for first, last in written.unreadable
    ]
    assert dead_letters(broker, kcat) == written.unreadable


async def test_a_sink_that_writes_to_kafka_skips_no_event_and_repeats_none(
    broker: Kafka, kcat: Kcat, start_sink: Callable[..., Sink], written: Written
) -> None:
    sink = start_sink("rows", broker)
    await await_committed(sink, broker, "gpuledger-rows", written.end)

    assert max_memory_bytes(sink.pid) < 400 * 2**20
    rows = Counter(row["seq"] for row in values(broker, kcat, ROWS.name))
    assert rows == Counter(written.seqs)
    assert dead_letters(broker, kcat) == written.unreadable
