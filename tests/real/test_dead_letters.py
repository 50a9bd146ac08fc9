"""While the topic of dead letters is missing, no rejection is counted or logged."""

from __future__ import annotations

import asyncio
import json
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from gpuledger.bus.administration import create_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Message
from gpuledger.settings import KafkaSettings
from tests.default_topics import DEAD_LETTERS, EVENTS, SAMPLES, TOPICS
from tests.real.changed_topics import delete
from tests.real.end_to_end.components import Component, refuse_stray_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.real.services.kafka import Kafka
    from tests.real.services.kcat import Kcat

DEADLINE_SECONDS = 120.0
DEAD_LETTERS_TOTAL = "gpuledger_dead_letters_total"
COMMANDS = {
    "join": ["gpuledger", "join"],
    "rows": ["gpuledger", "sink", "rows"],
    "store": ["gpuledger", "sink", "store"],
}
UNDONE = {
    "join": "gpuledger_join_transactions_aborted_total",
    "rows": "gpuledger_sink_retries_total",
}
"""The counters of consumers that read a record again if its dead letter could not be written."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str, Kafka], Component]]:
    refuse_stray_settings()
    started: list[Component] = []

    def start(name: str, kafka: Kafka) -> Component:
        own = {
            "join": {
                "JOIN__COMMIT_INTERVAL_SECONDS": "0.1",
                "JOIN__PODWATCH_TIMEOUT_SECONDS": "0",
            },
            "store": {
                "STORE__URI": str(tmp_path / "table"),
                "STORE__ENTRIES": "true",
                "STORE__FLUSH_SECONDS": "0.1",
            },
        }
        servers = {"KAFKA__BOOTSTRAP_SERVERS": kafka.bootstrap_servers}
        one = Component(
            name=name,
            command=COMMANDS[name],
            folder=tmp_path / name,
            environment=servers | own.get(name, {}),
        )
        started.append(one)
        one.start()
        return one

    yield start
    for each in started:
        each.kill()


def total(of: Component, name: str) -> float:
    lines = of.metrics().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))


def has_counted(of: Component, name: str, *, least: float) -> bool:
    return total(of, name) >= least


def rejected(of: Component) -> list[int]:
    lines = [line for line in of.log.read_text().splitlines() if '"records_rejected"' in line]
    return [json.loads(line)["count"] for line in lines]


def reports_waiting_dead_letters(one: Component) -> bool:
    failed = [check for check in one.readyz()["checks"].values() if not check["ok"]]
    return any(
        "1 dead-letter record waits to be published: " in check["detail"]
        and DEAD_LETTERS.name in check["detail"]
        for check in failed
    )


async def until(holds: Callable[[], bool], one: Component) -> None:
    end = time.monotonic() + DEADLINE_SECONDS
    while not await asyncio.to_thread(holds):
        assert time.monotonic() < end, f"{one.name}: {one.readyz()}"
        await asyncio.sleep(0.2)


async def test_a_record_is_counted_and_logged_as_rejected_once_its_dead_letter_is_on_the_topic(
    start_kafka: Callable[[], Kafka], start: Callable[[str, Kafka], Component], kcat: Kcat
) -> None:
    kafka = await asyncio.to_thread(start_kafka)
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    await create_topics(settings, TOPICS)
    running = {name: start(name, kafka) for name in COMMANDS}
    for one in running.values():
        one.wait_until_ready()
    await delete(settings, DEAD_LETTERS)
    async with KafkaBus(settings).producer() as producer:
        for topic in (SAMPLES, EVENTS):
            message = Message(b"x", b"no json", time.time_ns() // 1_000_000)
            await producer.publish(topic.name, 0, [message])

    for name, one in running.items():
        await until(partial(reports_waiting_dead_letters, one), one)
        if name in UNDONE:
            await until(partial(has_counted, one, UNDONE[name], least=3), one)
    for one in running.values():
        assert (total(one, DEAD_LETTERS_TOTAL), rejected(one)) == (0, [])

    await create_topics(settings, [DEAD_LETTERS])
    for one in running.values():
        await until(partial(has_counted, one, DEAD_LETTERS_TOTAL, least=1), one)
        one.wait_until_ready()
    dead_letters = kcat.consume(kafka.bootstrap_servers, DEAD_LETTERS.name)
    assert len(dead_letters) == len(running)
    for one in running.values():
        assert (total(one, DEAD_LETTERS_TOTAL), rejected(one)) == (1, [1])
