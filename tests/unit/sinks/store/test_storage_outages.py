"""The store sink while its storage is unavailable, damaged, contended or another's."""

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from arro3.core import DataType, Field, Schema, Table
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError
from typing_extensions import override

from gpuledger.errors import UserError
from gpuledger.runtime import CheckSeverity, Readiness
from gpuledger.store.schema import ENTRIES, TableSchema
from gpuledger_sinks.errors import DiskFullError, ReceiverUnavailableError
from gpuledger_sinks.store.damage import storage_errors
from gpuledger_sinks.store.table import EntriesTable, StreamTable
from tests.hanging import HANG_SECONDS
from tests.unit.sinks.builders import (
    SECOND_NS,
    START_NS,
    ManualClock,
    bus,
    entry,
    event,
    eventually,
    publish,
    running,
)
from tests.unit.sinks.store.storing import (
    STREAM,
    a_row,
    holds_rows,
    is_committed,
    lag_seconds,
    lose,
    offsets,
    store,
)

Write = Callable[..., None]


def raced(write: Write, uri: str) -> Write:
    """Let another writer commit the same rows just before the first commit."""
    attempts = count()

    def writing(table: DeltaTable, data: Table, **options: Any) -> None:  # noqa: ANN401  # deltalake's own
        if next(attempts) == 0:
            write(DeltaTable(uri), data, **options)
        write(table, data, **options)

    return writing


def failing(write: Write, uri: str) -> Write:
    """Fail twice, then lose the response to a commit."""
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
    monkeypatch.setattr("gpuledger_sinks.store.table.write_deltalake", write)
    on, clock = bus(), ManualClock()
    await publish(on, event(0, entries=[entry()]), event(1, entries=[entry()]))

    async with running(store(tmp_path, on, clock=clock)):
        await eventually(lambda: EntriesTable(store_uri=str(tmp_path)).load([STREAM]))
        await publish(on, event(2, entries=[entry()]))
        await eventually(is_committed(on, 3))

    assert offsets(tmp_path) == [0, 1, 2]


async def test_a_full_disk_fails_a_critical_check_until_it_has_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other failures of the storage fail only the warning."""
    full, unreachable = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), OSError("stale handle")
    failures: list[OSError] = [full]

    def writing(*given: Any, **options: Any) -> None:  # noqa: ANN401  # deltalake's own
        if failures:
            raise failures[0]
        write_deltalake(*given, **options)

    monkeypatch.setattr("gpuledger_sinks.store.table.write_deltalake", writing)
    on, readiness = bus(), Readiness()
    receiver = readiness.check("store.receiver", severity=CheckSeverity.WARNING)
    disk = readiness.check("store.disk")
    await publish(on, event(0))
    async with running(store(tmp_path, on, readiness=readiness)):
        await eventually(lambda: disk.has_failed)
        assert f"store {tmp_path}/" in disk.detail
        assert "No space left on device" in disk.detail
        assert not readiness.is_ready()
        failures[0] = unreachable
        await eventually(lambda: disk.is_ok)
        assert receiver.has_failed
        assert readiness.is_ready()
        failures.clear()
        await eventually(is_committed(on, 1))
        await eventually(lambda: receiver.is_ok)


@pytest.mark.parametrize(
    ("blocks", "available", "inodes", "free_inodes", "is_full"),
    [
        (1000, 1, 100, 1, False),
        (1000, 0, 100, 1, True),
        (1000, 1, 100, 0, True),
        # Without a fixed number of inodes, such as Btrfs.
        (1000, 1, 0, 0, False),
        # Without a size, such as an object store that is mounted as a directory.
        (0, 0, 0, 0, False),
    ],
)
def test_a_table_that_cannot_be_created_on_a_full_disk_reports_the_full_disk(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    blocks: int,
    available: int,
    inodes: int,
    free_inodes: int,
    is_full: bool,
) -> None:
    """deltalake's error names only the missing log."""
    size = 4096
    disk = os.statvfs_result((size, size, blocks, 100, available, inodes, 1, free_inodes, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    with pytest.raises(ReceiverUnavailableError) as raised, storage_errors(f"{tmp_path}/new"):
        raise DeltaError("No files in log segment")
    assert isinstance(raised.value, DiskFullError) == is_full
    assert ("No space left on device" in str(raised.value)) == is_full
    assert f"store {tmp_path}/new" in str(raised.value)


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


def test_a_table_with_other_columns_is_rejected_by_name(tmp_path: Path) -> None:
    DeltaTable.create(str(tmp_path / "entries"), schema=Schema([Field("node", DataType.int64())]))

    with pytest.raises(UserError, match=r"differs in column .*node.*set another store\.uri"):
        EntriesTable(store_uri=str(tmp_path)).load([])


def test_a_store_without_write_permission_is_unavailable_and_causes_no_traceback(
    tmp_path: Path,
) -> None:
    (tmp_path / "entries").write_text("a file where the folder should be")

    with pytest.raises(ReceiverUnavailableError):
        EntriesTable(store_uri=str(tmp_path)).load([])


def test_a_storage_that_becomes_unavailable_after_loading_is_reported_too(
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


def test_a_storage_that_becomes_unavailable_during_loading_is_reported_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_: DeltaTable, stream: str) -> int:
        raise OSError(f"{stream}: Stale file handle")

    monkeypatch.setattr(DeltaTable, "transaction_version", away)
    with pytest.raises(ReceiverUnavailableError, match="Stale file handle"):
        EntriesTable(store_uri=str(tmp_path)).load([STREAM])


Load = Callable[[StreamTable, Iterable[str]], dict[str, int]]


class HangingStorage:
    """A storage that accepts connections, and answers none of them until told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers, self.is_asked = threading.Event(), threading.Event()
        load: Load = StreamTable.load

        def loading(table: StreamTable, streams: Iterable[str]) -> dict[str, int]:
            self.is_asked.set()
            self.answers.wait()
            return load(table, streams)

        monkeypatch.setattr(StreamTable, "load", loading)


async def test_a_storage_that_never_answered_fails_the_check_and_the_lag_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuledger.runtime.retry.SLOW_SECONDS", 0.0)
    storage, on, readiness = HangingStorage(monkeypatch), bus(), Readiness()
    clock, check = ManualClock(START_NS + 7 * SECOND_NS), readiness.check("store.receiver")
    await publish(on, event(0), event(1))
    async with running(store(tmp_path, on, clock=clock, readiness=readiness)):
        await eventually(lambda: check.has_failed)
        assert f"{tmp_path}: no answer for" in check.detail
        assert lag_seconds() == 7
        clock.advance(300)
        assert lag_seconds() == 307

        storage.answers.set()
        await eventually(is_committed(on, 2))
        assert check.is_ok
        await eventually(lambda: lag_seconds() == 0)


async def test_events_that_arrive_while_a_storage_has_never_answered_are_lag_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, on, clock = HangingStorage(monkeypatch), bus(), ManualClock()
    async with running(store(tmp_path, on, clock=clock)):
        await eventually(lambda: storage.is_asked.is_set() and lag_seconds() == 0)
        ticks = 0
        async with asyncio.timeout(HANG_SECONDS):
            while lag_seconds() <= 1:
                await publish(on, event(ticks))
                ticks += 1
                clock.advance(1)
                await asyncio.sleep(0.005)
        assert not any(is_committed(on, offset)() for offset in range(1, ticks + 1))

        storage.answers.set()
        await eventually(is_committed(on, ticks))
        await eventually(lambda: lag_seconds() == 0)


async def test_rows_wait_for_a_storage_that_becomes_unavailable_between_two_writes(
    tmp_path: Path,
) -> None:
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


async def test_a_sink_ends_cleanly_while_its_storage_is_unavailable_and_the_next_one_continues(
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


class PanicException(BaseException):
    """A panic in Rust as Python gets it: not an `Exception`."""


class Panicking(TableSchema):
    """A table that fails to convert rows to columns."""

    @override
    def table_of(self, rows: Sequence[tuple[Any, ...]]) -> Table:
        raise PanicException("byte array offset overflow")


def test_a_panic_of_the_writer_counts_as_a_storage_that_does_not_answer(tmp_path: Path) -> None:
    """It does not end the sink, although it is not an `Exception`."""
    shape = Panicking(**{one.name: getattr(ENTRIES, one.name) for one in fields(ENTRIES)})
    table = StreamTable(shape, store_uri=str(tmp_path))
    table.load([STREAM])

    with pytest.raises(ReceiverUnavailableError, match="writer failed: byte array offset overflow"):
        table.append([row for one in range(2) for row in a_row(one)], {STREAM: 1}, time_ms=1)
