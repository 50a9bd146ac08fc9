"""A join on a real broker reads records that a node may not write: it rejects only those."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, Final

import pytest

from gpuledger.bus.administration import create_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Message, TopicPartition
from gpuledger.codec import encode
from gpuledger.keys import key_in
from gpuledger.records import ContainerRef, DeviceAllocation
from gpuledger.records.bounds import MAX_INTERVAL_NS
from gpuledger.settings import KafkaSettings
from gpuledger.topics import partition_of_node
from tests.default_topics import DEAD_LETTERS, EVENTS, PODS, SAMPLES
from tests.real.end_to_end.components import Component, refuse_stray_settings
from tests.unit.enricher.join.ticks import CONTAINER_IDS, UIDS, pod, process, sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.real.services.kafka import Kafka
    from tests.real.services.kcat import Kcat

NODES: Final = ("node-a", "node-b")
DEADLINE_SECONDS: Final = 120.0


class World:
    """A broker, one worker that holds all partitions, and its output."""

    def __init__(self, *, kafka: Kafka, kcat: Kcat, folder: Path) -> None:
        self._servers, self._kcat = kafka.bootstrap_servers, kcat
        self.settings = KafkaSettings(bootstrap_servers=self._servers)
        self.worker = Component(
            name="join",
            command=["gpuledger", "join"],
            folder=folder / "join",
            environment={
                "KAFKA__BOOTSTRAP_SERVERS": self._servers,
                "JOIN__PODWATCH_TIMEOUT_SECONDS": "0",
            },
        )

    async def put(
        self,
        topic: str,
        record: Any,  # noqa: ANN401 - any record, its bytes, or None for a tombstone
        *,
        key: str,
        node: str,
        time_ms: int | None = None,
    ) -> None:
        """Write a record under a key, to a node's partition."""
        number = partition_of_node(key_in("default", node), partitions=SAMPLES.partitions)
        is_written = record is None or isinstance(record, bytes)
        value = record if is_written else encode(record)
        now_ms = time.time_ns() // 1_000_000 if time_ms is None else time_ms
        async with KafkaBus(self.settings).producer() as producer:
            partition = TopicPartition(topic, number)
            await producer.publish(*partition, [Message(f"default/{key}".encode(), value, now_ms)])

    async def tick(self, node: str, **changes: Any) -> None:  # noqa: ANN401 - as sample() takes them
        """Write a node's tick to its own partition."""
        now_ns = time.time_ns()
        tick = sample(**({"node": node, "time_ns": now_ns} | changes))
        await self.put(SAMPLES.name, tick, key=node, node=node)

    def events(self, count: int) -> list[dict[str, Any]]:
        """Return the events once there are this many, in the order of their `seq`."""
        return sorted(self._read(EVENTS.name, count), key=lambda event: event["seq"])

    def dead_letters(self, count: int) -> list[dict[str, Any]]:
        """Return the dead letters once there are this many."""
        return self._read(DEAD_LETTERS.name, count)

    def _read(self, topic: str, count: int) -> list[dict[str, Any]]:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            found = [
                json.loads(each.value or b"") for each in self._kcat.consume(self._servers, topic)
            ]
            if len(found) >= count or time.monotonic() > deadline:
                assert len(found) == count, self.worker.log_tail()
                return found
            time.sleep(0.3)


@pytest.fixture
def world(start_kafka: Callable[[], Kafka], kcat: Kcat, tmp_path: Path) -> Iterator[World]:
    """Return a broker without topics, and a worker that is not started yet."""
    refuse_stray_settings()
    made = World(kafka=start_kafka(), kcat=kcat, folder=tmp_path)
    yield made
    made.worker.kill()


async def test_another_nodes_pod_is_booked_without_a_name_and_the_rest_of_the_tick_is_kept(
    world: World,
) -> None:
    await create_topics(world.settings)
    for number, node in enumerate(NODES):
        await world.put(PODS.name, pod(number, node=node), key=UIDS[number], node=node)
    world.worker.start()
    world.worker.wait_until_ready()
    containers = [
        ContainerRef(pod_uid=uid, container_id=container)
        for uid, container in zip(UIDS[:2], CONTAINER_IDS[:2], strict=True)
    ]
    processes = [process(container=0), process(container=1, pid=1001)]
    await world.tick("node-a", containers=containers, processes=processes)
    (event,) = world.events(1)
    assert [(each["state"], each.get("name")) for each in event["pods"]] == [
        ("known", "train-0"),
        ("foreign", None),
    ]
    booked = [entry[1:3] for entry in event["gpus"][0]["entries"] if entry[0] == "pod"]
    assert booked == [[0, 250_000_000], [1, 250_000_000]]
    refused = world.worker.metric('gpuledger_join_names_rejected_total{reason="foreign_pod"}')
    assert refused == 1


async def test_a_tick_that_claims_more_than_a_day_is_rejected_and_the_next_is_booked(
    world: World,
) -> None:
    await create_topics(world.settings)
    world.worker.start()
    world.worker.wait_until_ready()
    now_ns = time.time_ns()
    claimed = json.loads(encode(sample(time_ns=now_ns))) | {"interval_ns": MAX_INTERVAL_NS + 1}
    await world.put(SAMPLES.name, json.dumps(claimed).encode(), key="node-a", node="node-a")
    await world.tick("node-a", seq=2000)
    (event,) = world.events(1)
    (dead_letter,) = world.dead_letters(1)
    assert event["seq"] == 2000
    assert dead_letter["reason"] == "undecodable"
    assert "interval_ns" in dead_letter["detail"]


async def test_a_record_outside_of_its_nodes_partition_is_rejected_and_silences_no_node(
    world: World,
) -> None:
    """Ticks and pods of node-a, written with node-b's key and to node-b's partition."""
    await create_topics(world.settings)
    await world.put(PODS.name, pod(0), key=UIDS[0], node="node-a")
    await world.put(PODS.name, pod(0, name="other"), key=UIDS[0], node="node-b")
    await world.put(PODS.name, None, key=UIDS[0], node="node-b")
    world.worker.start()
    world.worker.wait_until_ready()
    ahead = sample(time_ns=time.time_ns(), seq=10**9)
    await world.put(SAMPLES.name, ahead, key="node-b", node="node-b")
    await world.put(SAMPLES.name, ahead, key="node-a", node="node-b")
    containers = [ContainerRef(pod_uid=UIDS[0], container_id=CONTAINER_IDS[0])]
    await world.tick("node-a", containers=containers, processes=[process(container=0)])
    (event,) = world.events(1)
    assert event["seq"] == 1000
    assert [each["name"] for each in event["pods"]] == ["train-0"]
    dead_letters = world.dead_letters(3)
    assert {(each["topic"], each["reason"]) for each in dead_letters} == {
        (PODS.name, "misplaced"),
        (SAMPLES.name, "misplaced"),
    }


async def test_a_tick_with_a_leap_in_seq_is_rejected_and_its_node_continues(world: World) -> None:
    """It has the victim's node, boot, key and partition, and a `seq` that is years ahead."""
    await create_topics(world.settings)
    world.worker.start()
    world.worker.wait_until_ready()
    for seq in (1000, 3 * 366 * 86_400_000, 2000):
        await world.tick("node-a", seq=seq)
    assert [event["seq"] for event in world.events(2)] == [1000, 2000]
    (dead_letter,) = world.dead_letters(1)
    assert (dead_letter["topic"], dead_letter["reason"]) == (SAMPLES.name, "seq_ahead")
    assert world.worker.metric("gpuledger_join_seq_ahead_total") == 1


async def test_a_node_gets_no_allocation_in_the_name_of_another_nodes_pod(world: World) -> None:
    """Its claim stays in the event; the device stays allocated, but without a pod's name."""
    await create_topics(world.settings)
    for number, node in enumerate(NODES):
        await world.put(PODS.name, pod(number, node=node), key=UIDS[number], node=node)
    world.worker.start()
    world.worker.wait_until_ready()
    allocated = [
        DeviceAllocation(
            gpu_uuid="GPU-a",
            device_id=f"GPU-a::{number}",
            resource_name="nvidia.com/gpu",
            namespace="research",
            pod=f"train-{number}",
            container="main",
        )
        for number in range(2)
    ]
    await world.tick("node-a", allocations=allocated, containers=[])
    (event,) = world.events(1)
    holders = [event["pods"][each[0]] for each in event["allocations"]]
    assert [(each.get("uid"), each["state"]) for each in holders] == [
        (UIDS[0], "known"),
        (None, "foreign"),
    ]
    assert "name" not in holders[1]
    idle = [(entry[2], entry[5]) for entry in event["gpus"][0]["entries"] if entry[0] == "idle"]
    assert idle == [(250_000_000, 0), (250_000_000, 1)]
