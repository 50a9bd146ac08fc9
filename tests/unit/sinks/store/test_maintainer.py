"""One at a time maintains a store, merges files and never rows, and dies without a trace."""

from pathlib import Path

import pytest
from deltalake import DeltaTable
from typing_extensions import override

from gpuledger.clock import NS_PER_DAY, NS_PER_MINUTE
from gpuledger.store.commits import describe
from gpuledger_sinks.settings import StoreRetentionSettings, StoreSettings
from gpuledger_sinks.store.compaction import is_compaction_safe
from gpuledger_sinks.store.lease import MaintenanceLease
from gpuledger_sinks.store.maintainer import Maintainer
from gpuledger_sinks.store.table import UsageTable
from tests.unit.sinks.builders import ManualClock
from tests.unit.sinks.store.test_rollups import DAY, FIRST_MINUTE, HOUR, row


def fill(store: Path, *, commits: int) -> None:
    table = UsageTable(store_uri=str(store))
    table.load([])
    for number in range(commits):
        rows = [row(number, 1, offset=number)]
        table.append(rows, {"s": number}, time_ms=1, commit_info=describe(hours={HOUR}))


def settings(store: Path, **retention: int) -> StoreSettings:
    days = {"usage_days": 0, "usage_hourly_days": 0, "entries_days": 0} | retention
    return StoreSettings(uri=str(store), retention=StoreRetentionSettings(**days))


def clock(minute: int = 0) -> ManualClock:
    return ManualClock((FIRST_MINUTE + minute) * NS_PER_MINUTE)


def count_rows(store: Path, table: str) -> int:
    actions = DeltaTable(str(store / table)).get_add_actions(flatten=True)
    return sum(actions["num_records"].to_pylist())


def test_small_files_become_one_with_the_same_rows_and_are_left_alone_then(tmp_path: Path) -> None:
    fill(tmp_path, commits=10)
    maintainer = Maintainer(settings(tmp_path), clock=clock())
    assert maintainer.run().compacted_files == 10
    assert len(DeltaTable(str(tmp_path / "usage")).file_uris()) == 1
    assert count_rows(tmp_path, "usage") == 10
    assert maintainer.run().compacted_files == 0


def test_what_is_older_than_its_retention_goes_once_it_is_summed_up(tmp_path: Path) -> None:
    fill(tmp_path, commits=2)
    now = ManualClock((DAY + 8) * NS_PER_DAY)
    done = Maintainer(settings(tmp_path, usage_days=7), clock=now).run()
    assert (done.hours, done.days, done.purged_files) == (1, 1, 2)
    assert count_rows(tmp_path, "usage") == 0
    assert count_rows(tmp_path, "usage_hourly") == 1
    kept = Maintainer(settings(tmp_path, usage_hourly_days=9), clock=now).run()
    assert (kept.purged_files, count_rows(tmp_path, "usage_hourly")) == (0, 1)


def test_a_store_without_a_table_is_maintained_too(tmp_path: Path) -> None:
    done = Maintainer(settings(tmp_path), clock=clock()).run()
    assert (done.hours, done.purged_files, done.compacted_files) == (0, 0, 0)


def test_while_one_has_the_lease_another_does_nothing(tmp_path: Path) -> None:
    fill(tmp_path, commits=10)
    at = clock()
    lease = MaintenanceLease(store_uri=str(tmp_path), holder="another", clock=at)
    assert lease.acquire()
    maintainer = Maintainer(settings(tmp_path), clock=at)
    assert maintainer.run().is_held_by_another
    assert len(DeltaTable(str(tmp_path / "usage")).file_uris()) == 10
    lease.release()
    assert maintainer.run().compacted_files == 10


def test_the_lease_of_one_that_died_ends_by_itself_and_its_holder_renews_it(tmp_path: Path) -> None:
    at = clock()
    dead, heir = (MaintenanceLease(store_uri=str(tmp_path), holder=name, clock=at) for name in "ab")
    assert dead.acquire(60.0)
    at.advance(30)
    assert dead.acquire(60.0)
    at.advance(59)
    assert not heir.acquire()
    at.advance(2)
    assert heir.acquire(60.0)
    assert not dead.acquire()


@pytest.mark.parametrize(("hours_ahead", "is_waited_for"), [(23, True), (24 * 365, False)])
def test_nobody_waits_for_a_lease_of_a_clock_that_is_far_ahead(
    tmp_path: Path, hours_ahead: int, *, is_waited_for: bool
) -> None:
    ahead = MaintenanceLease(store_uri=str(tmp_path), holder="ahead", clock=clock(hours_ahead * 60))
    assert ahead.acquire()
    lease = MaintenanceLease(store_uri=str(tmp_path), holder="right", clock=clock())
    assert lease.acquire() != is_waited_for


def test_of_two_that_ask_at_once_one_has_it(tmp_path: Path) -> None:
    """The slower one has looked before the faster one wrote."""

    class Slow(MaintenanceLease):
        @override
        def acquire(self, seconds: float = 60.0) -> bool:
            append = self._table.append

            def overtaken(*args: object, **options: object) -> None:
                assert fast.acquire(60.0)
                append(*args, **options)  # type: ignore[arg-type]  # handed on

            self._table.append = overtaken  # type: ignore[method-assign]  # the fake of this test
            return super().acquire(seconds)

    at = clock()
    fast = MaintenanceLease(store_uri=str(tmp_path), holder="fast", clock=at)
    assert not Slow(store_uri=str(tmp_path), holder="slow", clock=at).acquire()


def test_leases_of_long_ago_are_forgotten(tmp_path: Path) -> None:
    at = clock()
    lease = MaintenanceLease(store_uri=str(tmp_path), holder="a", clock=at)
    for _ in range(15):
        at.advance(60)
        assert lease.acquire(1.0)
        lease.release()
    assert count_rows(tmp_path, "leases") < 15


def test_this_deltalake_refuses_the_second_of_two_compactions_of_the_same_files() -> None:
    """Versions that do not are refused in `pyproject.toml`; whoever runs one merges nothing."""
    assert is_compaction_safe()


def test_where_nothing_can_be_written_to_but_the_next_folder_it_is_tried_there(
    tmp_path: Path,
) -> None:
    gone = str(tmp_path / "gone")
    assert is_compaction_safe([gone, str(tmp_path)])
    assert not is_compaction_safe([gone])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("runs", [1, 3])
def test_who_was_killed_before_may_be_followed_by_anybody(tmp_path: Path, runs: int) -> None:
    fill(tmp_path, commits=9)
    at = clock()
    for _ in range(runs):
        MaintenanceLease(store_uri=str(tmp_path), holder="killed", clock=at).acquire()
        at.advance(3600)
    assert Maintainer(settings(tmp_path), clock=at).run().compacted_files == 9
