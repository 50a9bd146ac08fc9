"""Events that were removed before they were stored are rows of the table `gaps`."""

from pathlib import Path

from gpuledger.bus.protocol import (
    Subscription,
)
from gpuledger.runtime import CheckSeverity, Readiness
from gpuledger_sinks.registry import STORE
from tests.default_topics import EVENTS
from tests.unit.sinks.builders import (
    bus,
    event,
    eventually,
    publish,
    running,
)
from tests.unit.sinks.store.storing import AT, at_seconds, gaps, is_committed, offsets, store


async def test_events_removed_before_they_were_stored_are_a_row_of_gaps(tmp_path: Path) -> None:
    on = bus()
    await publish(on, *map(event, range(5)))
    async with running(store(tmp_path, on)):
        await eventually(is_committed(on, 5))
    await publish(on, *map(event, range(5, 10)))
    on.remove_before(AT, 8)

    async with running(store(tmp_path, on)):
        await eventually(is_committed(on, 10))

    assert sorted(set(offsets(tmp_path))) == [0, 1, 2, 3, 4, 8, 9]
    wanted = "topic, kafka_partition, reason, first_offset, next_offset, missed_offsets"
    assert gaps(tmp_path, f"{wanted}, time_before, time_after") == [
        (*AT, "retention", 5, 8, 3, at_seconds(4), at_seconds(8))
    ]


async def test_a_gap_has_a_row_even_if_its_partition_is_lost_before_the_write_and_returns(
    tmp_path: Path,
) -> None:
    on, readiness = bus(), Readiness()
    found = readiness.check("store.gaps", severity=CheckSeverity.WARNING)
    await publish(on, *map(event, range(3)))
    async with running(store(tmp_path, on)):
        await eventually(is_committed(on, 3))
    await publish(on, *map(event, range(3, 9)))
    on.remove_before(AT, 9)

    async with running(store(tmp_path, on, readiness=readiness)):
        await eventually(lambda: found.has_failed)
        async with on.consumer(
            Subscription(group=STORE.group, stage=STORE.name, topics=(EVENTS.name,))
        ) as other:
            while not other.assignment():
                await other.poll(timeout_seconds=0.01, max_records=1)
        await publish(on, event(20))
        await eventually(is_committed(on, 10))

    assert found.detail.startswith("gaps since the start: 1;")
    assert gaps(tmp_path, "first_offset, next_offset, missed_offsets") == [(3, 9, 6)]


def cut_data_files(uri: Path) -> None:
    for part in uri.glob("entries/event_date=*/*.parquet"):
        part.write_bytes(part.read_bytes()[:300])


async def test_a_gap_has_a_row_even_if_a_data_file_is_damaged(tmp_path: Path) -> None:
    on = bus()
    await publish(on, *map(event, range(5)))
    async with running(store(tmp_path, on)):
        await eventually(is_committed(on, 5))
    cut_data_files(tmp_path)
    await publish(on, *map(event, range(5, 10)))
    on.remove_before(AT, 8)

    async with running(store(tmp_path, on)):
        await eventually(is_committed(on, 10))

    assert gaps(tmp_path, "first_offset, next_offset, time_before") == [(5, 8, None)]


async def test_a_new_store_has_an_empty_table_of_gaps(tmp_path: Path) -> None:
    on = bus()
    await publish(on, *map(event, range(5)))
    on.remove_before(AT, 3)
    async with running(store(tmp_path, on)):
        await eventually(is_committed(on, 5))

    assert (tmp_path / "gaps" / "_delta_log").is_dir()
    assert gaps(tmp_path, "*") == []
