"""The join's watermarks for its partitions, and how it waits for podwatch's."""

import asyncio
from collections.abc import Sequence

import msgspec
import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Message, Record
from gpuledger.codec import decoder_of
from gpuledger.completeness import JOIN, PODWATCH, message_of
from gpuledger.records import PodState, Watermark
from tests.default_topics import EVENTS, PODS, SAMPLES, WATERMARKS
from tests.unit.enricher.join.builders import Given
from tests.unit.enricher.join.joining import (
    PARTITION,
    SETTINGS,
    committed,
    joining,
    publish,
    read_events,
    tick,
    until,
)
from tests.unit.enricher.join.ticks import SECOND_NS, UIDS, pod, sample

WAITING = msgspec.structs.replace(
    SETTINGS, join=msgspec.structs.replace(SETTINGS.join, podwatch_timeout_seconds=60)
)
TICK_NS = sample().time_ns


def watermarks(bus: MemoryBus) -> list[Watermark]:
    """Return the watermarks published for the partition."""
    decoder = decoder_of(WATERMARKS.name, Watermark)
    found = [decoder.decode(each.value or b"") for each in bus.kept(WATERMARKS.name)]
    return [each for each in found if each.partition == PARTITION and each.component == JOIN]


def podwatch_watermark_of(**changes: object) -> Watermark:
    values: dict[str, object] = {
        "component": PODWATCH,
        "cluster": "default",
        "partition": PARTITION,
        "complete_until_ns": TICK_NS,
        "topic": PODS.name,
        "next_offset": 0,
        "publisher": "test",
    }
    return Watermark(**(values | changes))  # type: ignore[arg-type]  # the names are a Watermark's


async def publish_podwatch_watermarks(bus: MemoryBus, **changes: object) -> None:
    """Let podwatch publish a watermark for each partition; `changes` apply to the node's."""
    async with bus.producer() as producer:
        for partition in range(WATERMARKS.partitions):
            own = changes if partition == PARTITION else {}
            output = podwatch_watermark_of(**({"partition": partition} | own))
            message = message_of(output, time_ns=output.complete_until_ns)
            await producer.publish(WATERMARKS.name, partition, [message])


async def test_a_partition_is_complete_through_the_last_tick_of_its_nodes() -> None:
    """The watermark covers the events up to that tick, once they were acknowledged."""
    bus = MemoryBus()
    await publish(bus, SAMPLES, tick(1), tick(2))
    async with joining(bus):
        await committed(bus, 2)
        await until(lambda: bool(watermarks(bus)))
    output = watermarks(bus)[0]
    assert (output.complete_until_ns, output.topic, output.next_offset) == (TICK_NS, EVENTS.name, 2)
    assert (output.node_count, output.unresponsive_count, output.unresponsive) == (1, None, None)
    assert output.publisher.startswith("gpuledger-join@")


async def test_a_partition_without_nodes_is_complete_too() -> None:
    """Otherwise it would never be known what is complete in all partitions."""
    bus = MemoryBus()
    async with joining(bus):
        await until(lambda: bool(watermarks(bus)))
    (output,) = watermarks(bus)
    assert (output.node_count, output.next_offset) == (0, 0)


def test_a_tick_behind_the_watermark_is_booked_and_counted() -> None:
    """Also by the partition's next worker, which reads the watermarks back."""
    behind = "gpuledger_join_samples_behind_watermark_total"
    before = REGISTRY.get_sample_value(behind) or 0.0
    given = Given()
    output = podwatch_watermark_of(component=JOIN, topic=EVENTS.name, partition=3)
    given.stage.take_watermarks(read(output))
    given.take(time_ns=TICK_NS)
    given.take(time_ns=TICK_NS + SECOND_NS)
    assert REGISTRY.get_sample_value(behind) == before + 1


def read(output: Watermark, *, partition: int = 3) -> Sequence[Record]:
    message = message_of(output, time_ns=TICK_NS)
    return [Record(WATERMARKS.name, partition, 0, message.timestamp_ms, message.key, message.value)]


async def test_a_watermark_in_the_wrong_partition_is_rejected() -> None:
    given = Given()
    given.stage.take_watermarks(read(podwatch_watermark_of(partition=2)))
    (dead_letter,) = await given.rejected_records()
    assert dead_letter.reason == "misplaced"
    assert "a watermark of partition 2" in dead_letter.detail


async def test_pods_published_after_the_join_started_are_known_to_the_first_events() -> None:
    """The ticks wait; podwatch's watermarks from before the start do not count."""
    bus = MemoryBus()
    await publish(bus, SAMPLES, tick(1), tick(2))
    await publish_podwatch_watermarks(bus)
    async with joining(bus, settings=WAITING) as readiness:
        check = readiness.check("pods")
        await until(lambda: "waiting for podwatch" in check.detail)
        assert not bus.kept(EVENTS.name)
        await publish(bus, PODS, pod(), key=f"default/{UIDS[0]}")
        await publish_podwatch_watermarks(bus, next_offset=1)
        events = await read_events(bus, 2)
        assert check.is_ok
    assert [event.pods[0].state for event in events] == [PodState.KNOWN] * 2


async def test_a_watermark_for_pods_that_are_still_to_be_read_counts_once_they_are_read() -> None:
    bus = MemoryBus()
    await publish(bus, SAMPLES, tick(1))
    async with joining(bus, settings=WAITING) as readiness:
        await until(lambda: "waiting for podwatch" in readiness.check("pods").detail)
        await publish_podwatch_watermarks(bus, next_offset=1)
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert not bus.kept(EVENTS.name)
        await publish(bus, PODS, pod(), key=f"default/{UIDS[0]}")
        (event,) = await read_events(bus, 1)
    assert event.pods[0].state is PodState.KNOWN


async def test_without_podwatch_the_work_begins_after_a_timeout_and_the_timeout_is_counted() -> (
    None
):
    counted = "gpuledger_join_podwatch_timeouts_total"
    before = REGISTRY.get_sample_value(counted) or 0.0
    tuning = msgspec.structs.replace(SETTINGS.join, podwatch_timeout_seconds=0.1)
    bus = MemoryBus()
    await publish(bus, SAMPLES, tick(1))
    with capture_logs() as lines:
        settings = msgspec.structs.replace(SETTINGS, join=tuning)
        async with joining(bus, settings=settings) as readiness:
            (event,) = await read_events(bus, 1)
            assert "without a report from podwatch" in readiness.check("pods").detail
    assert event.pods[0].state is PodState.PENDING
    assert [line["event"] for line in lines].count("podwatch_awaited") == 1
    assert REGISTRY.get_sample_value(counted) == before + 1


@pytest.mark.parametrize("value", [b"no json", b"{}"])
async def test_an_invalid_watermark_is_rejected(value: bytes) -> None:
    given, message = Given(), Message(b"join/default/3", value, 0)
    record = Record(WATERMARKS.name, 3, 0, 0, message.key, message.value)
    given.stage.take_watermarks([record])
    (dead_letter,) = await given.rejected_records()
    assert dead_letter.reason == "undecodable"


def test_a_podwatch_whose_watermark_was_deleted_is_not_waited_for() -> None:
    """For example of a retired cluster; a tombstone in another partition deletes nothing."""
    given = Given()
    output = podwatch_watermark_of(partition=3), podwatch_watermark_of(partition=3, cluster="gone")
    for each in output:
        given.stage.take_watermarks(read(each))
    given.stage.pods_completeness.read_to(3, 0)
    (gone,) = read(output[1])
    for partition, left in ((2, 2), (3, 1)):
        given.stage.take_watermarks([gone._replace(value=None, partition=partition)])
        assert len(given.stage.pods_completeness.of(3)) == left
