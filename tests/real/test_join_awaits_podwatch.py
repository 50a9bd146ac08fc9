"""A join that starts before podwatch, on a real broker: the use that it books has pod names."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import duckdb
from deltalake import DeltaTable

from gpuledger.bus.administration import create_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Message
from gpuledger.codec import decoder_of, encode
from gpuledger.completeness import Completeness
from gpuledger.errors import UserError
from gpuledger.keys import key_in
from gpuledger.records import ContainerRef, Watermark
from gpuledger.settings import KafkaSettings
from gpuledger.store.query import entries_sql
from gpuledger.topics import partition_of_node
from tests.default_topics import EVENTS, SAMPLES, WATERMARKS
from tests.real.end_to_end.components import Component, refuse_stray_settings
from tests.unit.enricher.join.ticks import process, sample
from tests.unit.enricher.podwatch.builders import hex_id, pod
from tests.unit.enricher.podwatch.misbehaving import misbehaving_server, page

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from tests.real.services.kafka import Kafka
    from tests.real.services.kcat import Kcat

NODES = ("node-a", "node-b", "node-c")
LATER_SECONDS = 10
TICKS = 12
DEADLINE_SECONDS = 120.0


async def publish_ticks(settings: KafkaSettings, numbers: Iterable[int]) -> None:
    """Publish a tick per node and second; in each of them a pod is busy."""
    async with KafkaBus(settings).producer() as producer:
        for number in numbers:
            for node in NODES:
                uid, now_ns = f"uid-{node}", time.time_ns()
                tick = sample(
                    node=node,
                    seq=1000 * (number + 1),
                    time_ns=now_ns,
                    containers=[ContainerRef(pod_uid=uid, container_id=hex_id(uid))],
                    processes=[process(container=0, sm_utilization_ratio=0.5)],
                )
                partition = partition_of_node(
                    key_in("default", node), partitions=SAMPLES.partitions
                )
                message = Message(key_in("default", node).encode(), encode(tick), now_ns // 10**6)
                await producer.publish(SAMPLES.name, partition, [message])


async def test_no_pod_is_without_a_name_if_podwatch_starts_ten_seconds_later(
    start_kafka: Callable[[], Kafka], kcat: Kcat, tmp_path: Path
) -> None:
    """The join's watermarks are true for its events, partition by partition."""
    refuse_stray_settings()
    kafka = start_kafka()
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    await create_topics(settings)
    environment = {"KAFKA__BOOTSTRAP_SERVERS": kafka.bootstrap_servers}

    def component(name: str, **more: str) -> Component:
        return Component(
            name=name,
            command=["gpuledger", name],
            folder=tmp_path / name,
            environment=environment | more,
        )

    async with misbehaving_server() as api:
        api.lists.append(page(*(pod(f"uid-{node}", node=node) for node in NODES)))
        join = component("join")
        podwatch = component("podwatch", KUBERNETES__URL=api.url)
        try:
            join.start()
            for number in range(LATER_SECONDS):
                await publish_ticks(settings, [number])
                await asyncio.sleep(1)
            podwatch.start()
            await publish_ticks(settings, range(LATER_SECONDS, TICKS))
            events = await await_records(kafka, kcat, EVENTS.name, count=TICKS * len(NODES))
            reported = await await_watermarks(kafka, kcat)
        finally:
            for each in (join, podwatch):
                each.kill()
    assert {(event["node"], event["pods"][0]["state"]) for event in events} == {
        (node, "known") for node in NODES
    }
    reader = Completeness(component="join", topic=EVENTS.name)
    for output in reported:
        reader.take(output)
    for partition in range(EVENTS.partitions):
        reader.read_to(partition, 10_000)
    complete_ns = reader.complete_until_ns(range(EVENTS.partitions))
    assert complete_ns is not None
    assert time.time_ns() - complete_ns < 10**9 * 240


async def test_no_row_of_the_store_is_without_a_name_once_a_late_podwatch_is_there(
    start_kafka: Callable[[], Kafka], tmp_path: Path
) -> None:
    """Here the join does not wait: what it books before podwatch starts has no names."""
    refuse_stray_settings()
    kafka = start_kafka()
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    await create_topics(settings)
    folder = tmp_path / "ledger"

    def component(name: str, *arguments: str, **more: str) -> Component:
        return Component(
            name=name,
            command=["gpuledger", name, *arguments],
            folder=tmp_path / name,
            environment={"KAFKA__BOOTSTRAP_SERVERS": kafka.bootstrap_servers, **more},
        )

    async with misbehaving_server() as api:
        api.lists.append(page(*(pod(f"uid-{node}", node=node) for node in NODES)))
        join = component("join", JOIN__PODWATCH_TIMEOUT_SECONDS="0")
        podwatch = component("podwatch", KUBERNETES__URL=api.url)
        sink = component(
            "sink", "store", STORE__URI=str(folder), STORE__ENTRIES="true", STORE__FLUSH_SECONDS="1"
        )
        try:
            join.start()
            sink.start()
            for number in range(LATER_SECONDS):
                await publish_ticks(settings, [number])
                await asyncio.sleep(1)
            podwatch.start()
            await publish_ticks(settings, range(LATER_SECONDS, TICKS))
            named = {(node, f"uid-{node}", "known", True): TICKS for node in NODES}
            async with asyncio.timeout(DEADLINE_SECONDS):
                while await asyncio.to_thread(ticks_stored, folder) != named:  # noqa: ASYNC110  # a table has no event
                    await asyncio.sleep(0.5)
        finally:
            for each in (join, podwatch, sink):
                each.kill()
    # As written, most rows have no name: the test is about later changes.
    files = DeltaTable(str(folder / "entries")).file_uris()
    with duckdb.connect() as connection:
        sql = f"SELECT count(*) FROM read_parquet({files}) WHERE pod_state = 'pending'"  # noqa: S608  # our own files
        (nameless,) = connection.execute(sql).fetchone() or (0,)
    assert nameless >= len(NODES)


def ticks_stored(folder: Path) -> Mapping[tuple[object, ...], int]:
    """Return the number of ticks with rows of pods in the view, by owner."""
    if not list(folder.glob("entries/event_date=*/*.parquet")):
        return {}
    with duckdb.connect() as connection:
        try:
            relation = entries_sql(str(folder))
        except UserError:
            return {}  # written but not committed yet
        sql = f"""
            SELECT node, pod_uid, pod_state, pod IS NOT NULL AND namespace IS NOT NULL,
                count(DISTINCT seq)
            FROM {relation} WHERE category = 'pod' GROUP BY ALL
        """  # noqa: S608  # quoted by `entries_sql`
        rows = connection.execute(sql).fetchall()
    return {tuple(row[:-1]): row[-1] for row in rows}


async def await_records(
    kafka: Kafka, kcat: Kcat, topic: str, *, count: int
) -> Sequence[Mapping[str, Any]]:
    """Read a topic until it has this many records."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while True:
            found = await asyncio.to_thread(kcat.consume, kafka.bootstrap_servers, topic)
            if len(found) >= count:
                return [json.loads(each.value or b"") for each in found]
            await asyncio.sleep(0.3)


async def await_watermarks(kafka: Kafka, kcat: Kcat) -> Sequence[Watermark]:
    """Read until each partition has a watermark, and those of nodes one with their last tick."""
    decoder = decoder_of(WATERMARKS.name, Watermark)
    busy = {
        partition_of_node(key_in("default", node), partitions=EVENTS.partitions) for node in NODES
    }
    async with asyncio.timeout(DEADLINE_SECONDS):
        while True:
            servers = kafka.bootstrap_servers
            found = await asyncio.to_thread(kcat.consume, servers, WATERMARKS.name)
            decoded = [decoder.decode(each.value or b"") for each in found]
            reported = [each for each in decoded if each.component == "join"]
            ends = {each.partition: each.next_offset for each in reported}
            # In a transaction each commit is followed by its marker, which has an offset too.
            if len(ends) == EVENTS.partitions and all(ends[each] >= TICKS for each in busy):
                return reported
            await asyncio.sleep(0.5)
