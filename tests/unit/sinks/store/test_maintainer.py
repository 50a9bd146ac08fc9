"""A maintainer merges files without changing rows, and removes old rows that are summed up."""

from pathlib import Path

from deltalake import DeltaTable

from gpuledger.clock import NS_PER_DAY, NS_PER_MINUTE
from gpuledger.store.commits import describe
from gpuledger_sinks.store.compaction import is_compaction_safe
from gpuledger_sinks.store.maintainer import (
    MERGE,
    REMOVE_OLD_ROWS,
    SUM_UP,
    Maintainer,
    MaintenanceDone,
    MaintenanceSettings,
    Retention,
)
from gpuledger_sinks.store.table import UsageTable
from tests.unit.sinks.builders import ManualClock
from tests.unit.sinks.store.test_rollups import DAY, FIRST_MINUTE, HOUR, row


def fill(store: Path, *, commits: int) -> None:
    table = UsageTable(store_uri=str(store))
    table.load([])
    for number in range(commits):
        rows = [row(number, 1, offset=number)]
        table.append(rows, {"s": number}, time_ms=1, commit_info=describe(hours={HOUR}))


def settings(store: Path, **retention: int) -> MaintenanceSettings:
    days = {"usage_days": 0, "usage_hourly_days": 0, "entries_days": 0} | retention
    return MaintenanceSettings(uri=str(store), retention=Retention(**days))


def clock(minute: int = 0) -> ManualClock:
    return ManualClock((FIRST_MINUTE + minute) * NS_PER_MINUTE)


def count_rows(store: Path, table: str) -> int:
    actions = DeltaTable(str(store / table)).get_add_actions(flatten=True)
    return sum(actions["num_records"].to_pylist())


def counted(done: MaintenanceDone, action: str) -> list[int]:
    """Return the counts of an action's steps, by table."""
    return [step.count for step in done.steps if step.action == action]


def test_small_files_are_merged_with_the_same_rows_and_not_touched_again(tmp_path: Path) -> None:
    fill(tmp_path, commits=10)
    maintainer = Maintainer(settings(tmp_path), clock=clock())
    assert sum(counted(maintainer.run(), MERGE)) == 10
    assert len(DeltaTable(str(tmp_path / "usage")).file_uris()) == 1
    assert count_rows(tmp_path, "usage") == 10
    assert sum(counted(maintainer.run(), MERGE)) == 0


def test_rows_older_than_their_retention_are_removed_once_they_are_summed_up(
    tmp_path: Path,
) -> None:
    fill(tmp_path, commits=2)
    now = ManualClock((DAY + 8) * NS_PER_DAY)
    done = Maintainer(settings(tmp_path, usage_days=7), clock=now).run()
    assert (counted(done, SUM_UP), counted(done, REMOVE_OLD_ROWS)) == ([1, 1], [2])
    assert count_rows(tmp_path, "usage") == 0
    assert count_rows(tmp_path, "usage_hourly") == 1
    kept = Maintainer(settings(tmp_path, usage_hourly_days=9), clock=now).run()
    assert counted(kept, REMOVE_OLD_ROWS) == [0]
    assert count_rows(tmp_path, "usage_hourly") == 1


def test_a_store_without_a_table_is_maintained_too(tmp_path: Path) -> None:
    done = Maintainer(settings(tmp_path), clock=clock()).run()
    assert sum(step.count for step in done.steps) == 0


def test_this_deltalake_rejects_the_second_of_two_compactions_of_the_same_files() -> None:
    """`pyproject.toml` excludes versions that accept it; with one of them nothing is merged."""
    assert is_compaction_safe()


def test_the_compaction_check_uses_the_next_directory_if_the_first_is_not_writable(
    tmp_path: Path,
) -> None:
    gone = str(tmp_path / "gone")
    assert is_compaction_safe([gone, str(tmp_path)])
    assert not is_compaction_safe([gone])
    assert not list(tmp_path.iterdir())
