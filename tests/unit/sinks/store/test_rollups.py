"""Hours and days equal the sums of their minutes, despite late rows, purges and kills."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import pytest
from arro3.core import Schema
from deltalake import DeltaTable, write_deltalake
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typing_extensions import override

from gpuledger.store.commits import describe, valid_through_us
from gpuledger.store.usage_schema import USAGE, USAGE_DAILY, USAGE_HOURLY
from gpuledger.store.views import valid_through
from gpuledger_sinks.errors import ReceiverUnavailableError
from gpuledger_sinks.store import rollups
from gpuledger_sinks.store.rollups import DAILY, HOURLY, Rollup
from gpuledger_sinks.store.table import StaleTableError, UsageTable
from tests.examples import examples

DAY = 20_000
FIRST_MINUTE = DAY * 1440
HOUR = DAY * 24


def row(minute: int, busy_ns: int, *, offset: int, node: str = "node-a") -> tuple[Any, ...]:
    """Return a row of a minute, counted from the start of the first day."""
    minute += FIRST_MINUTE
    values: dict[str, Any] = {
        "event_date": minute // 1440,
        "cluster": "default",
        "node": node,
        "minute": minute * 60_000_000,
        "gpu_uuid": "GPU-a",
        "gpu_index": 0,
        "category": "pod",
        "busy_ns": busy_ns,
        "memory_byte_ns": 10**25 + busy_ns,
        "sample_count": 1,
        "kafka_partition": 0,
        "first_offset": offset,
        "last_offset": offset,
        "ingested_time_ns": 1,
    }
    return tuple(values.get(column.name) for column in USAGE.columns)


class Store:
    """A store whose minutes the test writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._usage = UsageTable(store_uri=str(path))
        self._commits = 0
        self.hourly = Rollup(HOURLY, store_uri=str(path))
        self.daily = Rollup(DAILY, store_uri=str(path))

    def add(
        self,
        *minutes: tuple[int, int],
        reports: bool = True,
        partition: str = "0",
        until_us: int | None = None,
    ) -> None:
        """Commit a row for each minute and amount."""
        self._commits += 1
        self._usage.load(["stream"])
        hours = {HOUR + minute // 60 for minute, _ in minutes}
        marks = {partition: self._commits if until_us is None else until_us}
        self._usage.append(
            [row(minute, busy_ns, offset=self._commits) for minute, busy_ns in minutes],
            {"stream": self._commits},
            time_ms=1,
            commit_info=describe(hours=hours, valid_through=marks) if reports else {},
        )

    def lose_newest(self, count: int = 1) -> None:
        """Move the newest commits of the minutes away, as docs/guides/store.md documents."""
        for commit in sorted((self.path / "usage" / "_delta_log").glob("*.json"))[-count:]:
            commit.rename(self.path / f"aside-{commit.name}")
        self._commits -= count

    def sum_up(self) -> tuple[int, int]:
        return self.hourly.run(time_ms=1), self.daily.run(time_ms=1)

    def sums(self, table: str, column: str) -> dict[int, tuple[int, int, int]]:
        """Return busy time, byte-time minus its bulk, and ticks, by hours since the first one."""
        if not (files := DeltaTable(str(self.path / table)).file_uris()):
            return {}
        with duckdb.connect() as connection:
            found = connection.execute(
                f"SELECT epoch({column})::BIGINT // 3600, sum(busy_ns)::HUGEINT,"  # noqa: S608  # our own files
                " sum(memory_byte_ns)::VARCHAR, sum(sample_count)::BIGINT"
                f" FROM read_parquet({files}) GROUP BY 1"
            ).fetchall()
        return {
            hour - HOUR: (int(busy), int(memory) - ticks * 10**25, ticks)
            for hour, busy, memory, ticks in found
        }

    def hours(self) -> dict[int, int]:
        return {hour: busy for hour, (busy, _, _) in self.sums("usage_hourly", "hour").items()}

    def days(self) -> dict[int, int]:
        return {hour // 24: busy for hour, (busy, _, _) in self.sums("usage_daily", "day").items()}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def test_hours_and_days_are_the_sums_of_their_minutes_including_late_ones(store: Store) -> None:
    store.add((1, 1), (2, 2), (61, 4))
    assert store.sum_up() == (2, 1)
    assert (store.hours(), store.days()) == ({0: 3, 1: 4}, {0: 7})
    assert store.sum_up() == (0, 0)
    store.add((1, 8), (24 * 60, 16))
    assert store.sum_up() == (2, 2)
    assert (store.hours(), store.days()) == ({0: 11, 1: 4, 24: 16}, {0: 15, 1: 16})


def test_a_commit_without_its_hours_causes_all_hours_to_be_recomputed(store: Store) -> None:
    store.add((1, 1), (61, 4))
    store.sum_up()
    store.add((2, 2), reports=False)
    assert store.sum_up()[0] == 2
    assert store.hours() == {0: 3, 1: 4}


def test_a_commit_whose_file_is_empty_changes_no_sum(store: Store) -> None:
    """Like the newest commit after a power failure; the sink writes its rows again."""
    store.add((1, 1), (24 * 60, 2))
    for offset in range(2):
        store.add((61, 4))
        max((store.path / "usage" / "_delta_log").glob("*.json")).write_bytes(b"")
        store.sum_up()
        assert store.hours() == {0: 1, 24: 2} | ({1: 4} if offset else {})
        store.add((61, 4))
        store.sum_up()
        assert store.hours() == {0: 1, 1: 4 * (offset + 1), 24: 2}


def test_purged_minutes_are_not_recomputed_and_late_ones_are_added_once(
    store: Store,
) -> None:
    store.add((1, 1), (24 * 60, 2))
    store.sum_up()
    assert store.hourly.purge(DAY + 1, time_ms=1) == 1
    store.sum_up()
    assert store.hours() == {0: 1, 24: 2}
    for amount in (4, 8):
        store.add((2, amount), (24 * 60 + 1, amount))
        store.sum_up()
        store.sum_up()
    assert store.hours() == {0: 13, 24: 14}
    store.hourly.purge(DAY + 1, time_ms=1)
    store.sum_up()
    assert (store.hours(), store.days()) == ({0: 13, 24: 14}, {0: 13, 1: 14})


def test_rows_that_are_not_yet_summed_up_are_not_purged(store: Store) -> None:
    store.add((1, 1))
    store.sum_up()
    store.add((2, 2))
    assert store.hourly.purge(DAY + 1, time_ms=1) == 0
    store.sum_up()
    assert store.hourly.purge(DAY + 1, time_ms=1) > 0
    assert store.hours() == {0: 3}


def test_a_compaction_changes_no_sum_and_rewrites_no_hour(store: Store) -> None:
    for minute in range(5):
        store.add((minute, 1))
    store.sum_up()
    DeltaTable(str(store.path / "usage")).optimize.compact()
    assert store.sum_up()[0] == 0
    assert store.hours() == {0: 5}


def test_sums_contain_the_time_through_which_they_are_complete(store: Store) -> None:
    store.add((1, 1))
    store.add((2, 1))
    store.sum_up()
    for table in ("usage_hourly", "usage_daily"):
        history = DeltaTable(str(store.path / table)).history()
        assert valid_through_us(history) == {"0": 2, "all": 2}


def valid_until(store: Store, table: str) -> int:
    found = valid_through(str(store.path), table)
    assert found is not None
    return round(found.timestamp() * 1e6)


def test_sums_are_complete_through_the_slowest_partition_however_long_it_lags(
    store: Store,
) -> None:
    store.add((1, 1), partition="0", until_us=1_000_000)
    store.add((1, 1), partition="1", until_us=2_000_000)
    store.sum_up()
    for number in range(110):
        store.add((2, 1), partition="1", until_us=(3 + number) * 1_000_000)
    store.sum_up()
    store.sum_up()
    assert valid_until(store, "usage_hourly") == valid_until(store, "usage_daily") == 1_000_000
    store.add((3, 1), partition="0", until_us=5_000_000)
    store.sum_up()
    assert valid_until(store, "usage_hourly") == valid_until(store, "usage_daily") == 5_000_000


def test_rows_not_summed_up_by_a_killed_run_are_not_reported_as_complete(
    store: Store,
) -> None:
    store.add((1, 1))
    store.sum_up()
    store.add((2, 2), (24 * 60, 4))
    with pytest.raises(KilledError):
        Dying(HOURLY, store_uri=str(store.path), commits=1).run(time_ms=1)
    assert valid_until(store, "usage_hourly") == 1


def test_rows_committed_after_the_snapshot_are_not_reported_as_summed_up(store: Store) -> None:
    class Overtaken(Rollup):
        @override
        def _news_of(self, source: DeltaTable, target: DeltaTable | None) -> Any:
            store.add((61, 4))
            return super()._news_of(source, target)

    store.add((1, 1))
    store.sum_up()
    store.add((2, 2))
    Overtaken(HOURLY, store_uri=str(store.path)).run(time_ms=1)
    assert (store.hours(), valid_until(store, "usage_hourly")) == ({0: 3}, 2)
    store.sum_up()
    assert store.hours() == {0: 3, 1: 4}


@pytest.mark.parametrize("lost", [1, 2])
@pytest.mark.parametrize("is_run_meanwhile", [False, True])
def test_hours_follow_a_table_whose_newest_commits_were_moved_away(
    store: Store, lost: int, *, is_run_meanwhile: bool
) -> None:
    for step in ((1, 1), (2, 2), (61, 4)):
        store.add(step)
    store.sum_up()
    store.lose_newest(lost)
    if is_run_meanwhile:
        store.sum_up()
    # The same events, and later ones that Kafka has by then.
    if lost > 1:
        store.add((2, 2))
    store.add((61, 4), (62, 8))
    assert store.hourly.purge(DAY + 1, time_ms=1) == 0
    store.sum_up()
    assert (store.hours(), store.days()) == ({0: 3, 1: 12}, {0: 15})


def test_late_rows_of_purged_hours_that_are_moved_away_and_written_again_count_once(
    store: Store,
) -> None:
    store.add((1, 1))
    store.sum_up()
    store.hourly.purge(DAY + 1, time_ms=1)
    store.add((2, 2))
    store.sum_up()
    assert store.hours() == {0: 3}
    store.lose_newest()
    for step in ((2, 2), (3, 4)):
        store.add(step)
    store.sum_up()
    assert (store.hours(), store.days()) == ({0: 7}, {0: 7})


def test_rows_of_other_days_do_not_delay_a_purge(store: Store) -> None:
    store.add((1, 1), (24 * 60, 2))
    store.sum_up()
    store.add((48 * 60, 4))
    assert store.hourly.purge(DAY + 1, time_ms=1) > 0
    store.sum_up()
    assert store.hours() == {0: 1, 24: 2, 48: 4}


@pytest.mark.parametrize("table", ["usage", "usage_hourly", "usage_daily"])
def test_a_table_that_lacks_a_newer_column_is_summed_up(store: Store, table: str) -> None:
    schema = {each.name: each for each in (USAGE, USAGE_HOURLY, USAGE_DAILY)}[table]
    fields = [schema.arrow.field(name) for name in schema.arrow.names if name != "unresponsive_ns"]
    DeltaTable.create(
        str(store.path / table), schema=Schema(fields), partition_by=["event_date"], name=table
    )
    if table == "usage":
        names = [field.name for field in fields]
        values = dict(zip(USAGE.arrow.names, row(1, 1, offset=1), strict=True))
        whole = USAGE.table_of([tuple(values.values())])
        write_deltalake(str(store.path / table), whole.select(names), mode="append")
    else:
        store.add((1, 1))
    assert store.sum_up() == (1, 1)
    assert (store.hours(), store.days()) == ({0: 1}, {0: 1})


def test_absurd_amounts_are_summed_beyond_64_bits(store: Store) -> None:
    store.add((1, 2**63 - 1), (2, 2**63 - 1), (2, -(2**63 - 1)), (3, 2**63 - 1), (4, 5))
    store.add((4, 2**63 - 1))
    store.sum_up()
    expected = 3 * (2**63 - 1) + 5
    assert (store.hours(), store.days()) == ({0: expected}, {0: expected})


class KilledError(Exception):
    """Stands for a kill -9."""


class Dying(Rollup):
    """A rollup that is killed after a number of commits."""

    def __init__(self, *args: Any, commits: int, **options: Any) -> None:  # noqa: ANN401  # as Rollup
        super().__init__(*args, **options)
        self._left = commits

    def _died(self) -> None:
        self._left -= 1
        if self._left == 0:
            raise KilledError

    @override
    def _replace(self, *args: Any, **options: Any) -> None:  # as Rollup
        super()._replace(*args, **options)
        self._died()

    @override
    def _add_late(self, *args: Any, **options: Any) -> None:  # as Rollup
        super()._add_late(*args, **options)
        self._died()


@pytest.mark.parametrize("commits", [1, 2, 3])
@pytest.mark.parametrize("more_ns", [0, 64], ids=["immediately", "with more rows in between"])
def test_a_run_that_is_killed_after_any_commit_adds_nothing_twice(
    store: Store, commits: int, more_ns: int
) -> None:
    store.add((1, 1), (24 * 60, 2), (48 * 60, 4))
    store.sum_up()
    store.hourly.purge(DAY + 1, time_ms=1)
    store.add((2, 8), (24 * 60 + 1, 16), (48 * 60 + 1, 32))
    dying = Dying(HOURLY, store_uri=str(store.path), commits=commits)
    with pytest.raises(KilledError):
        dying.run(time_ms=1)
    expected = {0: 9, 24: 18, 48: 36}
    if more_ns:
        store.add((3, more_ns))
        expected[0] += more_ns
    store.sum_up()
    assert store.hours() == expected


@pytest.mark.parametrize("more", [(), ((2, 4), (62, 8))], ids=["the first time", "again"])
def test_the_later_of_two_concurrent_rollups_is_rejected_and_each_hour_is_stored_once(
    store: Store, more: Sequence[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one runs right before a commit of the first, which has read its sources."""
    store.add((1, 1), (61, 2))
    expected = {0: 1, 1: 2}
    if more:
        store.sum_up()
        store.add(*more)
        expected = {0: 5, 1: 10}
    other = Rollup(HOURLY, store_uri=str(store.path))

    def overtaken(*args: Any, **options: Any) -> None:  # noqa: ANN401  # handed on
        monkeypatch.undo()
        assert other.run(time_ms=1) == 2
        write_deltalake(*args, **options)

    monkeypatch.setattr(rollups, "write_deltalake", overtaken)
    with pytest.raises(StaleTableError):
        store.hourly.run(time_ms=1)
    assert store.hours() == expected
    assert store.hourly.run(time_ms=1) == 0
    assert store.hours() == expected


def test_a_store_that_cannot_be_read_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "usage").write_text("a file where the folder should be")
    with pytest.raises(ReceiverUnavailableError):
        Rollup(HOURLY, store_uri=str(tmp_path)).run(time_ms=1)


_MINUTES = st.lists(
    st.tuples(st.integers(0, 3 * 1440 - 1), st.integers(-(2**40), 2**40)), min_size=1, max_size=4
)
_STEPS = st.lists(
    _MINUTES.map(lambda minutes: ("add", minutes)) | st.sampled_from([("sum", ()), ("purge", ())]),
    min_size=1,
    max_size=8,
)


@settings(examples(20), suppress_health_check=list(HealthCheck))
@given(steps=_STEPS)
def test_hours_are_the_sums_of_all_rows_in_any_order_of_writes_rollups_and_purges(
    steps: Sequence[tuple[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    store, expected = Store(tmp_path_factory.mktemp("store")), dict[int, int]()
    store.add((0, 0))
    for step, minutes in [*steps, ("sum", ())]:
        if step == "add":
            store.add(*minutes)
            for minute, amount in minutes:
                expected[minute // 60] = expected.get(minute // 60, 0) + amount
        elif step == "sum":
            store.sum_up()
        else:
            store.hourly.purge(DAY + 1, time_ms=1)
    assert store.hours() == {0: 0} | expected


@pytest.mark.parametrize("gone", [(), ("usage",)])
@pytest.mark.parametrize("earlier", [0, 20])
def test_a_maintainer_that_lags_behind_the_vacuum_adds_late_rows_once(
    tmp_path: Path, gone: Sequence[str], earlier: int
) -> None:
    """The files of the version that it last summed up no longer exist."""
    store = Store(tmp_path)
    store.add((0, 5), (61, 7))
    store.sum_up()
    store.hourly.purge(DAY + 1, time_ms=1)
    expected = {0: 5, 1: 7}
    if earlier:
        store.add((0, earlier))
        store.sum_up()
        expected[0] += earlier
    store.add((1, 3))
    expected[0] += 3
    for table in gone:
        DeltaTable(str(tmp_path / table)).vacuum(
            retention_hours=0, dry_run=False, enforce_retention_duration=False, full=True
        )
    for _ in range(2):
        store.sum_up()
        found = store.sums("usage_hourly", "hour")
        assert {hour: busy for hour, (busy, _, _) in found.items()} == expected
