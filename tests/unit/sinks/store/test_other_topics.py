"""The store sink, and topics that were recreated or belong to another cluster."""

import asyncio
from pathlib import Path

import pytest

from gpuledger.errors import UserError
from gpuledger.runtime import Readiness
from gpuledger_sinks.store.table import EntriesTable
from tests.default_topics import EVENTS
from tests.unit.sinks.builders import (
    SECOND_NS,
    START_NS,
    ManualClock,
    bus,
    event,
    eventually,
    publish,
    running,
)
from tests.unit.sinks.store.storing import (
    STREAM,
    a_row,
    at_seconds,
    gaps,
    holds_rows,
    is_committed,
    offsets,
    query,
    store,
)


async def test_a_recreated_topic_is_an_error_that_names_the_remedy(tmp_path: Path) -> None:
    """Even if it is longer than the stored offsets, so that no offset looks wrong."""
    on = bus()
    await publish(on, *map(event, range(5)))
    async with running(store(tmp_path, on)):
        await eventually(is_committed(on, 5))

    on.recreate(EVENTS.name)
    await publish(on, *(event(tick) for tick in range(100, 109)))
    for _ in range(2):
        with pytest.raises(UserError, match=r"up to offset 4 of another topic.*generation"):
            await store(tmp_path, on)
    assert max(offsets(tmp_path)) == 4
    assert gaps(tmp_path, "reason, first_offset, next_offset, missed_offsets, time_before") == [
        ("topic_recreated", 5, None, None, at_seconds(4))
    ]

    async with running(store(tmp_path, on, generation="second")):
        await eventually(lambda: len(offsets(tmp_path)) == 2 * (5 + 9))


async def test_unwritten_rows_of_a_topic_that_is_recreated_are_discarded(
    tmp_path: Path,
) -> None:
    on, clock = bus(), ManualClock(START_NS + 3600 * SECOND_NS)
    await publish(on, *map(event, range(5)))
    at = Readiness()
    sink = asyncio.ensure_future(store(tmp_path, on, clock=clock, flush_seconds=60.0, readiness=at))
    await eventually(lambda: clock.advance(61) and is_committed(on, 5)())

    await publish(on, event(5))
    await eventually(holds_rows(at))
    on.recreate(EVENTS.name)
    await publish(on, *(event(tick) for tick in range(100, 109)))

    with pytest.raises(UserError, match=r"up to offset 4 of another topic.*generation"):
        await sink
    assert max(offsets(tmp_path)) == 4


async def test_a_topic_recreated_before_anything_was_stored_is_read_normally(
    tmp_path: Path,
) -> None:
    on, clock = bus(), ManualClock(START_NS + 3600 * SECOND_NS)
    await publish(on, *map(event, range(5)))
    at = Readiness()
    async with running(store(tmp_path, on, clock=clock, flush_seconds=60.0, readiness=at)):
        await eventually(holds_rows(at))
        on.recreate(EVENTS.name)
        await publish(on, *(event(tick) for tick in range(100, 103)))
        await eventually(lambda: clock.advance(61) and is_committed(on, 3)())

    assert sorted(set(offsets(tmp_path))) == [0, 1, 2]
    seqs = query(tmp_path, "select distinct seq from {entries} order by 1")
    assert seqs == [(101_000,), (102_000,), (103_000,)]


async def test_stored_offsets_without_an_identity_adopt_the_existing_topic(
    tmp_path: Path,
) -> None:
    """Brokers before Kafka 2.8 do not report a topic's identity."""
    on = bus()
    await publish(on, *map(event, range(3)))
    old = EntriesTable(store_uri=str(tmp_path))
    old.load([STREAM])
    old.append(a_row(1), {STREAM: 1}, time_ms=1)

    async with running(store(tmp_path, on)):
        await eventually(is_committed(on, 3))
    assert offsets(tmp_path)[-1] == 2

    on.recreate(EVENTS.name)
    await publish(on, *map(event, range(9)))
    with pytest.raises(UserError, match="another topic"):
        await store(tmp_path, on)


async def test_a_shorter_partition_of_another_cluster_is_detected_by_offsets_too(
    tmp_path: Path,
) -> None:
    on = bus()
    await publish(on, event(0))
    old = EntriesTable(store_uri=str(tmp_path))
    old.load([STREAM])
    old.append(a_row(4), {STREAM: 4}, time_ms=1)

    with pytest.raises(
        UserError, match=r"up to offset 4, but that partition ends at 1.*generation"
    ):
        await store(tmp_path, on)
