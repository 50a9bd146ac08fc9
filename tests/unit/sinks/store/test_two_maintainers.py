"""Two concurrent maintainers of a store, and one that is killed between its steps.

Delta rejects the later of two conflicting commits, so that nothing is lost or doubled.
"""

import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable, write_deltalake

from gpuledger.clock import NS_PER_DAY, NS_PER_HOUR, NS_PER_MINUTE
from gpuledger.store.commits import describe
from gpuledger_sinks.store import rollups
from gpuledger_sinks.store.maintainer import (
    MERGE,
    VACUUM,
    Maintainer,
    MaintenanceDone,
    MaintenanceSettings,
    MaintenanceStep,
    Retention,
)
from gpuledger_sinks.store.table import UsageTable
from tests.unit.sinks.builders import ManualClock
from tests.unit.sinks.store.test_maintainer import counted
from tests.unit.sinks.store.test_rollups import FIRST_MINUTE, HOUR, Store, row

MINUTES = [0, 1, 61, 1500]
"""Minutes of two days, one of which has two hours."""
KEPT_FOR_EVER = Retention(usage_days=0, usage_hourly_days=0, entries_days=0)


def fill(store: Path, *, copies: int = 1) -> None:
    """Write each minute this often, each time with its own commit."""
    table = UsageTable(store_uri=str(store))
    for number in range(copies * len(MINUTES)):
        write(table, number, MINUTES[number % len(MINUTES)])


def write(table: UsageTable, number: int, minute: int) -> None:
    table.load(["s"])
    commit_info = describe(hours={HOUR + minute // 60})
    table.append([row(minute, 1, offset=number)], {"s": number}, time_ms=1, commit_info=commit_info)


def maintainer(
    store: Path, *, hours_ahead: int = 0, retention: Retention = KEPT_FOR_EVER
) -> Maintainer:
    settings = MaintenanceSettings(uri=str(store), retention=retention)
    now_ns = FIRST_MINUTE * NS_PER_MINUTE + 3 * NS_PER_DAY + hours_ahead * NS_PER_HOUR
    return Maintainer(settings, clock=ManualClock(now_ns))


def sums(store: Path) -> dict[str, dict[int, int]]:
    """Return the busy time by the hours since the first one, of hours and of days."""
    tables = {"usage_hourly": "hour", "usage_daily": "day"}
    return {
        table: {hour: busy for hour, (busy, _, _) in Store(store).sums(table, column).items()}
        for table, column in tables.items()
    }


def expected(copies: int) -> dict[str, dict[int, int]]:
    hours: dict[int, int] = {}
    days: dict[int, int] = {}
    for minute in MINUTES:
        hours[minute // 60] = hours.get(minute // 60, 0) + copies
        days[minute // 1440 * 24] = days.get(minute // 1440 * 24, 0) + copies
    return {"usage_hourly": hours, "usage_daily": days}


def count_minutes(store: Path) -> int:
    actions = DeltaTable(str(store / "usage")).get_add_actions(flatten=True)
    return sum(actions["num_records"].to_pylist())


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store to copy, in which each step has work."""
    store = tmp_path_factory.mktemp("filled")
    fill(store, copies=9)
    return store


@pytest.fixture
def store(filled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(filled, tmp_path / "store"))


STEPS = 4
"""Sum up hours and days; merge and vacuum the minutes."""


@pytest.mark.parametrize("at", range(1, STEPS + 1))
def test_another_maintainer_with_a_fast_clock_may_run_between_any_two_steps(
    store: Path, at: int
) -> None:
    done: list[MaintenanceDone] = []

    def overtaken(number: int, total: int, step: MaintenanceStep) -> None:
        assert total == STEPS, step
        if number == at:
            done.append(maintainer(store, hours_ahead=1).run())

    maintainer(store).run(overtaken)
    assert len(done) == 1
    assert sums(store) == expected(9)
    assert count_minutes(store) == 9 * len(MINUTES)


@pytest.mark.parametrize(
    ("usage_days", "at"),
    [
        # Hours of two days, then days of both, each with a commit; late hours have one before.
        *((None, at) for at in (1, 2, 3, 4)),
        *((0, at) for at in (1, 2, 3, 4)),
        *((1, at) for at in (1, 2, 3, 4)),
    ],
)
def test_the_later_commit_of_two_concurrent_rollups_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, usage_days: int | None, at: int
) -> None:
    """The other one runs right before a commit of the first, which has read its sources."""
    fill(tmp_path)
    copies = 1
    if usage_days is not None:
        kept = Retention(usage_days=usage_days, usage_hourly_days=0, entries_days=0)
        maintainer(tmp_path, retention=kept).run()
        usage = UsageTable(store_uri=str(tmp_path))
        for number, minute in enumerate(MINUTES):
            write(usage, 1000 + number, minute)
        copies = 2
    commits = 0

    def overtaken(*args: Any, **options: Any) -> None:  # noqa: ANN401  # handed on
        nonlocal commits
        commits += 1
        if commits == at:
            maintainer(tmp_path, hours_ahead=1).run()
        write_deltalake(*args, **options)

    # Only between reading and committing can another one interfere.
    monkeypatch.setattr(rollups, "write_deltalake", overtaken)
    done = maintainer(tmp_path).run()
    assert done.lost_to_another is not None
    monkeypatch.undo()
    maintainer(tmp_path, hours_ahead=2).run()
    assert sums(tmp_path) == expected(copies)


def test_two_maintainers_with_different_clocks_and_a_writer_lose_and_double_nothing(
    tmp_path: Path,
) -> None:
    copies = 8
    fill(tmp_path)
    is_over = threading.Event()
    failed: list[BaseException] = []

    def maintain(hours_ahead: int) -> None:
        try:
            while not is_over.is_set():
                maintainer(tmp_path, hours_ahead=hours_ahead).run()
        except BaseException as error:  # noqa: BLE001  # shown by the test's own thread
            failed.append(error)

    threads = [threading.Thread(target=maintain, args=(hours,)) for hours in (0, 1)]
    for thread in threads:
        thread.start()
    try:
        usage = UsageTable(store_uri=str(tmp_path))
        for number in range(len(MINUTES), copies * len(MINUTES)):
            write(usage, number, MINUTES[number % len(MINUTES)])
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert failed == []
    maintainer(tmp_path, hours_ahead=2).run()
    assert sums(tmp_path) == expected(copies)
    assert count_minutes(tmp_path) == copies * len(MINUTES)


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.unit.sinks.store.test_two_maintainers import maintainer
def report(number, total, step):
    if number == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
maintainer(Path(sys.argv[1])).run(report)
"""


@pytest.mark.parametrize("before", [1, 2, 3, 4])
def test_the_next_maintainer_continues_after_one_that_was_killed_between_its_steps(
    store: Path, before: int
) -> None:
    command = [sys.executable, "-c", KILLED, str(store), str(before)]
    root = Path(__file__).parents[4]
    assert subprocess.run(command, cwd=root, check=False).returncode == -signal.SIGKILL
    done = maintainer(store, hours_ahead=1).run()
    assert done.lost_to_another is None
    assert sums(store) == expected(9)
    assert count_minutes(store) == 9 * len(MINUTES)
    assert len(DeltaTable(str(store / "usage")).file_uris()) == 2


def test_a_vacuum_does_not_disturb_a_reader_of_an_older_version_or_an_uncommitted_writer(
    store: Path,
) -> None:
    reader = DeltaTable(str(store / "usage"))
    about_to_be_committed = next((store / "usage").glob("event_date=*")) / "part-new.parquet"
    about_to_be_committed.write_bytes(b"of a writer that has not committed yet")
    done = maintainer(store).run()
    assert sum(counted(done, MERGE)) > 0
    assert sum(counted(done, VACUUM)) == 0
    assert about_to_be_committed.exists()
    assert all(Path(file).exists() for file in reader.file_uris())
