"""Buckets and bitmaps of hours equal a plain count of their minutes; days sum their hours."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuledger.clock import NS_PER_MINUTE
from gpuledger.store.commits import describe
from gpuledger.store.distributions import ALLOCATED, BITMAPS, DISTRIBUTIONS, MEMORY_MAX, USED
from gpuledger.store.usage_schema import USAGE, USAGE_DAILY, USAGE_HOURLY
from gpuledger.store.views import create_views
from gpuledger_sinks.store import rollups
from gpuledger_sinks.store.rollups import DAILY, HOURLY, Rollup
from gpuledger_sinks.store.table import UsageTable
from tests.examples import examples

DAY = 20_000
COLUMNS = (*(column for each in DISTRIBUTIONS for column in each.columns), MEMORY_MAX, *BITMAPS)
COUNTS = COLUMNS[: -len(BITMAPS)]
AMOUNTS = (
    *("busy_ns", "dram_active_ns", "memory_byte_ns"),
    *("allocated_ns", "unresponsive_ns"),
)
GIB = 2**30


class Part(NamedTuple):
    """A row of `usage`: a part of a minute, counted from the first day."""

    minute: int
    device: str
    category: str
    amounts: Mapping[str, int | None]


def usage_row(part: Part, offset: int) -> tuple[Any, ...]:
    minute = part.minute + DAY * 1440
    values: dict[str, Any] = {
        "event_date": minute // 1440,
        "cluster": "default",
        "node": "node-a",
        "minute": minute * 60_000_000,
        "gpu_uuid": part.device,
        "gpu_index": 0,
        "category": part.category,
        "sample_count": 1,
        "kafka_partition": 0,
        "first_offset": offset,
        "last_offset": offset,
        "ingested_time_ns": 1,
        **part.amounts,
    }
    return tuple(values.get(column.name) for column in USAGE.columns)


class Store:
    """A store whose minutes the test writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._commits = 0
        self.hourly = Rollup(HOURLY, store_uri=str(path))
        self.daily = Rollup(DAILY, store_uri=str(path))

    def add(self, parts: Iterable[Part]) -> None:
        self._commits += 1
        usage = UsageTable(store_uri=str(self.path))
        usage.load(["stream"])
        parts = list(parts)
        usage.append(
            [usage_row(part, self._commits) for part in parts],
            {"stream": self._commits},
            time_ms=1,
            commit_info=describe(hours={DAY * 24 + part.minute // 60 for part in parts}),
        )

    def sum_up(self) -> None:
        self.hourly.run(time_ms=1)
        self.daily.run(time_ms=1)

    def rows(self, unit: str, columns: Sequence[str]) -> dict[Any, dict[str, int | None]]:
        """Return the columns by period, device and category; several rows of a key add up."""
        table = {"hour": "usage_hourly", "day": "usage_daily"}[unit]
        merged = ", ".join(f"{rollups._AGGREGATES[name]}({name})" for name in columns)  # noqa: SLF001  # the table's own rule
        seconds = {"hour": 3600, "day": 86_400}[unit]
        with duckdb.connect() as connection:
            create_views(connection, str(self.path))
            found = connection.execute(
                f"SELECT epoch({unit})::BIGINT // {seconds}, gpu_uuid, category, {merged}"  # noqa: S608  # our own names
                f" FROM {table} GROUP BY ALL"
            ).fetchall()
        first = DAY * 86_400 // seconds
        return {
            (period - first, device, category): {
                name: None if value is None else int(value)
                for name, value in zip(columns, values, strict=True)
            }
            for period, device, category, *values in found
        }


def counted(parts: Iterable[Part], minutes: int) -> dict[Any, dict[str, int | None]]:
    """Count minutes in plain Python, by period of this many minutes, device and category."""
    sums: dict[Any, dict[str, int | None]] = {}
    for part in parts:
        key = (part.minute, part.device, part.category)
        of_minute = sums.setdefault(key, dict.fromkeys(AMOUNTS))
        for name, amount in part.amounts.items():
            if amount is not None:
                of_minute[name] = (of_minute[name] or 0) + amount
    found: dict[Any, dict[str, int | None]] = defaultdict(lambda: dict.fromkeys(COLUMNS))
    for (minute, device, category), amounts in sums.items():
        count_minute(found[minute // minutes, device, category], minute, category, amounts)
    return dict(found)


def count_minute(
    columns: dict[str, int | None], minute: int, category: str, amounts: Mapping[str, int | None]
) -> None:
    used, allocated = used_of(category, amounts), amounts["allocated_ns"]
    byte_ns, bit = amounts["memory_byte_ns"], 1 << minute % 60
    memory = None if byte_ns is None else round(byte_ns / NS_PER_MINUTE)
    values = (used, amounts["dram_active_ns"], memory)
    for each, value in zip(DISTRIBUTIONS, values, strict=True):
        if value is not None:
            place = bisect_left([bound * each.unit for bound in each.bounds], value)
            hit = each.columns[min(place, len(each.columns) - 1)]
            for column in each.columns:
                columns[column] = (columns[column] or 0) + (column == hit)
    if memory is not None:
        former = columns[MEMORY_MAX]
        columns[MEMORY_MAX] = memory if former is None else max(memory, former)
    if allocated is not None:
        is_known = allocated > 0 and used is not None
        columns[ALLOCATED] = (columns[ALLOCATED] or 0) | bit * is_known
    if used is not None:
        columns[USED] = (columns[USED] or 0) | bit * (used > 0)


def used_of(category: str, amounts: Mapping[str, int | None]) -> int | None:
    busy, allocated = amounts["busy_ns"], amounts["allocated_ns"]
    if category != "idle" or busy is None:
        return busy
    return None if allocated is None else allocated - (amounts["unresponsive_ns"] or 0) - busy


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


_TIMES = st.none() | st.sampled_from([0, 1, 3 * 10**9, 30 * 10**9, 60 * 10**9, 61 * 10**9])
_BYTES = st.sampled_from([0, 1, GIB, GIB + 1, 80 * GIB, 192 * GIB, 193 * GIB]) | st.integers(
    -GIB, 300 * GIB
)
_PARTS = st.builds(
    Part,
    minute=st.integers(0, 2) | st.integers(55, 65) | st.integers(1435, 1445),
    device=st.sampled_from(["GPU-a", "GPU-b", "GPU-1"]),
    category=st.sampled_from(["pod", "idle"]),
    amounts=st.fixed_dictionaries(
        {
            "busy_ns": _TIMES,
            "dram_active_ns": _TIMES,
            "memory_byte_ns": st.none() | _BYTES.map(lambda size: size * NS_PER_MINUTE),
            "allocated_ns": _TIMES,
            "unresponsive_ns": _TIMES,
        }
    ),
)


@settings(examples(40), suppress_health_check=list(HealthCheck))
@given(
    commits=st.lists(st.lists(_PARTS, min_size=1, max_size=12), min_size=1, max_size=2),
    slice_rows=st.sampled_from([2, 1_000_000]),
)
def test_hours_and_days_count_their_minutes(
    commits: Sequence[Sequence[Part]], slice_rows: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    store = Store(tmp_path_factory.mktemp("store"))
    for parts in commits:
        store.add(parts)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rollups, "_SLICE_ROWS", slice_rows)
            store.sum_up()
    parts = [part for commit in commits for part in commit]
    assert store.rows("hour", COLUMNS) == counted(parts, 60)
    of_days = {
        key: {name: columns[name] for name in COUNTS}
        for key, columns in counted(parts, 1440).items()
    }
    assert store.rows("day", COUNTS) == of_days


def busy(minute: int, busy_ns: int) -> Part:
    return Part(minute, "GPU-a", "pod", {"busy_ns": busy_ns})


def test_late_rows_of_purged_hours_add_a_minute_and_keep_its_bit(store: Store) -> None:
    """The minute's former rows are gone, so its late part counts as another minute."""
    store.add([busy(0, 30 * 10**9)])
    store.sum_up()
    store.hourly.purge(DAY + 1, time_ms=1)
    store.add([busy(0, 3 * 10**9), busy(1, 3 * 10**9)])
    store.sum_up()
    columns = ("busy_minutes_5", "busy_minutes_50", "used_minutes")
    of_hour = {"busy_minutes_5": 2, "busy_minutes_50": 1, "used_minutes": 0b11}
    assert store.rows("hour", columns) == {(0, "GPU-a", "pod"): of_hour}
    of_day = {"busy_minutes_5": 2, "busy_minutes_50": 1}
    assert store.rows("day", columns[:2]) == {(0, "GPU-a", "pod"): of_day}


def test_invented_amounts_are_in_no_bucket(store: Store) -> None:
    store.add([busy(0, 2**63 - 1)])
    store.sum_up()
    assert store.rows("hour", COLUMNS) == {(0, "GPU-a", "pod"): dict.fromkeys(COLUMNS)}


def test_older_tables_gain_the_columns_and_older_hours_keep_nulls(store: Store) -> None:
    store.add([busy(0, 1)])
    store.sum_up()
    for schema in (USAGE_HOURLY, USAGE_DAILY):
        path = str(store.path / schema.name)
        older = [name for name in schema.arrow.names if name not in COLUMNS]
        rows = QueryBuilder().register("rows", DeltaTable(path)).execute("SELECT * FROM rows")
        kept = schema.conform(rows.read_all()).select(older)
        write_deltalake(path, kept, mode="overwrite", schema_mode="overwrite")
        assert {field.name for field in DeltaTable(path).schema().fields}.isdisjoint(COLUMNS)
    columns = ("busy_ns", "busy_minutes_0", "busy_minutes_5")
    unknown = {"busy_ns": 1, "busy_minutes_0": None, "busy_minutes_5": None}
    assert store.rows("hour", columns) == {(0, "GPU-a", "pod"): unknown}
    store.add([busy(60, 1)])
    store.sum_up()
    later = {"busy_ns": 1, "busy_minutes_0": 0, "busy_minutes_5": 1}
    assert store.rows("hour", columns) == {
        (0, "GPU-a", "pod"): unknown,
        (1, "GPU-a", "pod"): later,
    }
    assert store.rows("day", columns) == {(0, "GPU-a", "pod"): later | {"busy_ns": 2}}
