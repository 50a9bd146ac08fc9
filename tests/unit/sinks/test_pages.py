"""The documentation of the sinks matches the code: tables, numbers and runnable examples."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pytest
import yaml
from msgspec.structs import replace

from gpuledger.ledger.families import FAMILIES, INCIDENT_FAMILIES
from gpuledger.ledger.health import HEALTH_FAMILIES
from gpuledger.ledger.series import EventSeries
from gpuledger.records import (
    Category,
    ContainerRequest,
    Entry,
    EventContainer,
    NodeDescription,
)
from gpuledger.store.query import DERIVED_COLUMNS, entries_sql, no_entries_sql
from gpuledger.store.schema import ENTRIES
from gpuledger.store.usage_schema import USAGE, USAGE_DAILY, USAGE_HOURLY
from gpuledger.store.views import TABLES, create_views
from gpuledger_agent.exposition.dcgm_fields import default_counters
from gpuledger_sinks.remote_write.active_series import ActiveSeries
from gpuledger_sinks.remote_write.node_intervals import NodeIntervals
from gpuledger_sinks.rows import encoded_rows_of
from gpuledger_sinks.store.table import EntriesTable, GapsTable
from tests.docs_gen import series_page
from tests.docs_gen.tables_page import types_of
from tests.unit.sinks.builders import SECOND_NS, START_NS, books, entry, event, holder, pod, reading
from tests.unit.sinks.remote_write.interval_samples import RECORD
from tests.unit.sinks.store.storing import AT, STREAM, a_row, fill

DOCS = Path(__file__).parents[3] / "docs"
GUIDE = DOCS / "guides" / "store.md"
DCGM_RULES = yaml.safe_load(series_page.DCGM_RULES.read_text())["groups"][0]["rules"]
RECORDED = series_page.recorded_fields()
USED: dict[str, Any] = {"busy_ns": 1, "memory_bytes": 1, "energy_millijoules": 1}
USAGE_SUMS = (USAGE_HOURLY.name, USAGE_DAILY.name)


def table(page: str, name: str) -> list[list[str]]:
    text = (DOCS / page).read_text()
    between = text.partition(f"<!-- {name}:begin -->\n")[2].partition(f"<!-- {name}:end -->")[0]
    return [[cell.strip() for cell in row.strip("|\n").split("|")] for row in between.splitlines()]


def as_markdown(rows: Iterator[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


READ = (
    "memory_utilization_ratio",
    "memory_reserved_bytes",
    "energy_millijoules",
    "energy_total_millijoules",
    "memory_clock_hertz",
)
OF_THE_CHIP = ("sm_active_ratio", "tensor_active_ratio", "dram_active_ratio")


def test_each_default_field_of_dcgm_exporter_without_a_rule_has_a_replacement() -> None:
    missing = [one.field.old for one in default_counters() if one.field.old not in RECORDED]
    assert set(missing) == series_page.INSTEAD.keys()


def test_the_series_that_replace_a_field_of_dcgm_are_sent() -> None:
    families = (*HEALTH_FAMILIES, *INCIDENT_FAMILIES)
    known = {metric.name for family in families for metric in family.metrics} | RECORDED

    instead = " ".join(series_page.INSTEAD.values())
    assert set(re.findall(r"\b(?:gpuledger|DCGM)_\w+", instead)) <= known


def test_the_rules_for_names_of_dcgm_exporter_read_series_that_are_sent() -> None:
    families = (*FAMILIES, *HEALTH_FAMILIES)
    known = {metric.name for family in families for metric in family.metrics}

    read = {
        name.replace("(pod|category)", category)
        for rule in DCGM_RULES
        for name in re.findall(r"\bgpuledger_[\w|()]+\w", rule["expr"])
        for category in ("pod", "category")
    }
    assert read <= known


@pytest.mark.parametrize("interval_seconds", [0, 15])
@pytest.mark.parametrize("read", [READ, (*READ, *OF_THE_CHIP)], ids=["plain", "chip"])
def test_the_page_states_the_number_of_samples_of_a_node_of_8_gpus_with_10_containers(
    read: Sequence[str], interval_seconds: int
) -> None:
    request = {"trainer": ContainerRequest(resources={"nvidia.com/gpu": 1})}
    pods = [pod(uid=f"uid-{number}", requested=request) for number in range(10)]
    of_gpu = [[0, 1], [2, 3], *([number] for number in range(4, 10))]
    gpus = [
        books(
            reading(uuid=f"GPU-{gpu}", **dict.fromkeys(read, 1)),
            *(Entry(category=Category.POD, container=one, **USED) for one in containers),
            Entry(category=Category.HOST, **USED),
            Entry(category=Category.IDLE, allocated_ns=SECOND_NS, **USED),
        )
        for gpu, containers in enumerate(of_gpu)
    ]
    one = replace(
        event(gpus=gpus),
        pods=pods,
        containers=[EventContainer(pod=number, name="trainer") for number in range(10)],
        node_description=NodeDescription(pool="h100"),
    )
    node = NodeIntervals(
        "default/node", values=EventSeries(), interval_ns=interval_seconds * SECOND_NS
    )
    (sent,) = [*node.add(one, RECORD, is_past=False), *node.close()]
    # Its counters started before.
    samples = ActiveSeries().encode(dataclasses.replace(sent, begun={})).samples

    page = (DOCS / "reference" / "series.md").read_text().partition("## Cost")[2]
    assert f"| {samples} |" in page


def test_a_relation_with_rows_has_the_documented_columns_and_types(tmp_path: Path) -> None:
    fill(tmp_path, [event()])

    found = types_of(f"FROM {entries_sql(str(tmp_path))}")
    assert found == types_of(f"FROM {no_entries_sql()}")
    assert found.keys() == {column.name for column in ENTRIES.columns} | DERIVED_COLUMNS.keys()


@pytest.mark.parametrize("name", [name for name in TABLES if name not in USAGE_SUMS])
def test_the_page_lists_each_column_of_each_table_with_its_meaning(name: str) -> None:
    text = (DOCS / "reference" / "tables.md").read_text()
    between = text.partition(f"<!-- {name}: begin -->")[2].partition(f"<!-- {name}: end -->")[0]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in between.splitlines()[4:-1]]

    assert [column for column, *_ in rows] == [f"`{each.name}`" for each in TABLES[name].columns]
    assert all(meaning for *_, meaning in rows)


def test_hours_and_days_have_the_columns_of_minutes() -> None:
    for schema, period in ((USAGE_HOURLY, "hour"), (USAGE_DAILY, "day")):
        names = [column.name for column in schema.columns]
        assert names[: len(USAGE.columns)] == [
            period if column.name == "minute" else column.name for column in USAGE.columns
        ]


def test_the_query_of_the_rows_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        value
        for tick in range(2)
        for value in encoded_rows_of(
            event(tick),
            ingested_time_ns=START_NS,
        )
    ]
    Path("rows.json").write_bytes(b"\n".join(rows))
    (query,) = [
        one
        for one in re.findall(
            r"```sql\n(.*?)```", (DOCS / "reference" / "topics.md").read_text(), re.DOTALL
        )
        if "read_json" in one
    ]

    assert ask(query) == [("default", "research", "train-0", "vision", 1.0)]


def test_the_query_of_energy_by_pod_on_the_store_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    entries = EntriesTable(store_uri="gpuledger-store")
    entries.load([STREAM])
    entries.append(a_row(0), {STREAM: 0}, time_ms=0)

    (shown,) = shown_by(python_of_the_page("sum(joules)"), monkeypatch)

    assert AT.partition in (0, 1)
    assert shown == [("default", "research", "train-0", 0.5, 2**30, 100, 0.5 / 3600)]


def test_the_documented_query_returns_which_bills_are_incomplete_and_the_nodes_concerned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fill(Path("gpuledger-store"), [event(0), event(9)])
    example = python_of_the_page("gaps_sql")
    assert shown_by(example, monkeypatch) == [[]]

    gaps = GapsTable(store_uri="gpuledger-store")
    gaps.load([STREAM])
    day_us, start_us = 86_400 * 1_000_000, START_NS // 1000
    for number, began_us in enumerate((start_us, start_us - 40 * day_us, start_us + 40 * day_us)):
        times = (began_us, began_us + 1_000_000, began_us + day_us)
        row = (*AT, "retention", 1, 9, 8, *times, None)
        gaps.append([row], {STREAM: number}, time_ms=0)

    (shown,) = shown_by(example, monkeypatch)
    assert [(row[0], *row[3:]) for row in shown] == [("retention", 8, ["default/node-a"])]


def test_no_documented_query_adds_the_busy_time_of_idle_to_that_of_users() -> None:
    page = GUIDE.read_text()
    examples = re.findall(r"```(?:sql|python|console)\n(.*?)```", page, re.DOTALL)
    sums = [each for each in examples if re.search(r"sum\((?:busy|gpu_hours)|busy_ns\W*sum", each)]

    assert len(sums) >= 4
    assert [each for each in sums if not re.search(r"\bcategory\b", each)] == []


def python_of_the_page(word: str) -> str:
    pattern = r"```python\n(.*?)```"
    examples: list[str] = re.findall(pattern, GUIDE.read_text(), re.DOTALL)
    (found,) = [example for example in examples if word in example]
    return found


def shown_by(example: str, monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[object, ...]]]:
    """Run an example of the page, and return the rows that each of its queries shows."""
    shown: list[Shown] = []
    monkeypatch.setattr(duckdb, "sql", lambda query: Shown(ask(query), shown))
    exec(compile(example, "store.md", "exec"), {})  # noqa: S102  # our own page
    return [one.rows for one in shown]


def test_the_documented_query_returns_to_which_pods_idle_gpus_were_allocated_and_for_how_long(
    tmp_path: Path,
) -> None:
    allocated = [holder(), holder("chat-0", namespace="serving")]
    idle = [
        entry(Category.IDLE, busy_ns=seconds * SECOND_NS, allocation=holder)
        for seconds, holder in ((1800, 0), (900, 1), (2700, None))
    ]
    fill(
        tmp_path,
        [event(tick, entries=[entry(), *idle], allocated_to=allocated) for tick in range(2)],
    )

    # Hours have the columns of single samples that the query reads.
    hours = "CREATE VIEW usage_hourly AS FROM entries"
    found = ask(sql_of_the_page("idle_gpu_hours"), view_of(tmp_path), hours)

    assert found == [
        ("default", None, None, 1.5),
        ("default", "research", "notebook-0", 1.0),
        ("default", "serving", "chat-0", 0.5),
    ]


def test_each_documented_query_of_hours_runs_on_the_views_of_a_store(tmp_path: Path) -> None:
    fill(tmp_path, [event()])
    queries = re.findall(r"```sql\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    of_hours = [query for query in queries if "FROM usage_hourly" in query]

    assert len(of_hours) == 3
    with duckdb.connect() as connection:
        create_views(connection, str(tmp_path))
        assert [connection.execute(query).fetchall() for query in of_hours] == [[]] * 3


def test_the_documented_query_counts_each_gap_once(tmp_path: Path) -> None:
    fill(tmp_path, [event(0), event(9, gap_ns=8 * SECOND_NS), event(12, gap_ns=2 * SECOND_NS)])

    assert ask(sql_of_the_page("AS gap"), view_of(tmp_path)) == [("default", "node-a", 10.0)]


def sql_of_the_page(word: str) -> str:
    queries: list[str] = re.findall(r"```sql\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (found,) = [query for query in queries if word in query]
    return found


def view_of(store: Path) -> str:
    return f"CREATE VIEW entries AS FROM {entries_sql(str(store))}"


class Shown:
    def __init__(self, rows: list[tuple[object, ...]], shown: list[Shown]) -> None:
        self.rows = rows
        self._shown = shown

    def show(self) -> None:
        self._shown.append(self)


def ask(query: str, *before: str) -> list[tuple[object, ...]]:
    with duckdb.connect() as connection:
        for statement in before:
            connection.execute(statement)
        return connection.execute(query).fetchall()
