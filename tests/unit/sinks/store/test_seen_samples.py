"""A tick that the join repeats counts once, whenever the sink is killed and whoever else writes."""

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import pytest
from deltalake import DeltaTable
from structlog.testing import capture_logs

from gpuledger.bus.memory import MemoryBus
from gpuledger.codec import Decoder
from gpuledger.records import GpuEvent
from gpuledger.runtime import Check, Readiness
from gpuledger.store.commits import describe, valid_through_us
from gpuledger.store.views import valid_through
from gpuledger_sinks.loop import consume
from gpuledger_sinks.protocol import ConsumerConfig
from gpuledger_sinks.registry import STORE
from gpuledger_sinks.settings import StoreSettings
from gpuledger_sinks.store.seen import SeenTable
from gpuledger_sinks.store.store_sink import StoreTables, open_store
from gpuledger_sinks.store.table import StreamTable, UsageTable
from tests.default_topics import EVENTS
from tests.unit.sinks.builders import (
    ManualClock,
    bus,
    entry,
    event,
    eventually,
    publish,
    running,
)
from tests.unit.sinks.store.storing import STREAM, is_committed, store
from tests.unit.sinks.store.test_rollups import row


def tick(number: int, **changes: Any) -> GpuEvent:  # noqa: ANN401  # any field
    return event(number, entries=[entry()], **changes)


def ticks_stored(path: Path) -> int:
    return int(_query(path, "usage", "coalesce(sum(sample_count), 0)::BIGINT"))


def offsets_stored(path: Path) -> list[int]:
    return list(_query(path, "entries", "list(kafka_offset ORDER BY kafka_offset)"))


def _query(path: Path, table: str, what: str) -> Any:  # noqa: ANN401  # one value
    files = DeltaTable(str(path / table)).file_uris()
    with duckdb.connect() as connection:
        found = connection.execute(f"SELECT {what} FROM read_parquet({files})").fetchone()  # noqa: S608  # our own files
    assert found is not None
    return found[0]


async def test_a_tick_repeated_after_a_restart_counts_once(tmp_path: Path) -> None:
    on = bus()
    await publish(on, tick(0), tick(1), tick(2, boot_id="boot-2", seq=5))
    async with running(store(tmp_path, on)):
        await eventually(is_committed(on, 3))
    await publish(on, tick(1), tick(3, boot_id="boot-2", seq=5), tick(4))
    async with running(store(tmp_path, on)):
        await eventually(is_committed(on, 6))
    assert ticks_stored(tmp_path) == 4
    assert offsets_stored(tmp_path) == [0, 1, 2, 5]


class KilledError(Exception):
    """Stands for a kill -9: code that has raised it once raises it from then on."""


class Death:
    """Counts the steps of a sink at its tables, and ends it at one of them."""

    def __init__(self, at_step: int) -> None:
        self._left = at_step

    def step(self) -> None:
        self._left -= 1
        if self._left <= 0:
            raise KilledError

    def haunt(self, table: StreamTable, method: str) -> None:
        """Let the sink die right before or right after it calls this method."""
        done: Callable[..., Any] = getattr(table, method)

        def stepping(*args: Any, **options: Any) -> Any:  # noqa: ANN401  # as the method has it
            self.step()
            found = done(*args, **options)
            self.step()
            return found

        setattr(table, method, stepping)


def haunted(settings: StoreSettings, death: Death) -> StoreTables:
    tables = StoreTables.of(settings)
    death.haunt(tables.seen, "read")
    death.haunt(tables.seen, "record")
    death.haunt(tables.usage, "append")
    assert tables.entries is not None
    death.haunt(tables.entries, "append")
    return replace(tables, dimensions={})


async def live(on: MemoryBus, path: Path, *, death: Death, rows: int = 6) -> None:
    """Run a sink until it dies."""
    settings = StoreSettings(
        uri=str(path),
        entries=True,
        flush_seconds=0.0,
        flush_rows=rows,
        max_age_seconds=1e10,
        max_future_seconds=1e10,
    )
    clock = ManualClock()
    async with open_store(
        haunted(settings, death), bus=on, settings=settings, readiness=Readiness(), clock=clock
    ) as sink:
        await consume(
            bus=on,
            sink=sink,
            config=ConsumerConfig(
                group=STORE.group,
                decoders={EVENTS.name: Decoder(topic=EVENTS.name, record=GpuEvent)},
                max_poll_records=2,
            ),
            check=Check(),
            clock=clock,
        )


@pytest.mark.parametrize("step", range(1, 17))
async def test_each_tick_counts_once_whenever_the_sink_is_killed(tmp_path: Path, step: int) -> None:
    """Each tick is repeated: immediately, a little later, and after the kill."""
    on = bus()
    numbers = [0, 0, 1, 0, 2, 1, 3, 3, 2, 4]
    await publish(on, *(tick(number) for number in numbers))
    with pytest.raises(KilledError):
        await live(on, tmp_path, death=Death(step))
    await publish(on, tick(3), tick(5), tick(0))
    async with running(store(tmp_path, on)):
        await eventually(is_committed(on, 13))
    assert ticks_stored(tmp_path) == 6
    assert offsets_stored(tmp_path) == [0, 2, 4, 6, 9, 11]


async def test_a_sink_killed_repeatedly_at_every_step_loses_and_repeats_nothing(
    tmp_path: Path,
) -> None:
    on = bus()
    await publish(on, *(tick(number // 2) for number in range(40)))
    for step in (*range(3, 12), *range(3, 12)):
        with pytest.raises(KilledError):
            await asyncio.wait_for(live(on, tmp_path, death=Death(step)), 20)
    async with running(store(tmp_path, on)):
        await eventually(is_committed(on, 40))
    assert ticks_stored(tmp_path) == 20
    assert offsets_stored(tmp_path) == list(range(0, 40, 2))


def test_a_record_of_a_writer_that_lost_its_partition_has_no_effect(tmp_path: Path) -> None:
    owner, stale = (SeenTable(store_uri=str(tmp_path)) for _ in range(2))
    owner.record({STREAM: (7, {"default/node-a": [("boot-1", 3)]})}, written_us=1)
    stale.record({STREAM: (9, {"default/node-a": [("boot-1", 5)]})}, written_us=2)
    stale.record({STREAM: (7, {"default/node-a": [("boot-1", 3)]})}, written_us=3)
    assert owner.read({STREAM: 7}) == {STREAM: (7, {"default/node-a": [["boot-1", 3]]})}
    assert owner.read({STREAM: 8}) == {STREAM: (7, {"default/node-a": [["boot-1", 3]]})}
    assert owner.read({STREAM: 6, "it's another": 9}) == {}


def test_seen_samples_that_no_table_needs_are_removed_and_the_others_remain(tmp_path: Path) -> None:
    table = SeenTable(store_uri=str(tmp_path))
    for offset in (3, 5, 7):
        table.record({STREAM: (offset, {}), "other": (offset, {})}, written_us=1)
    table.prune({STREAM: 5})
    assert table.read({STREAM: 4}) == {}
    assert table.read({STREAM: 6, "other": 4}) == {STREAM: (5, {}), "other": (3, {})}
    table.prune({STREAM: 6, "other": 8})
    assert table.read({STREAM: 9, "other": 9}) == {STREAM: (7, {})}


async def test_a_table_enabled_later_has_the_events_that_the_topic_keeps_and_sums_count_once(
    tmp_path: Path,
) -> None:
    on = bus()
    await publish(on, tick(0), tick(1))
    async with running(store(tmp_path, on, entries=0)):
        await eventually(is_committed(on, 2))
    assert not (tmp_path / "entries").exists()
    await publish(on, tick(1), tick(2))
    async with running(store(tmp_path, on)):
        await eventually(is_committed(on, 4))
    assert ticks_stored(tmp_path) == 3
    assert offsets_stored(tmp_path) == [0, 1, 3]


async def test_lost_seen_samples_are_logged(tmp_path: Path) -> None:
    on = bus()
    await publish(on, tick(0))
    async with running(store(tmp_path, on)):
        await eventually(is_committed(on, 1))
    await asyncio.to_thread(shutil.rmtree, tmp_path / "seen_samples")
    await publish(on, tick(1))
    with capture_logs() as logged:
        async with running(store(tmp_path, on)):
            await eventually(is_committed(on, 2))
    lost = [line for line in logged if line["event"] == "seen_samples_lost"]
    assert [(line["stream"], line["offset"]) for line in lost] == [(STREAM, 0)]


async def test_each_commit_repeats_the_completeness_of_other_sinks_partitions(
    tmp_path: Path,
) -> None:
    on = bus()
    others = UsageTable(store_uri=str(tmp_path))
    others.load(["another"])
    commit_info = describe(valid_through={"7": 5_000_000})
    others.append([row(1, 1, offset=3)], {"another": 3}, time_ms=1, commit_info=commit_info)
    await publish(on, tick(0))
    async with running(store(tmp_path, on)):
        await eventually(is_committed(on, 1))
    newest = DeltaTable(str(tmp_path / "usage")).history(1)
    assert valid_through_us(newest) == {"7": 5_000_000}


def test_completeness_is_known_despite_many_commits_without_it(
    tmp_path: Path,
) -> None:
    """As far back as for readers of the table; otherwise the sink would not repeat it."""
    table, uri = UsageTable(store_uri=str(tmp_path)), str(tmp_path)
    table.load(["s"])
    marks = describe(valid_through={"7": 5_000_000})
    table.append([row(1, 1, offset=0)], {"s": 0}, time_ms=1, commit_info=marks)
    for offset in range(1, 150):
        table.append([row(1, 1, offset=offset)], {"s": offset}, time_ms=1)
    table.load(["s"])
    assert table.complete_through() == {"7": 5_000_000}
    assert valid_through(uri, "usage") == datetime.fromtimestamp(5, tz=UTC)
