"""The sinks that write to Kafka, as processes over a real one: each row once."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from gpuledger.codec import Decoder
from gpuledger.keys import key_in
from gpuledger.ledger.rows import EntryRow
from gpuledger.records import GpuEvent
from gpuledger.topics import partition_of_node
from tests.default_topics import DEAD_LETTERS, EVENTS, ROWS
from tests.real.sinks.running_sinks import Sink, make_topics, publish, ticks

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.real.services.kafka import Kafka
    from tests.real.services.kcat import Kcat, KcatMessage

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


def wait_for_rows(sink: Sink, of: Kafka, by: Kcat, *, least: int, seconds: float = 300) -> None:
    def are_there() -> bool:
        time.sleep(0.1)  # each check is a process
        return len(rows(of, by)) >= least

    sink.wait_until(are_there, deadline_seconds=seconds)


@pytest.mark.extended
async def test_after_repeated_kills_each_row_is_there_once_for_any_client(
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
    sink.wait_until(sink.is_ready, deadline_seconds=300)
    assert sink.stop(deadline_seconds=300) == 0
    found = rows(broker, kcat)
    assert identities(found) == expected(events)
    for message in found:
        node = json.loads(message.value or b"")["node"]
        assert message.key == key_in("default", node).encode()
        assert message.partition == partition_of_node(
            key_in("default", node), partitions=EVENTS.partitions
        )
    (dead_letter,) = kcat.consume(broker.bootstrap_servers, DEAD_LETTERS.name)
    assert b"bm8gZXZlbnQ=" in (dead_letter.value or b"")


async def test_a_sink_that_was_suspended_while_another_took_over_writes_nothing_twice(
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
        sink.wait_until(sink.is_ready, deadline_seconds=300)
        assert sink.stop(deadline_seconds=300) == 0

    assert identities(rows(broker, kcat)) == expected(events)


async def test_a_broker_that_dies_and_comes_back_loses_no_row(
    broker: Kafka, kcat: Kcat, start_sink: Callable[..., Sink]
) -> None:
    await make_topics(broker)
    events = ticks(20)
    await publish(broker, events[:120])
    sink = start_sink("rows", broker, **EAGER)
    wait_for_rows(sink, broker, kcat, least=40)
    broker.kill()
    sink.wait_until(lambda: not sink.is_ready(), deadline_seconds=300)
    broker.start()
    await publish(broker, events[120:])

    wait_for_rows(sink, broker, kcat, least=len(events))
    sink.wait_until(sink.is_ready, deadline_seconds=300)
    assert identities(rows(broker, kcat)) == expected(events)
    broker.kill()
    assert sink.stop(deadline_seconds=300) == 0
