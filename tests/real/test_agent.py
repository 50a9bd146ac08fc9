"""The agent as a process over a real broker that goes away and comes back."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpuledger.bus.administration import create_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Subscription
from gpuledger.codec import decoder_of
from gpuledger.keys import key_in
from gpuledger.records import NodeReadings, NodeSample, ProcessRecord
from gpuledger.settings import KafkaSettings
from tests.default_topics import PROCESSES, READINGS, SAMPLES
from tests.real.end_to_end.components import Component

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.real.services.kafka import Kafka

QUICKSTART = Path(__file__).parents[2] / "scenarios" / "quickstart.yaml"
NODE = "gpu-node-2"
MOST_WITHOUT_READINGS = 10


def agent_of(
    kafka: Kafka, folder: Path, *, scenario: Path = QUICKSTART, **settings: str
) -> Component:
    return Component(
        name="agent",
        command=["gpuledger", "agent", "--source", f"simulated:{scenario}"],
        folder=folder,
        environment={
            "KAFKA__BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
            "KAFKA__REQUEST_TIMEOUT_SECONDS": "5",
            "NODE_NAME": NODE,
            **settings,
        },
    )


@dataclass
class Read:
    """The records that the agent has published."""

    samples: list[NodeSample] = field(default_factory=list)
    readings: list[NodeReadings] = field(default_factory=list)
    processes: list[ProcessRecord] = field(default_factory=list)

    def take(self, topic: str, value: bytes | None) -> None:
        if topic == SAMPLES.name:
            self.samples.append(decoder_of(topic, NodeSample).decode(value))
        elif topic == READINGS.name:
            self.readings.append(decoder_of(topic, NodeReadings).decode(value))
        else:
            self.processes.append(decoder_of(topic, ProcessRecord).decode(value))


async def read_all(kafka: Kafka) -> Read:
    bus = KafkaBus(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers))
    read = Read()
    topics = [SAMPLES.name, READINGS.name, PROCESSES.name]
    subscription = Subscription(group="test", topics=topics)
    end_seconds = time.monotonic() + 120
    async with bus.consumer(subscription) as consumer:
        while time.monotonic() < end_seconds:
            batches = await consumer.poll(timeout_seconds=2, max_records=500)
            if read.samples and not batches:
                break
            for record in (one for batch in batches.values() for one in batch):
                assert record.key == key_in("default", NODE).encode()
                read.take(record.topic, record.value)
    return read


def dropped(agent: Component) -> float:
    """Return how many ticks the agent reports as dropped."""
    return agent.metric("gpuledger_agent_samples_dropped_total")


PUBLISHED = f'gpuledger_agent_records_published_total{{topic="{SAMPLES.name}"}}'


async def until_published(agent: Component, *, more_than: float) -> float:
    """Return how many ticks the broker has acknowledged, once there are more than this."""
    async with asyncio.timeout(120):
        while (count := agent.metric(PUBLISHED)) <= more_than:  # noqa: ASYNC110  # a process
            await asyncio.sleep(0.1)
        return count


def assert_readings_are_in_order_and_whole(readings: list[int], samples: list[int]) -> None:
    """Assert that each reading belongs to a sample, in the samples' order, and no batch is lost.

    On a busy machine a GPU may answer for a sample in time and for its other readings too late;
    such a sample has none. A lost batch would leave 60 consecutive samples without readings.
    """
    have = set(readings)
    assert readings == [seq for seq in samples if seq in have]
    without = [len(list(run)) for found, run in groupby(samples, have.__contains__) if not found]
    assert max(without, default=0) < MOST_WITHOUT_READINGS


async def test_a_broker_that_was_unavailable_gets_every_tick_in_order(
    start_kafka: Callable[[], Kafka], tmp_path: Path
) -> None:
    kafka = start_kafka()
    await create_topics(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers))
    agent = agent_of(kafka, tmp_path, SAMPLING_INTERVAL_SECONDS="0.25", READINGS_SECONDS="0.25")
    agent.start()
    agent.wait_until_ready()
    published = await until_published(agent, more_than=0)
    kafka.kill()
    await asyncio.sleep(4)
    kafka.start()
    await until_published(agent, more_than=published + 4 / 0.25)
    assert dropped(agent) == 0
    assert agent.stop() == 0, agent.log_tail()
    read = await read_all(kafka)
    # A broker that is killed during a request may store a batch twice; consumers identify a tick by
    # seq.
    once = list({sample.seq: sample for sample in read.samples}.values())
    assert [sample.seq for sample in once] == sorted(sample.seq for sample in once)
    assert (once[-1].time_ns - once[0].time_ns) / 1e9 > 4
    for before, after in pairwise(once):
        assert after.time_ns - before.time_ns == pytest.approx(after.interval_ns, abs=100_000_000)
    assert {record.node for record in read.processes} == {NODE}
    readings = list(dict.fromkeys(record.seq for record in read.readings))
    assert_readings_are_in_order_and_whole(readings, [one.seq for one in once])
    assert all(gpu.throttling for record in read.readings for gpu in record.gpus)


async def test_without_a_broker_the_oldest_ticks_are_dropped_and_counted_and_the_exit_is_clean(
    start_kafka: Callable[[], Kafka], tmp_path: Path
) -> None:
    kafka = start_kafka()
    kafka.kill()
    agent = agent_of(kafka, tmp_path, SAMPLING_INTERVAL_SECONDS="0.25", QUEUE_SAMPLES="4")
    agent.start()
    end_seconds = time.monotonic() + 30
    while time.monotonic() < end_seconds:
        try:
            if dropped(agent) > 2:
                break
        except OSError:
            pass
        await asyncio.sleep(0.2)
    assert dropped(agent) > 2
    assert agent.stop() == 0, agent.log_tail()
