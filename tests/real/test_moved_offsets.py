"""An operator moves the offsets of the stopped join with Kafka's own tool."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest

from benchmarks.ticks import SEQ_PER_TICK
from gpuledger.bus.administration import create_topics
from gpuledger_enricher.join.join_settings import GROUP
from tests.default_topics import SAMPLES
from tests.real.changed_topics import recreate
from tests.real.join_workers import PARTITIONS, JoinWorkers, committed_consumer, partition_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.real.end_to_end.components import Component
    from tests.real.services.kafka import Kafka

TOOL = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"
DEADLINE_SECONDS = 120.0


@pytest.fixture
def kafka(start_kafka: Callable[[], Kafka]) -> Kafka:
    return start_kafka()


@pytest.fixture
def workers(kafka: Kafka, tmp_path: Path) -> Iterator[JoinWorkers]:
    made = JoinWorkers(servers=kafka.bootstrap_servers, folder=tmp_path, nodes=1, environment={})
    yield made
    made.end()


def reset_offsets(kafka: Kafka, *to: str) -> None:
    """Reset the offsets of the samples in all partitions."""
    at = ["--bootstrap-server", kafka.bootstrap_servers, "--group", GROUP]
    kafka.run_tool(TOOL, *at, "--topic", SAMPLES.name, "--reset-offsets", *to, "--execute")


async def events(workers: JoinWorkers, *, until: int) -> list[int]:
    """Return the numbers of the ticks that have events, up to the tick `until`."""
    found: list[int] = []
    consumer = committed_consumer(workers.settings.bootstrap_servers)
    await consumer.start()
    consumer.assign(PARTITIONS)
    end = time.monotonic() + DEADLINE_SECONDS
    try:
        while until not in found and time.monotonic() < end:
            for records in (await consumer.getmany(timeout_ms=200)).values():
                found += [json.loads(record.value)["seq"] // SEQ_PER_TICK for record in records]
    finally:
        await consumer.stop()
    return found


async def test_a_samples_topic_that_is_recreated_while_the_join_is_stopped_is_a_gap_once(
    kafka: Kafka, workers: JoinWorkers
) -> None:
    """Although Kafka deletes the group's offsets with the topic."""
    await create_topics(workers.settings)
    await workers.publish_ticks(range(1, 4))
    worker = workers.start()
    assert await events(workers, until=3) == [1, 2, 3]
    assert worker.stop() == 0
    await workers.publish_ticks([4])
    await recreate(workers.settings, SAMPLES)
    await workers.publish_ticks([5, 6])

    worker.start()

    assert await events(workers, until=6) == [1, 2, 3, 5, 6]
    worker.wait_until_ready()
    at = f"{SAMPLES.name}[{partition_of(0)}]"
    assert f"1; the last one in {at} from offset 3: an unknown number of" in gaps(worker)
    assert "(topic_recreated)" in gaps(worker)
    assert worker.stop() == 0

    worker.start()
    worker.wait_until_ready()
    assert gaps(worker) == "no record was missed"


def gaps(worker: Component) -> str:
    return str(worker.readyz()["checks"]["gaps"]["detail"])


async def test_ticks_that_an_operator_skips_are_a_gap_and_repeated_ones_are_booked_once(
    kafka: Kafka, workers: JoinWorkers
) -> None:
    await create_topics(workers.settings)
    await workers.publish_ticks(range(1, 4))
    worker = workers.start()
    assert await events(workers, until=3) == [1, 2, 3]
    assert worker.stop() == 0
    await workers.publish_ticks(range(4, 7))
    reset_offsets(kafka, "--to-latest")

    worker.start()
    await workers.publish_ticks([7])

    assert await events(workers, until=7) == [1, 2, 3, 7]
    worker.wait_until_ready()
    at = f"{SAMPLES.name}[{partition_of(0)}]"
    assert f"1; the last one in {at} from offset 3 to offset 6: 3 offsets (moved" in gaps(worker)
    (line,) = [
        json.loads(line) for line in worker.log_tail().splitlines() if "records_missed" in line
    ]
    assert (line["reason"], line["first_offset"], line["count"]) == ("moved", 3, 3)
    assert worker.stop() == 0

    reset_offsets(kafka, "--to-earliest")
    worker.start()
    await workers.publish_ticks([8])

    # Ticks 4 to 6 are older than the last booked one, so they count as duplicates.
    assert await events(workers, until=8) == [1, 2, 3, 7, 8]
    assert gaps(worker) == "no record was missed"
