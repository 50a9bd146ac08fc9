"""The agent as a process over a real broker that goes away and comes back."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpuledger.bus.administration import create_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Subscription
from gpuledger.codec import decoder_of
from gpuledger.records import NodeSample, ProcessRecord
from gpuledger.settings import KafkaSettings
from gpuledger.topics import PROCESSES, SAMPLES
from tests.real.end_to_end.deployables import Deployable

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.real.parts.kafka import Kafka

QUICKSTART = Path(__file__).parents[2] / "scenarios" / "quickstart.yaml"
NODE = "gpu-node-2"


def agent_of(kafka: Kafka, folder: Path, **settings: str) -> Deployable:
    return Deployable(
        name="agent",
        command=["gpuledger-agent", "--source", f"simulated:{QUICKSTART}"],
        folder=folder,
        environment={
            "KAFKA__BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
            "KAFKA__REQUEST_TIMEOUT_SECONDS": "5",
            "NODE_NAME": NODE,
            **settings,
        },
    )


async def read_all(kafka: Kafka) -> tuple[list[NodeSample], list[ProcessRecord]]:
    bus = KafkaBus(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers))
    samples: list[NodeSample] = []
    processes: list[ProcessRecord] = []
    subscription = Subscription(group="test", topics=[SAMPLES.name, PROCESSES.name])
    end_seconds = time.monotonic() + 30
    async with bus.consumer(subscription) as consumer:
        while time.monotonic() < end_seconds:
            batches = await consumer.poll(timeout_seconds=2, max_records=500)
            if samples and not batches:
                break
            for record in (one for batch in batches.values() for one in batch):
                assert record.key == NODE.encode()
                if record.topic == SAMPLES.name:
                    samples.append(decoder_of(SAMPLES.name, NodeSample).decode(record.value))
                else:
                    processes.append(decoder_of(PROCESSES.name, ProcessRecord).decode(record.value))
    return samples, processes


def dropped(agent: Deployable) -> float:
    """Give the ticks that the agent says it dropped."""
    return agent.metric("gpuledger_agent_ticks_dropped_total")


async def test_a_broker_that_was_away_gets_every_tick_in_order(
    start_kafka: Callable[[], Kafka], tmp_path: Path
) -> None:
    kafka = start_kafka()
    await create_topics(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers))
    agent = agent_of(kafka, tmp_path, TICK_SECONDS="0.25")
    agent.start()
    agent.wait_until_ready()
    kafka.kill()
    await asyncio.sleep(4)
    kafka.start()
    agent.wait_until_ready()
    assert dropped(agent) == 0
    assert agent.stop() == 0, agent.log_tail()
    samples, processes = await read_all(kafka)
    # Killed in mid-answer, a broker may hold a batch twice; readers know a tick by its seq.
    once = list({sample.seq: sample for sample in samples}.values())
    assert [sample.seq for sample in once] == sorted(sample.seq for sample in once)
    assert (once[-1].time_ns - once[0].time_ns) / 1e9 > 4
    for before, after in pairwise(once):
        assert after.time_ns - before.time_ns == pytest.approx(after.interval_ns, abs=5_000_000)
    assert {record.node for record in processes} == {NODE}


async def test_without_a_broker_the_oldest_ticks_are_dropped_and_counted_and_the_end_is_clean(
    start_kafka: Callable[[], Kafka], tmp_path: Path
) -> None:
    kafka = start_kafka()
    kafka.kill()
    agent = agent_of(kafka, tmp_path, TICK_SECONDS="0.25", QUEUE_TICKS="4")
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
    began_seconds = time.monotonic()
    assert agent.stop() == 0, agent.log_tail()
    assert time.monotonic() - began_seconds < 10
