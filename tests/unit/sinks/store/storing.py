"""The store sink over a bus in memory, and queries of its tables."""

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import duckdb
from deltalake import DeltaTable
from prometheus_client import REGISTRY
from typing_extensions import override

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import (
    Consumer,
    Record,
    Subscription,
    TopicPartition,
)
from gpuledger.errors import BusUnavailableError
from gpuledger.records import GpuEvent
from gpuledger.runtime import Readiness
from gpuledger.store.query import entries_sql, gaps_sql
from gpuledger_sinks.loop import run_sink
from gpuledger_sinks.registry import STORE
from gpuledger_sinks.settings import StoreSettings
from gpuledger_sinks.store.buffer import rows_of
from gpuledger_sinks.store.minute_sums import MinuteSums, Row, bookings_of
from gpuledger_sinks.store.table import EntriesTable, UsageTable
from tests.default_topics import DEAD_LETTERS, EVENTS
from tests.unit.sinks.builders import (
    NODE,
    SECOND_NS,
    START_NS,
    ManualClock,
    committed,
    entry,
    event,
    place_of,
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
    # Most tests run by this machine's clock, but all events here are of one time.
    any_day = {"max_age_seconds": 1e10, "max_future_seconds": 1e10}
    # The tests query single ticks, which are in `entries`.
    given: dict[str, Any] = {"entries": True, "flush_seconds": 0.0, **any_day, **settings}
    values: dict[str, Any] = {"uri": str(uri), **given}
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
    """Return whether a sink has loaded its table and has unwritten rows, as a function."""
    return lambda: readiness.check("store.receiver").is_ok and lag_seconds() > 0


def is_committed(on: MemoryBus, offset: int) -> Callable[[], bool]:
    return lambda: committed(on, STORE.group, AT) == offset


def a_row(offset: int) -> list[Row]:
    return list(
        rows_of(
            event(offset, entries=[entry()]),
            _record_at(offset),
            ingested_time_ns=START_NS,
        )
    )


def fill(uri: Path, events: Sequence[GpuEvent]) -> None:
    """Create a store of the events' rows and sums; an event's offset is its position."""
    usage, sums = UsageTable(store_uri=str(uri)), MinuteSums()
    usage.load([STREAM])
    for offset, one in enumerate(events):
        sums.add(one, bookings_of(one), _record_at(offset), ingested_time_ns=START_NS)
    usage.append(list(sums.rows()), {STREAM: len(events) - 1}, time_ms=0)
    table = EntriesTable(store_uri=str(uri))
    table.load([STREAM])
    rows = [
        row
        for offset, one in enumerate(events)
        for row in rows_of(
            one,
            _record_at(offset),
            ingested_time_ns=START_NS,
        )
    ]
    table.append(rows, {STREAM: len(events) - 1}, time_ms=0)


def _record_at(offset: int) -> Record:
    return Record(AT.topic, AT.partition, offset, 0, None, b"")


def lose(store: Path) -> Callable[[], None]:
    """Replace each directory of rows by a file; return a function that undoes it."""
    folders = [path for name in ("usage", "entries") if (path := store / name).exists()]
    for folder in folders:
        folder.rename(store / f"{folder.name}-aside")
        folder.write_text("a file where the folder should be")

    def undo() -> None:
        for folder in folders:
            folder.unlink()
            (store / f"{folder.name}-aside").rename(folder)

    return undo


class KeepsSome:
    """A consumer that loses one partition when told, and keeps the positions of the others."""

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
    """A bus that gives the test its newest consumer."""

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


def commits_of_rows(uri: Path) -> list[int]:
    """Return how many rows each commit has added, oldest first."""
    history = DeltaTable(str(uri / "entries")).history()
    added = [one.get("operationMetrics", {}).get("num_added_rows") for one in reversed(history)]
    return [int(count) for count in added if count]
