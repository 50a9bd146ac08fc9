"""Files that no commit names are removed when they are old, and nothing else is."""

import asyncio
import os
import threading
import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from typing_extensions import override

from gpuledger.bus.protocol import Record
from gpuledger.clock import NS_PER_DAY
from gpuledger.runtime.tasks import in_daemon_thread
from gpuledger_sinks.errors import ReceiverUnavailableError
from gpuledger_sinks.settings import StoreSettings
from gpuledger_sinks.store.buffer import rows_of
from gpuledger_sinks.store.lease import MaintenanceLease
from gpuledger_sinks.store.maintainer import (
    Maintainer,
    MaintenanceDone,
    MaintenanceStep,
    Reporter,
    report_nothing,
)
from gpuledger_sinks.store.table import EntriesTable
from gpuledger_sinks.store.upkeep import MaintainerTask, OrphanRemoval, open_upkeep
from tests.unit.sinks.builders import SECOND_NS, START_NS, ManualClock, event, eventually

HOUR_SECONDS = 3600


def filled(store: Path) -> EntriesTable:
    table = EntriesTable(store_uri=str(store))
    table.load(["stream"])
    rows = list(
        rows_of(
            event(0),
            Record("topic", 0, 0, 1, None, b""),
            ingested_time_ns=START_NS,
        )
    )
    table.append(rows, {"stream": 0}, time_ms=1)
    return table


def parts(store: Path) -> set[str]:
    return {path.name for path in store.glob("entries/event_date=*/*.parquet")}


def orphan(store: Path, *, age_hours: float) -> str:
    """Leave what a writer leaves that was killed between its file and its commit."""
    folder = next(store.glob("entries/event_date=*"))
    path = folder / f"part-{age_hours}.parquet"
    path.write_bytes(b"half a file")
    written_at = time.time() - age_hours * HOUR_SECONDS
    os.utime(path, (written_at, written_at))
    return path.name


def test_old_orphans_go_and_what_is_stored_or_about_to_be_stays(tmp_path: Path) -> None:
    table = filled(tmp_path)
    stored = parts(tmp_path)
    orphan(tmp_path, age_hours=30)
    about_to_be_committed = orphan(tmp_path, age_hours=1)

    assert table.remove_orphans(older_than_hours=24) == 1

    assert parts(tmp_path) == stored | {about_to_be_committed}
    rows = list(
        rows_of(
            event(1),
            Record("topic", 0, 1, 1, None, b""),
            ingested_time_ns=START_NS,
        )
    )
    table.append(rows, {"stream": 1}, time_ms=1)


def test_a_table_that_is_not_there_yet_has_no_orphans(tmp_path: Path) -> None:
    assert EntriesTable(store_uri=str(tmp_path)).remove_orphans(older_than_hours=1) == 0


async def test_it_is_done_at_the_start_and_then_at_its_interval(tmp_path: Path) -> None:
    table, clock = filled(tmp_path), ManualClock()
    settings = StoreSettings(uri=str(tmp_path), maintenance_interval_seconds=86_400)
    orphan_removal = OrphanRemoval(tables=[table], settings=settings, clock=clock)
    stored = parts(tmp_path)

    for _ in range(2):
        orphan(tmp_path, age_hours=200)
        with capture_logs() as logged:
            orphan_removal.begin_if_due()
            await eventually(lambda: parts(tmp_path) == stored)
            await eventually(lambda: logged)
        assert [(line["event"], line["count"]) for line in logged] == [("orphans_removed", 1)]
        clock.now_ns += 86_400 * SECOND_NS - 1
        orphan(tmp_path, age_hours=201)
        orphan_removal.begin_if_due()
        await asyncio.sleep(0)
        assert parts(tmp_path) != stored
        table.remove_orphans(older_than_hours=168)
        clock.now_ns += 1


class Broken(EntriesTable):
    """A table that cannot be looked through."""

    def __init__(self, store: Path, error: Exception) -> None:
        super().__init__(store_uri=str(store))
        self._error = error

    @override
    def remove_orphans(self, *, older_than_hours: int) -> int:
        raise self._error


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ReceiverUnavailableError("disk full"), "disk full"),
        (RuntimeError("of no kind that is known"), "RuntimeError('of no kind that is known')"),
    ],
)
async def test_a_table_that_fails_is_named_and_the_next_one_is_looked_through(
    tmp_path: Path, error: Exception, shown: str
) -> None:
    table = filled(tmp_path / "good")
    stored = parts(tmp_path / "good")
    orphan(tmp_path / "good", age_hours=200)
    settings = StoreSettings(uri=str(tmp_path), maintenance_interval_seconds=86_400)
    tables = [Broken(tmp_path / "bad", error), table]
    orphan_removal = OrphanRemoval(tables=tables, settings=settings, clock=ManualClock())
    with capture_logs() as logged:
        orphan_removal.begin_if_due()
        await eventually(lambda: len(logged) == 2)

    assert [line["event"] for line in logged] == ["maintenance_failed", "orphans_removed"]
    assert logged[0]["error"] == shown
    assert parts(tmp_path / "good") == stored


class Slow(EntriesTable):
    """A table whose orphans take until the test says so to look for."""

    def __init__(self, store: Path) -> None:
        super().__init__(store_uri=str(store))
        self.begun, self.goes_on = threading.Event(), threading.Event()

    @override
    def remove_orphans(self, *, older_than_hours: int) -> int:
        self.begun.set()
        self.goes_on.wait()
        return 0


async def test_one_that_takes_longer_than_its_interval_is_not_begun_twice(tmp_path: Path) -> None:
    table, clock = Slow(tmp_path), ManualClock()
    settings = StoreSettings(uri=str(tmp_path), maintenance_interval_seconds=60)
    orphan_removal = OrphanRemoval(tables=[table], settings=settings, clock=clock)
    orphan_removal.begin_if_due()
    await eventually(table.begun.is_set)
    running = asyncio.all_tasks()

    clock.advance(61)
    orphan_removal.begin_if_due()
    assert asyncio.all_tasks() == running

    table.goes_on.set()
    await eventually(lambda: asyncio.all_tasks() == {asyncio.current_task()})
    table.begun.clear()
    orphan_removal.begin_if_due()
    await eventually(table.begun.is_set)


def test_the_end_of_a_sink_does_not_wait_for_its_maintenance(tmp_path: Path) -> None:
    table = Slow(tmp_path)
    settings = StoreSettings(uri=str(tmp_path), maintenance_interval_seconds=86_400)
    orphan_removal = OrphanRemoval(tables=[table], settings=settings, clock=ManualClock())

    async def begin_and_end() -> None:
        orphan_removal.begin_if_due()
        await eventually(table.begun.is_set)

    # Where the loop did wait, the test would for ever.
    emergency = threading.Timer(10, table.goes_on.set)
    emergency.start()
    asyncio.run(begin_and_end())
    emergency.cancel()

    assert not table.goes_on.is_set()
    table.goes_on.set()


async def test_what_a_thread_returns_or_raises_comes_back() -> None:
    assert await in_daemon_thread(lambda: 42) == 42
    with pytest.raises(ZeroDivisionError):
        await in_daemon_thread(lambda: 1 // 0)


async def test_what_goes_of_a_table_that_is_written_no_more_is_freed_as_well(
    tmp_path: Path,
) -> None:
    filled(tmp_path)
    settings = StoreSettings(uri=str(tmp_path), entries=False, orphan_age_hours=0)
    at = ManualClock(START_NS + 60 * NS_PER_DAY)
    assert Maintainer(settings, clock=at).run().purged_files > 0
    assert parts(tmp_path)
    async with open_upkeep(settings, clock=at) as (orphan_removal, _):
        orphan_removal.begin_if_due()
        await eventually(lambda: not parts(tmp_path))


class SlowMaintainer(Maintainer):
    """A maintainer that begins its first step once the test says so."""

    def __init__(self, settings: StoreSettings, *, clock: ManualClock) -> None:
        super().__init__(settings, clock=clock)
        self.begun, self.goes_on = threading.Event(), threading.Event()

    @override
    def run(self, report: Reporter = report_nothing) -> MaintenanceDone:
        def hold(number: int, total: int, step: MaintenanceStep) -> None:
            self.begun.set()
            self.goes_on.wait()

        return super().run(hold)


async def test_the_lease_of_a_maintainer_is_let_go_with_its_sink(tmp_path: Path) -> None:
    settings = StoreSettings(uri=str(tmp_path), rollup_interval_seconds=60)
    at = ManualClock()
    maintainer = SlowMaintainer(settings, clock=at)
    maintainer_task = MaintainerTask(maintainer, settings=settings, clock=at)
    at.advance(61)
    maintainer_task.begin_if_due()
    await eventually(maintainer.begun.is_set)
    heir = MaintenanceLease(store_uri=str(tmp_path), holder="heir", clock=at)
    assert not heir.acquire()
    asyncio.get_running_loop().call_later(0.01, maintainer.goes_on.set)
    await maintainer_task.end()
    assert heir.acquire()
    # It ended behind its first step.
    assert not (tmp_path / "usage_daily").exists()
