"""Only old files that no commit names are removed."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from gpuledger.bus.protocol import Record
from gpuledger.clock import NS_PER_DAY
from gpuledger.runtime.tasks import in_daemon_thread
from gpuledger_sinks.metrics import MAINTENANCE_LAG_SECONDS
from gpuledger_sinks.settings import StoreSettings
from gpuledger_sinks.store.buffer import rows_of
from gpuledger_sinks.store.maintainer import REMOVE_OLD_ROWS, Maintainer, MaintenanceSettings
from gpuledger_sinks.store.maintenance_lag import measured_lag
from gpuledger_sinks.store.table import EntriesTable
from tests.unit.sinks.builders import SECOND_NS, START_NS, ManualClock, event, eventually
from tests.unit.sinks.store.test_maintainer import counted, fill

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
    """Leave the file of a writer that was killed before its commit."""
    folder = next(store.glob("entries/event_date=*"))
    path = folder / f"part-{age_hours}.parquet"
    path.write_bytes(b"half a file")
    written_at = time.time() - age_hours * HOUR_SECONDS
    os.utime(path, (written_at, written_at))
    return path.name


def test_old_orphans_are_removed_and_stored_or_uncommitted_files_remain(tmp_path: Path) -> None:
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


def test_a_missing_table_has_no_orphans(tmp_path: Path) -> None:
    assert EntriesTable(store_uri=str(tmp_path)).remove_orphans(older_than_hours=1) == 0


async def test_the_result_or_error_of_a_thread_is_returned() -> None:
    assert await in_daemon_thread(lambda: 42) == 42
    with pytest.raises(ZeroDivisionError):
        await in_daemon_thread(lambda: 1 // 0)


def test_old_rows_of_a_table_that_is_no_longer_written_are_freed_too(tmp_path: Path) -> None:
    filled(tmp_path)
    settings = MaintenanceSettings(uri=str(tmp_path), orphan_age_hours=0)
    at = ManualClock(START_NS + 60 * NS_PER_DAY)
    done = Maintainer(settings, clock=at).run()
    assert sum(counted(done, REMOVE_OLD_ROWS)) > 0
    assert not parts(tmp_path)


def test_a_run_that_is_stopped_ends_after_its_current_step(tmp_path: Path) -> None:
    filled(tmp_path)
    maintainer = Maintainer(MaintenanceSettings(uri=str(tmp_path)), clock=ManualClock())
    done = maintainer.run(lambda *_: maintainer.stop())
    assert len(done.steps) == 1


def lag(settings: StoreSettings, clock: ManualClock) -> float:
    """Return the lag that a sink shows after one measurement."""

    async def measure() -> None:
        async with measured_lag(settings, clock=clock) as measuring:
            clock.advance(300)
            measuring.begin_if_due()
            await eventually(lambda: MAINTENANCE_LAG_SECONDS._value.get() != -1)  # noqa: SLF001  # a gauge has no other reader

    MAINTENANCE_LAG_SECONDS.set(-1)
    asyncio.run(measure())
    return float(MAINTENANCE_LAG_SECONDS._value.get())  # noqa: SLF001  # likewise


def test_the_lag_of_maintenance_is_measured_even_before_the_first_run(
    tmp_path: Path,
) -> None:
    settings = StoreSettings(uri=str(tmp_path))
    assert lag(settings, ManualClock(time.time_ns())) == 0
    fill(tmp_path, commits=1)
    an_hour_ago = ManualClock(time.time_ns() - 3600 * SECOND_NS)
    assert 3590 < lag(settings, an_hour_ago) < 3700
    Maintainer(MaintenanceSettings(uri=str(tmp_path)), clock=ManualClock(time.time_ns())).run()
    assert lag(settings, an_hour_ago) < 60
