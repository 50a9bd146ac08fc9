"""The watermarks of sinks, over the bus in memory."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace as replaced
from pathlib import Path

import pytest
from deltalake import DeltaTable
from msgspec.structs import replace

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Message, TopicPartition
from gpuledger.codec import decoder_of
from gpuledger.completeness import message_of
from gpuledger.records import UnresponsiveNode, Watermark
from gpuledger.runtime import Readiness
from gpuledger.store.commits import valid_through_us
from gpuledger_sinks.loop import run_sink
from gpuledger_sinks.registry import ROWS as ROWS_KIND
from gpuledger_sinks.settings import RowsSettings
from tests.default_topics import EVENTS, ROWS, WATERMARKS
from tests.unit.sinks.builders import (
    BUS_TOPICS,
    NODE,
    PARTITIONS,
    START_NS,
    ManualClock,
    bus,
    event,
    eventually,
    place_of,
    publish,
    running,
)
from tests.unit.sinks.store.storing import is_committed, lose, offsets, store

AT = place_of(NODE)
BROKEN = b"{"
SECOND_NS = 1_000_000_000
Run = Callable[[MemoryBus, Path, ManualClock], Awaitable[None]]
RUNS: Mapping[str, Run] = {
    "store": lambda on, path, clock: store(path, on, clock=clock, flush_seconds=20.0),
    "rows": lambda on, _, clock: run_sink(
        ROWS_KIND,
        bus=on,
        settings=RowsSettings(max_future_seconds=1e10),
        readiness=Readiness(),
        clock=clock,
    ),
}
each_sink = pytest.mark.parametrize(("component", "run"), RUNS.items())


def of_join(until: int, *, next_offset: int, partition: int = AT.partition) -> Watermark:
    return Watermark(
        component="join",
        cluster="default",
        partition=partition,
        complete_until_ns=START_NS + until,
        topic=EVENTS.name,
        next_offset=next_offset,
        publisher="join",
        node_count=2,
        unresponsive_count=1,
        unresponsive=[UnresponsiveNode(node="node-silent", since_time_ns=START_NS)],
    )


async def publish_watermarks(on: MemoryBus, *watermarks: Watermark) -> None:
    async with on.producer() as producer:
        for one in watermarks:
            message = message_of(one, time_ns=START_NS)
            await producer.publish(WATERMARKS.name, one.partition, [message])


def output(on: MemoryBus, component: str, partition: int = AT.partition) -> list[Watermark]:
    decode = decoder_of(WATERMARKS.name, Watermark).decode
    found = [decode(record.value) for record in on.kept(WATERMARKS.name) if record.value != BROKEN]
    return [each for each in found if (each.component, each.partition) == (component, partition)]


def complete_until(on: MemoryBus, component: str) -> list[int]:
    return [each.complete_until_ns - START_NS for each in output(on, component)]


@each_sink
async def test_a_sink_reports_the_joins_watermark_once_it_has_processed_the_events(
    component: str, run: Run, tmp_path: Path
) -> None:
    on, clock = bus(), ManualClock()
    await publish(on, event(0), event(1))
    await publish_watermarks(on, of_join(1, next_offset=2), of_join(2, next_offset=3))

    async with running(run(on, tmp_path, clock)):
        await eventually(lambda: clock.advance(3) and output(on, component))
        assert complete_until(on, component) == [1]
        (first,) = output(on, component)

        await publish(on, event(2))
        await eventually(lambda: clock.advance(3) and len(output(on, component)) > 1)

    assert complete_until(on, component) == [1, 2]
    # The unresponsive nodes are those that the join reports.
    assert first.unresponsive == of_join(1, next_offset=2).unresponsive
    place = TopicPartition(first.topic, first.partition)
    ends = {record.offset + 1 for record in on.kept(ROWS.name)}
    assert place == (AT if component == "store" else place_of(NODE, ROWS.name))
    assert first.next_offset == 2 if component == "store" else first.next_offset in ends


async def test_an_unresponsive_partition_does_not_hold_back_the_completeness_of_the_store(
    tmp_path: Path,
) -> None:
    on, clock = bus(), ManualClock()
    other = next(number for number in range(PARTITIONS) if number != AT.partition)
    await publish(on, event(0))
    await publish_watermarks(
        on,
        of_join(SECOND_NS, next_offset=1),
        of_join(9 * SECOND_NS, next_offset=0, partition=other),
    )
    async with running(RUNS["store"](on, tmp_path, clock)):
        await eventually(lambda: clock.advance(3) and len(output(on, "store", other)) > 0)
        await publish(on, event(1))
        await eventually(lambda: clock.advance(3) and is_committed(on, 2)())
    marks = valid_through_us(DeltaTable(str(tmp_path / "usage")).history(1))
    ahead_us = {number: until - START_NS // 1000 for number, until in marks.items()}
    assert ahead_us == {str(AT.partition): 1_000_000, str(other): 9_000_000}


async def test_events_that_are_not_in_the_store_are_not_reported_as_complete(
    tmp_path: Path,
) -> None:
    on, clock = bus(), ManualClock()
    await publish(on, event(0))
    async with running(store(tmp_path, on, clock=clock, flush_seconds=20.0)):
        await eventually(lambda: clock.advance(3) and is_committed(on, 1)())
        undo = lose(tmp_path)
        await publish(on, event(1))
        await publish_watermarks(on, of_join(1, next_offset=2))

        before = clock.monotonic_ns()
        await eventually(lambda: clock.advance(3) and clock.monotonic_ns() - before > 600e9)
        assert not output(on, "store")

        undo()
        await eventually(lambda: clock.advance(3) and output(on, "store"))
        assert offsets(tmp_path) == [0, 0, 1, 1]


@each_sink
async def test_a_new_owner_repeats_the_watermarks_even_of_partitions_without_events(
    component: str, run: Run, tmp_path: Path
) -> None:
    on, other = bus(), 1 - AT.partition
    await publish(on, event(0))
    await publish_watermarks(
        on, of_join(5, next_offset=1), of_join(7, next_offset=0, partition=other)
    )
    for times in (1, 2):
        await publish_once(on, run, tmp_path, component=component, times=times)


async def publish_once(on: MemoryBus, run: Run, path: Path, *, component: str, times: int) -> None:
    """Run a sink until each partition has this many watermarks in total."""
    clock = ManualClock()
    async with running(run(on, path, clock)):
        await eventually(
            lambda: (
                clock.advance(3)
                and all(len(output(on, component, each)) == times for each in range(PARTITIONS))
            )
        )


@each_sink
async def test_records_that_are_not_watermarks_of_the_join_are_skipped(
    component: str, run: Run, tmp_path: Path
) -> None:
    on, clock = bus(), ManualClock()
    await publish(on, event(0))
    async with on.producer() as producer:
        broken = Message(b"join/default/0", BROKEN, START_NS // 1_000_000)
        await producer.publish(WATERMARKS.name, AT.partition, [broken])
    await publish_watermarks(
        on,
        replace(of_join(9, next_offset=1), component="podwatch"),
        replace(of_join(9, next_offset=1), topic="another"),
        # Nothing can be complete through a future time: its publisher has a wrong clock.
        of_join(10**18, next_offset=1),
        of_join(3, next_offset=1),
    )

    async with running(run(on, tmp_path, clock)):
        await eventually(lambda: clock.advance(3) and output(on, component))

    assert complete_until(on, component) == [3]


async def test_rows_on_fewer_partitions_than_events_are_never_reported_as_complete() -> None:
    topics = [
        replaced(each, partitions=1) if each.name == ROWS.name else each for each in BUS_TOPICS
    ]
    on, clock = MemoryBus(topics), ManualClock()
    await publish(on, event(0))
    await publish_watermarks(on, of_join(1, next_offset=1))

    async with running(RUNS["rows"](on, Path(), clock)):
        await eventually(lambda: on.kept(ROWS.name))
        before = clock.monotonic_ns()
        await eventually(lambda: clock.advance(3) and clock.monotonic_ns() - before > 60e9)

    assert not output(on, "rows")
