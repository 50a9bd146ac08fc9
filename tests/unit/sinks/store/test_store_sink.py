"""The store sink over the bus in memory: each entry once, whatever is repeated or raced."""

import asyncio
import base64
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, cast

import duckdb
import pytest
from arro3.core import DataType, Field, Schema, Table
from deltalake import DeltaTable, write_deltalake
from prometheus_client import REGISTRY
from structlog.testing import capture_logs
from typing_extensions import override

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import (
    Consumer,
    Message,
    Producer,
    Record,
    Subscription,
    TopicPartition,
)
from gpuledger.codec import encode
from gpuledger.errors import BusUnavailableError, UserError
from gpuledger.records import Account, GpuEvent
from gpuledger.runtime import CheckSeverity, Readiness
from gpuledger.store.query import entries_sql, gaps_sql
from gpuledger.store.schema import ENTRIES, TableSchema
from gpuledger.topics import DEAD_LETTERS, EVENTS
from sinks.errors import ReceiverUnavailableError
from sinks.loop import run_sink
from sinks.registry import STORE
from sinks.settings import StoreSettings
from sinks.store.buffer import DAYS_A_WAIT, MAX_DAYS, Row, RowBuffer, rows_of
from sinks.store.table import EntriesTable, StaleTableError, StreamTable
from tests.unit.sinks.builders import (
    NODE,
    PARTITIONS,
    SECOND_NS,
    START_NS,
    ManualClock,
    bus,
    committed,
    dead_letters,
    entry,
    event,
    eventually,
    place_of,
    publish,
    running,
    settlement,
)

AT = place_of(NODE)
STREAM = f"{STORE.group}|{AT.topic}|{AT.partition}"


def store(
    uri: Path,
    on: MemoryBus,
    *,
    clock: ManualClock | None = None,
    readiness: Readiness | None = None,
    **settings: float | str,
) -> Coroutine[Any, Any, None]:
    # The events here are of one time, and most tests run by this machine's clock.
    any_day = {"max_age_seconds": 1e10, "max_future_seconds": 1e10}
    values: dict[str, Any] = {"uri": str(uri), "flush_seconds": 0.0, **any_day, **settings}
    return run_sink(
        STORE,
        bus=on,
        settings=StoreSettings(**values),
        readiness=readiness or Readiness(),
        clock=clock,
    )


def query(uri: Path, sql: str) -> list[tuple[Any, ...]]:
    with duckdb.connect() as connection:
        return connection.execute(sql.format(entries=entries_sql(str(uri)))).fetchall()


def gaps(uri: Path, columns: str) -> list[tuple[Any, ...]]:
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone='UTC'")
        relation = connection.sql(f"FROM {gaps_sql(str(uri))}")
        return relation.project(columns).order("ALL").fetchall()


def at_seconds(tick: int) -> datetime:
    return datetime.fromtimestamp(START_NS / SECOND_NS + tick, tz=UTC)


def offsets(uri: Path) -> list[int]:
    return [row[0] for row in query(uri, "select kafka_offset from {entries} order by 1")]


def lag_seconds() -> float:
    return REGISTRY.get_sample_value("gpuledger_sink_lag_seconds", {"sink": "store"}) or 0.0


def holds_rows(readiness: Readiness) -> Callable[[], bool]:
    """Return what tells whether a sink has loaded its table and holds what it has not written."""
    return lambda: readiness.check("store.receiver").is_ok and lag_seconds() > 0


def is_committed(on: MemoryBus, offset: int) -> Callable[[], bool]:
    return lambda: committed(on, STORE.group, AT) == offset


async def test_a_query_sums_what_the_events_said(tmp_path: Path) -> None:
    on = bus()
    await publish(on, *(event(tick, entries=[entry(busy_seconds=0.25)]) for tick in range(8)))

    async with running(store(tmp_path, on)):
        await eventually(is_committed(on, 8))

    sql = "select namespace, pod, sum(busy_seconds), count(*) from {entries} group by all"
    assert query(tmp_path, sql) == [("research", "train-0", 2.0, 8)]


async def test_a_query_sums_what_was_settled_after_the_end_of_a_process(tmp_path: Path) -> None:
    """On the day of its ticks; the sum over all accounts is what it was without."""
    on, midnight_ns = bus(), START_NS - START_NS % (86_400 * SECOND_NS) + 86_400 * SECOND_NS
    nobodys = entry(Account.UNATTRIBUTED, busy_seconds=0.5)
    settled = settlement(0.25, until_time_ns=midnight_ns - SECOND_NS)
    await publish(on, event(entries=[nobodys], time_ns=midnight_ns, settlements=[settled]))

    async with running(store(tmp_path, on)):
        await eventually(is_committed(on, 1))

    sql = "select account, event_date::varchar, sum(busy_seconds) from {entries} group by all"
    assert query(tmp_path, f"{sql} order by all") == [
        ("pod", "2026-09-21", 0.25),
        ("unattributed", "2026-09-21", -0.25),
        ("unattributed", "2026-09-22", 0.5),
    ]


async def test_what_is_held_is_written_when_the_sink_ends(tmp_path: Path) -> None:
    on = bus()
    await publish(on, event(0, entries=[entry()]), event(1, entries=[entry()]))
    async with running(store(tmp_path, on, flush_seconds=3600.0, readiness=(at := Readiness()))):
        await eventually(holds_rows(at))

    assert offsets(tmp_path) == [0, 1]
    assert committed(on, STORE.group, AT) == 2


async def test_what_the_table_has_is_not_appended_again_where_the_commit_was_lost(
    tmp_path: Path,
) -> None:
    on = bus()
    await publish(on, event(0, entries=[entry()]), event(1, entries=[entry()]))
    async with running(store(tmp_path, on)):
        await eventually(is_committed(on, 2))
    on._groups[STORE.group].committed.clear()
    await publish(on, event(2, entries=[entry()]))

    async with running(store(tmp_path, on)):
        await eventually(is_committed(on, 3))

    assert offsets(tmp_path) == [0, 1, 2]


async def test_a_commit_in_kafka_ahead_of_the_table_loses_nothing(tmp_path: Path) -> None:
    on = bus()
    await publish(on, event(0, entries=[entry()]), event(1, entries=[entry()]))
    async with running(store(tmp_path / "other", on)):
        await eventually(is_committed(on, 2))

    async with running(store(tmp_path / "new", on)):
        await eventually(lambda: EntriesTable(store_uri=str(tmp_path / "new")).load([STREAM]))

    assert offsets(tmp_path / "new") == [0, 1]


async def test_a_tick_that_was_published_twice_is_one_row(tmp_path: Path) -> None:
    on = bus()
    await publish(on, *(event(tick, entries=[entry()]) for tick in (0, 1, 0, 1, 2)))

    async with running(store(tmp_path, on)):
        await eventually(is_committed(on, 5))

    assert offsets(tmp_path) == [0, 1, 4]


@pytest.mark.parametrize(
    ("bad", "reason", "detail"),
    [
        (b"{", "undecodable", "gpuledger.events.v1"),
        (event(1, entries=[entry(), entry(allocation=3)]), "invalid", "allocation: position 3"),
    ],
)
async def test_what_cannot_be_stored_is_put_aside_whole_and_the_stream_goes_on(
    bad: bytes | GpuEvent, reason: str, detail: str, tmp_path: Path
) -> None:
    on = bus()
    await publish(on, event(0, entries=[entry()]), bad, event(2, entries=[entry()]))

    async with running(store(tmp_path, on)):
        await eventually(is_committed(on, 3))

    assert offsets(tmp_path) == [0, 2]
    (letter,) = await dead_letters(on)
    assert (letter.topic, letter.partition, letter.offset) == (*AT, 1)
    assert (letter.reason, letter.consumer) == (reason, STORE.group)
    assert detail in letter.detail
    assert base64.b64decode(letter.value_base64 or "") == (
        bad if isinstance(bad, bytes) else encode(bad)
    )


async def test_a_topic_made_anew_is_an_error_that_names_the_remedy(tmp_path: Path) -> None:
    """Also where it has grown beyond what is stored, and nothing could be seen by offsets."""
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


async def test_a_topic_made_anew_while_the_sink_holds_rows_leaves_none_of_them(
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


async def test_a_topic_made_anew_before_anything_was_stored_is_simply_read(
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


async def test_offsets_of_before_are_taken_over_with_the_topic_that_there_is(
    tmp_path: Path,
) -> None:
    """A table that an earlier version wrote knows no identity of the topic."""
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


async def test_another_cluster_whose_partition_is_shorter_is_refused_by_offsets_too(
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


async def test_what_was_removed_before_it_was_stored_is_a_row_of_gaps(tmp_path: Path) -> None:
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


async def test_a_gap_has_its_row_also_where_its_partition_is_given_up_first_and_comes_back(
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
        async with on.consumer(Subscription(group=STORE.group, topics=(EVENTS.name,))) as other:
            while not other.assignment():
                await other.poll(timeout_seconds=0.01, max_records=1)
        await publish(on, event(20))
        await eventually(is_committed(on, 10))

    assert found.detail.startswith("1 since the start")
    assert gaps(tmp_path, "first_offset, next_offset, missed_offsets") == [(3, 9, 6)]


def cut_data_files(uri: Path) -> None:
    for part in uri.glob("entries/event_date=*/*.parquet"):
        part.write_bytes(part.read_bytes()[:300])


async def test_a_gap_has_its_row_also_where_a_data_file_is_damaged(tmp_path: Path) -> None:
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


async def test_two_sinks_share_the_partitions_and_repeat_nothing(tmp_path: Path) -> None:
    on = bus()
    nodes = [f"node-{number}" for number in range(6)]
    assert len({place_of(node) for node in nodes}) == 2
    async with running(store(tmp_path, on)), running(store(tmp_path, on)):
        for tick in range(10):
            await publish(on, *(event(tick, node=node, entries=[entry()]) for node in nodes))
        rows = 60
        sql = "select count(*), count(distinct (kafka_partition, kafka_offset)) from {entries}"
        await eventually(
            lambda: (
                EntriesTable(store_uri=str(tmp_path)).load([STREAM])
                and query(tmp_path, sql) == [(rows, rows)]
            ),
            within_seconds=10,
        )


def a_row(offset: int) -> list[Row]:
    record = Record(AT.topic, AT.partition, offset, 0, None, b"")
    return list(rows_of(event(offset, entries=[entry()]), record))


def test_a_writer_that_lost_its_partition_is_refused(tmp_path: Path) -> None:
    zombie, owner = (EntriesTable(store_uri=str(tmp_path)) for _ in range(2))
    zombie.load([STREAM])
    owner.load([STREAM])
    owner.append(a_row(0), {STREAM: 0}, time_ms=0)

    with pytest.raises(StaleTableError):
        zombie.append(a_row(0), {STREAM: 0}, time_ms=0)

    assert offsets(tmp_path) == [0]
    assert zombie.load([STREAM]) == {STREAM: 0}


Write = Callable[..., None]


def raced(write: Write, uri: str) -> Write:
    """Let somebody else append the same just before the first append."""
    attempts = count()

    def writing(table: DeltaTable, data: Table, **options: Any) -> None:  # noqa: ANN401  # deltalake's own
        if next(attempts) == 0:
            write(DeltaTable(uri), data, **options)
        write(table, data, **options)

    return writing


def failing(write: Write, uri: str) -> Write:
    """Be away twice, then lose the answer to a commit."""
    attempts = count()

    def writing(table: DeltaTable, data: Table, **options: Any) -> None:  # noqa: ANN401  # deltalake's own
        if (attempt := next(attempts)) >= 2:
            write(table, data, **options)
        if attempt <= 2:
            raise OSError("connection lost")

    return writing


@pytest.mark.parametrize("mishap", [raced, failing])
async def test_a_race_or_an_outage_repeats_no_row(
    tmp_path: Path, mishap: Callable[[Write, str], Write], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = mishap(write_deltalake, str(tmp_path / "entries"))
    monkeypatch.setattr("sinks.store.table.write_deltalake", write)
    on, clock = bus(), ManualClock()
    await publish(on, event(0, entries=[entry()]), event(1, entries=[entry()]))

    async with running(store(tmp_path, on, clock=clock)):
        await eventually(lambda: EntriesTable(store_uri=str(tmp_path)).load([STREAM]))
        await publish(on, event(2, entries=[entry()]))
        await eventually(is_committed(on, 3))

    assert offsets(tmp_path) == [0, 1, 2]


async def test_a_damaged_store_fails_the_check_in_one_line_and_its_repair_needs_no_restart(
    tmp_path: Path,
) -> None:
    on, readiness = bus(), Readiness()
    await publish(on, *map(event, range(3)))
    async with running(store(tmp_path, on)):
        await eventually(is_committed(on, 3))
    newest = max((tmp_path / "entries" / "_delta_log").glob("*.json"))
    newest.write_bytes(newest.read_bytes()[:50])
    await publish(on, event(3))

    check = readiness.check("store.receiver")
    async with running(store(tmp_path, on, readiness=readiness)):
        await eventually(lambda: check.has_failed)
        assert f"its log is damaged ({newest.name})" in check.detail
        assert "\n" not in check.detail
        newest.rename(tmp_path / newest.name)
        await eventually(is_committed(on, 4))
        assert check.is_ok

    assert sorted(set(offsets(tmp_path))) == [0, 1, 2, 3]
    assert len(offsets(tmp_path)) == 4 * 2


def test_a_table_with_other_columns_is_refused_by_name(tmp_path: Path) -> None:
    DeltaTable.create(str(tmp_path / "entries"), schema=Schema([Field("node", DataType.int64())]))

    with pytest.raises(UserError, match=r"differs in column .*node.*name another store\.uri"):
        EntriesTable(store_uri=str(tmp_path)).load([])


def test_a_store_that_nobody_may_write_is_unavailable_not_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "entries").write_text("a file where the folder should be")

    with pytest.raises(ReceiverUnavailableError):
        EntriesTable(store_uri=str(tmp_path)).load([])


def lose(store: Path) -> Callable[[], None]:
    """Put a file in the place of the table's folder; return what undoes it."""
    folder, aside = store / "entries", store / "aside"
    folder.rename(aside)
    folder.write_text("a file where the folder should be")

    def undo() -> None:
        folder.unlink()
        aside.rename(folder)

    return undo


def test_a_storage_that_goes_away_after_the_table_was_loaded_is_unavailable_too(
    tmp_path: Path,
) -> None:
    table = EntriesTable(store_uri=str(tmp_path))
    table.load([STREAM])
    undo = lose(tmp_path)

    with pytest.raises(ReceiverUnavailableError):
        table.append(a_row(0), {STREAM: 0}, time_ms=0)

    undo()
    table.append(a_row(0), {STREAM: 0}, time_ms=0)
    assert offsets(tmp_path) == [0]


def test_a_storage_that_goes_away_while_the_table_is_loaded_is_unavailable_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_: DeltaTable, stream: str) -> int:
        raise OSError(f"{stream}: Stale file handle")

    monkeypatch.setattr(DeltaTable, "transaction_version", away)
    with pytest.raises(ReceiverUnavailableError, match="Stale file handle"):
        EntriesTable(store_uri=str(tmp_path)).load([STREAM])


Load = Callable[[StreamTable, Iterable[str]], dict[str, int]]


class HangingStorage:
    """A storage that takes connections, and answers none of them until it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers = threading.Event()
        load: Load = StreamTable.load

        def loading(table: StreamTable, streams: Iterable[str]) -> dict[str, int]:
            self.answers.wait()
            return load(table, streams)

        monkeypatch.setattr(StreamTable, "load", loading)


async def test_a_storage_that_never_answered_fails_the_check_and_the_lag_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sinks.retrying.ANSWER_SECONDS", 0.0)
    storage, on, readiness = HangingStorage(monkeypatch), bus(), Readiness()
    clock, check = ManualClock(START_NS + 7 * SECOND_NS), readiness.check("store.receiver")
    await publish(on, event(0), event(1))
    async with running(store(tmp_path, on, clock=clock, readiness=readiness)):
        await eventually(lambda: check.has_failed)
        assert f"{tmp_path}/entries: no answer for" in check.detail
        assert lag_seconds() == 7
        clock.advance(300)
        assert lag_seconds() == 307

        storage.answers.set()
        await eventually(is_committed(on, 2))
        assert check.is_ok
        await eventually(lambda: lag_seconds() == 0)


async def test_what_comes_while_a_storage_has_never_answered_is_lag_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, on, clock = HangingStorage(monkeypatch), bus(), ManualClock()
    async with running(store(tmp_path, on, clock=clock)):
        await eventually(lambda: on._groups and lag_seconds() == 0)
        await publish(on, event(0))
        await eventually(lambda: clock.advance(1) and lag_seconds() > 1)

        storage.answers.set()
        await eventually(is_committed(on, 1))
        await eventually(lambda: lag_seconds() == 0)


async def test_rows_wait_for_a_storage_that_goes_away_between_two_writes(tmp_path: Path) -> None:
    on, readiness = bus(), Readiness()
    check = readiness.check("store.receiver")
    await publish(on, event(0, entries=[entry()]))
    async with running(store(tmp_path, on, clock=ManualClock(), readiness=readiness)):
        await eventually(is_committed(on, 1))
        undo = lose(tmp_path)
        await publish(on, event(1, entries=[entry()]))
        await eventually(lambda: check.has_failed)
        undo()
        await eventually(is_committed(on, 2))

    assert offsets(tmp_path) == [0, 1]


async def test_a_sink_ends_well_while_its_storage_is_away_and_the_next_one_goes_on(
    tmp_path: Path,
) -> None:
    on = bus()
    await publish(on, event(0, entries=[entry()]))
    sink = asyncio.ensure_future(store(tmp_path, on))
    await eventually(is_committed(on, 1))
    sink.cancel()
    await asyncio.wait({sink})
    at = Readiness()
    sink = asyncio.ensure_future(store(tmp_path, on, flush_seconds=3600.0, readiness=at))
    await publish(on, event(1, entries=[entry()]))
    await eventually(holds_rows(at))
    undo = lose(tmp_path)

    sink.cancel()
    await asyncio.wait({sink})
    assert sink.cancelled()

    undo()
    async with running(store(tmp_path, on)):
        await eventually(is_committed(on, 2))
    assert offsets(tmp_path) == [0, 1]


class KeepsSome:
    """A consumer that is told to give up one partition, and keeps the others where they are."""

    def __init__(self, inner: Consumer, subscription: Subscription) -> None:
        self._inner, self._subscription = inner, subscription
        self.gives_up: list[TopicPartition] = []
        self.fails = 0

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # as the inner one has it
        return getattr(self._inner, name)

    async def poll(
        self, *, timeout_seconds: float, max_records: int
    ) -> Mapping[TopicPartition, Sequence[Record]]:
        if self.fails:
            self.fails -= 1
            raise BusUnavailableError("no broker answers")
        while self.gives_up:
            partition = frozenset({self.gives_up.pop()})
            await self._subscription.on_revoked(partition)
            await self._subscription.on_assigned(partition)
        return await self._inner.poll(timeout_seconds=timeout_seconds, max_records=max_records)


class KeepingBus(MemoryBus):
    """A bus of which the test has the consumer that was opened last."""

    newest: KeepsSome

    @override
    @asynccontextmanager
    async def consumer(self, subscription: Subscription) -> AsyncIterator[Consumer]:
        async with super().consumer(subscription) as consumer:
            self.newest = KeepsSome(consumer, subscription)
            yield cast("Consumer", self.newest)


def keeping() -> KeepingBus:
    return KeepingBus(
        [replace(each, partitions=2) if each is EVENTS else each for each in (EVENTS, DEAD_LETTERS)]
    )


async def test_where_it_goes_on_is_asked_once_the_write_of_before_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, begun = threading.Event(), threading.Event()

    def waiting(*args: Any, **options: Any) -> None:  # noqa: ANN401  # deltalake's own
        begun.set()
        goes_on.wait()
        write_deltalake(*args, **options)

    monkeypatch.setattr("sinks.store.table.write_deltalake", waiting)
    on, clock = keeping(), ManualClock()
    await publish(on, event(0, entries=[entry()]))
    async with running(store(tmp_path, on, clock=clock)):
        await eventually(begun.is_set)
        # The consumer is opened anew while a write of the one before is under way.
        before = on.newest
        before.fails = 8
        await eventually(lambda: on.newest is not before)
        await publish(on, event(1, entries=[entry()]))
        asyncio.get_running_loop().call_later(0.3, goes_on.set)
        await eventually(is_committed(on, 2))

    assert offsets(tmp_path) == [0, 1]


async def test_what_could_not_be_written_when_a_partition_went_is_read_again_of_all_others(
    tmp_path: Path,
) -> None:
    on = keeping()
    goes, stays = (
        next(f"n{n}" for n in range(99) if place_of(f"n{n}").partition == at) for at in (0, 1)
    )
    async with running(store(tmp_path, on)):
        await publish(on, event(0, node=stays, entries=[entry()]))
        await eventually(lambda: committed(on, STORE.group, place_of(stays)) == 1)
    async with running(store(tmp_path, on, flush_seconds=1.0, readiness=(at := Readiness()))):
        await publish(on, event(1, node=stays, entries=[entry()]))
        await eventually(holds_rows(at))
        undo = lose(tmp_path)
        with capture_logs() as logged:
            on.newest.gives_up.append(place_of(goes))
            await eventually(lambda: "commit_skipped" in {line["event"] for line in logged})
        undo()
        await eventually(lambda: committed(on, STORE.group, place_of(stays)) == 2)

    assert offsets(tmp_path) == [0, 1]


class LetterlessBus(KeepingBus):
    """A bus that takes no letters until a partition of the newest consumer was given up."""

    def __init__(self, *, gives_up: TopicPartition, refusals: int) -> None:
        super().__init__([replace(EVENTS, partitions=PARTITIONS), DEAD_LETTERS])
        self.gives_up, self.refusals = gives_up, refusals

    @override
    @asynccontextmanager
    async def producer(self) -> AsyncIterator[Producer]:
        async with super().producer() as producer:
            yield _LetterlessProducer(producer, self)


class _LetterlessProducer:
    def __init__(self, inner: Producer, on: LetterlessBus) -> None:
        self._inner, self._on = inner, on

    async def publish(self, topic: str, partition: int, messages: Sequence[Message]) -> None:
        if topic == DEAD_LETTERS.name and self._on.refusals:
            self._on.refusals -= 1
            self._on.newest.gives_up = [self._on.gives_up] if self._on.refusals else []
            raise BusUnavailableError("there is no such topic")
        await self._inner.publish(topic, partition, messages)


async def test_letters_of_a_partition_that_is_read_again_as_another_one_left_are_not_doubled(
    tmp_path: Path,
) -> None:
    other = TopicPartition(EVENTS.name, (AT.partition + 1) % PARTITIONS)
    on = LetterlessBus(gives_up=other, refusals=2)
    await publish(on, event(0, entries=[entry()]), b"{", event(2, entries=[entry()]))

    async with running(store(tmp_path, on, clock=ManualClock(), flush_seconds=60.0, flush_rows=3)):
        await eventually(lambda: not on.refusals)
        await publish(on, event(3, entries=[entry()]), event(4, entries=[entry()]))
        await eventually(is_committed(on, 5))

    assert offsets(tmp_path) == [0, 2, 3, 4]
    assert [letter.offset for letter in await dead_letters(on)] == [1]


async def test_rows_are_written_at_the_latest_when_they_take_so_many_bytes(tmp_path: Path) -> None:
    """In the midst of a poll too; each write goes with the offsets that it has."""
    on = bus()
    await publish(on, *(event(tick, entries=[entry()]) for tick in range(5)))

    async with running(store(tmp_path, on, flush_seconds=3600.0, flush_bytes=1_500)):
        await eventually(is_committed(on, 4))

    assert offsets(tmp_path) == [0, 1, 2, 3, 4]
    assert commits_of_rows(tmp_path) == [2, 2, 1]


async def test_one_write_has_rows_of_a_few_days_only(tmp_path: Path) -> None:
    """Each day is a folder, and a file that is held open."""
    on = bus()
    day = 86_400
    await publish(on, *(event(tick * day, entries=[entry()]) for tick in range(2 * MAX_DAYS + 1)))

    async with running(store(tmp_path, on, flush_seconds=3600.0)):
        await eventually(is_committed(on, 2 * MAX_DAYS))

    assert commits_of_rows(tmp_path) == [MAX_DAYS, MAX_DAYS, 1]


DEFAULTS = StoreSettings()
WINDOW: dict[str, Any] = {
    "max_age_seconds": DEFAULTS.max_age_seconds,
    "max_future_seconds": DEFAULTS.max_future_seconds,
}


async def test_days_that_are_made_up_are_put_aside_and_cost_no_file(tmp_path: Path) -> None:
    on, days = bus(), [-20_000, -32, -31, -1, 0, 1, 2, 80_000]
    await publish(on, *(event(seq=n + 1, time_ns=in_days(day)) for n, day in enumerate(days)))

    async with running(store(tmp_path, on, clock=ManualClock(), **WINDOW)):
        await eventually(is_committed(on, len(days)))

    assert sorted(set(offsets(tmp_path))) == [2, 3, 4, 5]
    assert [(letter.offset, letter.reason) for letter in await dead_letters(on)] == [
        (0, "too_old"),
        (1, "too_old"),
        (6, "future"),
        (7, "future"),
    ]
    assert [letter.detail for letter in await dead_letters(on)] == [
        "time_ns is of 1971-12-19, too long ago: store.max_age_seconds is 2678400",
        "time_ns is of 2026-08-20, too long ago: store.max_age_seconds is 2678400",
        "time_ns is of 2026-09-23, too far ahead: store.max_future_seconds is 86400",
        "time_ns is of 2245-10-03, too far ahead: store.max_future_seconds is 86400",
    ]


async def test_a_settlement_of_a_day_that_is_made_up_is_put_aside_too(tmp_path: Path) -> None:
    on = bus()
    await publish(on, event(settlements=[settlement(until_time_ns=in_days(-40))]), event(1))

    async with running(store(tmp_path, on, clock=ManualClock(), **WINDOW)):
        await eventually(is_committed(on, 2))

    assert set(offsets(tmp_path)) == {1}


async def test_older_days_are_stored_where_the_settings_reach_back_to_them(tmp_path: Path) -> None:
    on = bus()
    await publish(on, event(seq=1, time_ns=in_days(-400)), event(seq=2))
    reach = {**WINDOW, "max_age_seconds": 401 * 86_400.0}

    async with running(store(tmp_path, on, clock=ManualClock(), **reach)):
        await eventually(is_committed(on, 2))

    assert set(offsets(tmp_path)) == {0, 1}


@pytest.mark.parametrize(("days", "waits"), [(1, 1), (DAYS_A_WAIT, 1), (5 * DAYS_A_WAIT, 5)])
def test_rows_of_many_days_wait_for_longer_so_that_files_do_not_come_faster(
    days: int, waits: int
) -> None:
    rows = RowBuffer()
    for day in range(days):
        rows.add([(day,)], time_ns=in_days(day))
    rows.read_to(AT, days, now_ns=0)

    due = partial(rows.is_due, after_ns=30 * SECOND_NS, max_rows=100)
    assert not due(now_ns=30 * waits * SECOND_NS - 1)
    assert due(now_ns=30 * waits * SECOND_NS)
    assert due(now_ns=1, max_rows=days)


def test_nobody_can_have_rows_written_for_their_days_alone() -> None:
    """Beside the first and the last day there is the one that begins while rows wait."""
    assert sum(WINDOW.values()) / 86_400 + 2 < MAX_DAYS
    assert MAX_DAYS / DAYS_A_WAIT * DEFAULTS.flush_seconds <= 300  # what GpuledgerSinkLags allows


def in_days(days: int) -> int:
    return START_NS + days * 86_400 * SECOND_NS


def commits_of_rows(uri: Path) -> list[int]:
    """Return how many rows each commit has added, the oldest first."""
    history = DeltaTable(str(uri / "entries")).history()
    added = [one.get("operationMetrics", {}).get("num_added_rows") for one in reversed(history)]
    return [int(count) for count in added if count]


class PanicException(BaseException):
    """What a panic in Rust is in Python: no `Exception`."""


class Panicking(TableSchema):
    """A table of whose rows no columns can be made."""

    @override
    def table_of(self, rows: Sequence[tuple[Any, ...]]) -> Table:
        raise PanicException("byte array offset overflow")


def test_a_panic_of_the_writer_is_a_storage_that_does_not_answer(tmp_path: Path) -> None:
    """It ends no sink, as what is no `Exception` would."""
    shape = Panicking(**{one.name: getattr(ENTRIES, one.name) for one in fields(ENTRIES)})
    table = StreamTable(shape, store_uri=str(tmp_path))
    table.load([STREAM])

    with pytest.raises(ReceiverUnavailableError, match="writer failed: byte array offset overflow"):
        table.append([row for one in range(2) for row in a_row(one)], {STREAM: 1}, time_ms=1)
