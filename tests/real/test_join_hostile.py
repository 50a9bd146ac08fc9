"""No batch or record on Kafka ends or blocks the join: real workers, and unusable input."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from benchmarks.ticks import SEQ_PER_TICK, Fleet, node_name
from gpuledger.bus.administration import create_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Message
from gpuledger.clock import SystemClock
from gpuledger.codec import encode
from gpuledger.keys import key_in
from gpuledger.records import Incident, IncidentProcess, Severity
from gpuledger.records.bounds import MAX_INCIDENT_PROCESSES
from gpuledger.runtime import Check
from gpuledger.settings import KafkaSettings
from gpuledger.topics import Topic, partition_of_node
from gpuledger_enricher.podwatch.kinds import POD
from gpuledger_enricher.podwatch.publish import read_known
from tests.default_topics import (
    DEAD_LETTERS,
    EVENTS,
    INCIDENTS,
    PODS,
    PROCESSES,
    PROGRESS,
    SAMPLES,
    TOPICS,
)
from tests.raw_batches import ZSTD, Raw, pack
from tests.real.end_to_end.components import Component, refuse_stray_settings
from tests.real.hostile_batches import (
    HEADERS,
    HOSTILE,
    LEGAL,
    Hostile,
    committed,
    max_memory_bytes,
    write,
)
from tests.real.test_replay import replay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from tests.real.services.kafka import Kafka
    from tests.real.services.kcat import Kcat

NODE, OTHER = node_name(0), node_name(1)
GROUP = "gpuledger-join"
DEADLINE_SECONDS = 120.0
MAX_CHARACTERS = 1_100
BEFORE, AFTER = range(5), range(100, 105)
PLAIN = Hostile(lambda data: pack(data, ZSTD), ZSTD)
DeadLetterFields = tuple[str, int, int | None, str]


def partition_of(topic: str, node: str = NODE) -> TopicPartition:
    return TopicPartition(
        topic, partition_of_node(key_in("default", node), partitions=SAMPLES.partitions)
    )


class Scene:
    """A broker with ticks, unusable records between them, and a worker."""

    def __init__(self, *, kafka: Kafka, kcat: Kcat, folder: Path) -> None:
        self.kafka = kafka
        self._kcat = kcat
        self._fleet = Fleet(nodes=2)
        self._settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
        self.bus = KafkaBus(self._settings)
        self._published = 0
        self.worker = Component(
            name="join",
            command=["gpuledger", "join"],
            folder=folder,
            environment={
                "KAFKA__BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
                "KAFKA__SESSION_TIMEOUT_SECONDS": "6",
                "JOIN__PODWATCH_TIMEOUT_SECONDS": "0",
            },
        )

    async def make_topics(self, topics: Iterable[Topic] = TOPICS) -> None:
        await create_topics(self._settings, topics)

    def tick(self, number: int, node: int = 0) -> Raw:
        return Raw(f"default/{node_name(node)}".encode(), encode(self._fleet.tick(node, number)))

    async def publish_ticks(self, numbers: range) -> None:
        """Publish ticks of both nodes, which are in different partitions."""
        now_ms = time.time_ns() // 1_000_000
        self._published += len(numbers)
        async with self.bus.producer() as producer:
            for node in range(2):
                ticks = [self.tick(number, node) for number in numbers]
                messages = [Message(each.key, each.value, now_ms) for each in ticks]
                partition = partition_of(SAMPLES.name, node_name(node)).partition
                await producer.publish(SAMPLES.name, partition, messages)

    def read(self, topic: str) -> list[dict[str, Any]]:
        found = self._kcat.consume(self.kafka.bootstrap_servers, topic)
        return [json.loads(each.value or b"") for each in found]

    def events(self) -> list[tuple[str, int]]:
        """Return each event's node and the number of its tick."""
        found = self.read(EVENTS.name)
        return sorted((event["node"], event["seq"] // SEQ_PER_TICK) for event in found)

    def dead_letters(self) -> list[DeadLetterFields]:
        """Return the content of the dead letters, which is never large."""
        found = self.read(DEAD_LETTERS.name)
        assert all(len(dead_letter["detail"]) < MAX_CHARACTERS for dead_letter in found)
        output = [
            (each["topic"], each["offset"], each.get("last_offset"), each["reason"])
            for each in found
        ]
        return sorted(output, key=str)

    async def await_committed(self, wanted: dict[TopicPartition, int]) -> None:
        """Wait until the join has committed these offsets, and all ticks of the other node."""
        wanted = {partition_of(SAMPLES.name, OTHER): self._published} | wanted
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            found = {at: await committed(self.kafka, GROUP, at) for at in wanted}
            if all((found[at] or 0) >= offset for at, offset in wanted.items()):
                return
            assert self.worker.exit_status() is None, self.worker.log.read_text()[-3000:]
            assert time.monotonic() < deadline, (found, wanted)
            time.sleep(0.3)  # noqa: ASYNC251  # nothing else runs in this loop


@pytest.fixture
def scene(
    start_kafka: Callable[[], Kafka],
    kcat: Kcat,
    tmp_path: Path,
) -> Scene:
    refuse_stray_settings()
    return Scene(kafka=start_kafka(), kcat=kcat, folder=tmp_path)


async def test_the_join_continues_behind_any_input_on_its_topics(scene: Scene) -> None:
    """Each of these used to end a worker or kept it from all its partitions."""
    await scene.make_topics()
    await scene.publish_ticks(BEFORE)
    wanted: list[DeadLetterFields] = []
    for how in HOSTILE.values():
        for topic in (SAMPLES.name, PODS.name, PROGRESS.name):
            first, last = await write(scene.kafka, partition_of(topic), how, [scene.tick(0)] * 3)
            wanted.append((topic, first, last, "unreadable"))
    booked = [*BEFORE, *AFTER]
    for index, how in enumerate(LEGAL.values()):
        numbers = range(10 * (index + 1), 10 * (index + 1) + 4)
        await write(
            scene.kafka, partition_of(SAMPLES.name), how, [scene.tick(number) for number in numbers]
        )
        booked += numbers
    wanted += [await write_long_key(scene), *await write_large_incidents(scene)]
    await scene.publish_ticks(AFTER)
    ends = {partition_of(SAMPLES.name): await end_of(scene, SAMPLES.name)}
    ends |= {partition_of(INCIDENTS.name): await end_of(scene, INCIDENTS.name)}
    worker = scene.worker
    try:
        worker.start()
        await scene.await_committed(ends)

        assert scene.events() == sorted(
            [(NODE, number) for number in booked]
            + [(OTHER, number) for number in (*BEFORE, *AFTER)]
        )
        assert scene.dead_letters() == sorted(wanted, key=str)
        assert {at: await committed(scene.kafka, GROUP, at) for at in ends} == ends
        assert max_memory_bytes(worker.pid) < 400 * 2**20
        assert all(check["ok"] for check in worker.readyz()["checks"].values())
        assert 'gpuledger_records_unreadable_total{reason="codec"} 27.0' in worker.metrics()
        assert worker.stop() == 0
    finally:
        worker.kill()

    events = len(scene.events())
    await write(
        scene.kafka,
        partition_of(EVENTS.name),
        HOSTILE["lz4"],
        [Raw(key_in("default", NODE).encode(), b"{}")],
    )
    again = replay(scene.kafka, "--compare")
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"compared {events} events" in again.stdout
    known = await read_known(
        cluster="default", kind=POD, bus=scene.bus, check=Check(), clock=SystemClock()
    )
    assert known.undecodable == len(HOSTILE)


@pytest.mark.extended
async def test_batches_of_headers_in_all_partitions_delay_neither_http_endpoints_nor_the_exit(
    scene: Scene,
) -> None:
    """Polling them took half a minute, in which nothing else ran: no probe, no signal."""
    await scene.make_topics()
    await scene.publish_ticks(BEFORE)
    inputs = (SAMPLES, PROCESSES, INCIDENTS)
    partitions = [TopicPartition(each.name, at) for each in inputs for at in range(each.partitions)]
    for at in 2 * partitions:
        await write(scene.kafka, at, HEADERS, [])
    await scene.publish_ticks(AFTER)
    worker = scene.worker
    try:
        worker.start()
        skipped = 'gpuledger_records_unreadable_total{reason="too_many"} '
        await until(
            lambda: skipped in worker.metrics() and f"{skipped}0.0" not in worker.metrics(), worker
        )
        assert worker.stop() == 0
        worker.start()
        await scene.await_committed(
            {partition_of(SAMPLES.name, node): 12 for node in (NODE, OTHER)}
            | {at: 2 for at in partitions if at.topic != SAMPLES.name}
        )

        assert scene.events() == sorted(
            (node, number) for node in (NODE, OTHER) for number in (*BEFORE, *AFTER)
        )
        assert len(scene.dead_letters()) == 2 * len(partitions)
        assert max_memory_bytes(worker.pid) < 200 * 2**20
    finally:
        worker.kill()


async def test_an_open_transaction_of_another_client_on_its_inputs_does_not_stop_the_join(
    scene: Scene,
) -> None:
    """On brokers without access lists any client may open one, and leave it open."""
    await scene.make_topics()
    worker = scene.worker
    anybody = AIOKafkaProducer(
        bootstrap_servers=scene.kafka.bootstrap_servers, transactional_id="anybody"
    )
    await anybody.start()
    try:
        await anybody.begin_transaction()
        for topic in (SAMPLES.name, PODS.name):
            at = partition_of(topic)
            await anybody.send_and_wait(topic, b"open", key=b"x", partition=at.partition)
        await scene.publish_ticks(BEFORE)
        worker.start()
        await scene.await_committed({partition_of(SAMPLES.name): 1 + len(BEFORE)})

        assert scene.events() == sorted(
            (node, number) for node in (NODE, OTHER) for number in BEFORE
        )
    finally:
        await anybody.stop()
        worker.kill()


async def test_the_join_names_a_topic_with_too_small_a_limit_and_waits_for_it(scene: Scene) -> None:
    """Its limit was set by hand: no record is rejected for that, and nothing is lost."""
    small = replace(EVENTS, extra={"max.message.bytes": "1000"})
    await scene.make_topics([each if each is not EVENTS else small for each in TOPICS])
    await scene.publish_ticks(BEFORE)
    worker = scene.worker
    try:
        worker.start()
        await until(lambda: "max.message.bytes" in str(worker.readyz()), worker)
        assert "gpuledger_join_events_total 0.0" in worker.metrics()
        await set_limit(scene.kafka, EVENTS.name, 1_048_588)
        await scene.await_committed({partition_of(SAMPLES.name): len(BEFORE)})

        assert scene.events() == sorted(
            (node, number) for node in (NODE, OTHER) for number in BEFORE
        )
        assert scene.read(DEAD_LETTERS.name) == []
    finally:
        worker.kill()


async def until(probe: Callable[[], bool], worker: Component) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        with suppress(OSError):
            if probe():
                return
        assert worker.exit_status() is None, worker.log.read_text()[-3000:]
        assert time.monotonic() < deadline, worker.log.read_text()[-3000:]
        time.sleep(0.2)  # noqa: ASYNC251  # nothing else runs in this loop


async def set_limit(kafka: Kafka, topic: str, limit_bytes: int) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap_servers)
    await admin.start()
    try:
        wanted = {"max.message.bytes": str(limit_bytes)}
        await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, wanted)])
    finally:
        await admin.close()


async def write_long_key(scene: Scene) -> DeadLetterFields:
    """Write a tick with a key of 250 kB, which the dead letter would quote five times over."""
    record = scene.tick(50)._replace(key=b"\x7f" * 250_000)
    first, _ = await write(scene.kafka, partition_of(SAMPLES.name), PLAIN, [record])
    return (SAMPLES.name, first, None, "misplaced")


async def write_large_incidents(scene: Scene) -> list[DeadLetterFields]:
    """Write one that exceeds a message, one whose error quotes it, and one that grows too large.

    The last one is within the bounds, but the output contains its 4,096 processes twice, because
    each is a pod of its own.
    """
    incident = Incident(
        cluster="default",
        node=NODE,
        boot_id="a-boot",
        gpu_uuid="GPU-0",
        time_ns=time.time_ns(),
        kind="xid",
        source="kmsg",
        severity=Severity.CRITICAL,
        message="m",
        processes=[],
    )
    small = encode(incident)
    large = small[:-1] + b" " * 1_500_000 + b"}"
    quoted = small.replace(b'"critical"', b'"' + b"\x7f" * 250_000 + b'"')
    key = key_in("default", NODE).encode()
    at = partition_of(INCIDENTS.name)
    first, _ = await write(scene.kafka, at, PLAIN, [Raw(key, large)])
    second, _ = await write(scene.kafka, at, PLAIN, [Raw(key, quoted)])
    grown = msgspec.structs.replace(
        incident,
        processes=[
            IncidentProcess(
                pid=pid, command="p" * 12, container_id=f"{pid:080x}", pod_uid=f"{pid:036}"
            )
            for pid in range(1, MAX_INCIDENT_PROCESSES + 1)
        ],
    )
    third, _ = await write(scene.kafka, at, PLAIN, [Raw(key, encode(grown))])
    return [
        (INCIDENTS.name, first, None, "too_large"),
        (INCIDENTS.name, second, None, "undecodable"),
        (INCIDENTS.name, third, None, "too_large"),
    ]


async def end_of(scene: Scene, topic: str) -> int:
    async with scene.bus.reader() as reader:
        spans = await reader.spans(topic)
    return spans[partition_of(topic)].end
