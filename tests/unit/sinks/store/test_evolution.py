"""A table of an older version gets the columns added since, and keeps its rows."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from arro3.core import DataType, Field, Schema, Table
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from gpuledger.errors import UserError
from gpuledger.records import Category
from gpuledger.store.schema import ENTRIES, PARTITION_COLUMN, PODS, TableSchema
from gpuledger.store.usage_schema import INVENTORY, NODES, PENDING_PODS, USAGE
from gpuledger_sinks.store.table import EntriesTable, StreamTable
from tests.unit.sinks.builders import (
    SECOND_NS,
    bus,
    entry,
    event,
    eventually,
    holder,
    publish,
    running,
)
from tests.unit.sinks.store.storing import STREAM, a_row, is_committed, query, store

NAMES: Final = tuple(column.name for column in ENTRIES.columns)
TABLES: Final = (ENTRIES, USAGE, PODS, NODES, PENDING_PODS, INVENTORY)
# Columns after this one count as added by later versions: all of them are nullable.
FIRST, ADDED = (NAMES[: (end := NAMES.index("kafka_offset") + 1)], NAMES[end:])


def make_first(uri: Path, *, without: str = "") -> None:
    """Create a table as the first version did, with one row of the stream at offset 0."""
    names = [name for name in FIRST if name != without]
    at = [ENTRIES.arrow.get_field_index(name) for name in names]
    (row,) = a_row(0)
    columns = [ENTRIES.columns[one].array([row[one]]) for one in at]
    schema = Schema([ENTRIES.arrow.field(one) for one in at])
    table = DeltaTable.create(
        str(uri / "entries"), schema=schema, partition_by=[PARTITION_COLUMN], name="entries"
    )
    write_deltalake(
        table,
        Table.from_arrays(columns, schema=schema),
        mode="append",
        commit_properties=CommitProperties(app_transactions=[Transaction(STREAM, 0, 0)]),
    )


def names_of(uri: Path) -> list[str]:
    return [field.name for field in DeltaTable(str(uri / "entries")).schema().fields]


@pytest.mark.parametrize("in_the_middle", ["", "energy_millijoules"])
async def test_an_older_table_gets_the_new_columns_and_no_row_is_repeated(
    in_the_middle: str, tmp_path: Path
) -> None:
    make_first(tmp_path, without=in_the_middle)
    on = bus()
    allocated: dict[str, Any] = {
        "entries": [entry(), entry(Category.IDLE, allocation=0)],
        "allocated_to": [holder()],
    }
    await publish(on, event(0), event(1, **allocated))

    async with running(store(tmp_path, on)):
        await eventually(is_committed(on, 2))

    sql = "select kafka_offset, category, busy_ns, allocated_pod from {entries}"
    assert query(tmp_path, f"{sql} order by 1, 2") == [
        (0, "pod", SECOND_NS // 2, None),
        (1, "idle", SECOND_NS // 2, "notebook-0"),
        (1, "pod", SECOND_NS // 2, None),
    ]


def test_old_and_new_tables_have_the_same_columns_in_the_same_order(tmp_path: Path) -> None:
    make_first(tmp_path / "old")
    for folder in ("old", "new"):
        EntriesTable(store_uri=str(tmp_path / folder)).load([])

    assert names_of(tmp_path / "old") == names_of(tmp_path / "new") == [*FIRST, *ADDED]


def test_added_columns_are_nullable() -> None:
    assert [one.name for one in ENTRIES.columns if one.name in ADDED and not one.nullable] == []


def test_a_sink_that_loses_the_race_to_add_columns_uses_those_of_the_winner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_first(tmp_path)
    winner, loser = (EntriesTable(store_uri=str(tmp_path)) for _ in range(2))
    update = DeltaTable.update_incremental

    def raced(table: DeltaTable) -> None:
        update(table)
        monkeypatch.undo()
        winner.load([])

    monkeypatch.setattr(DeltaTable, "update_incremental", raced)

    assert loser.load([STREAM]) == {STREAM: 0}

    loser.append(a_row(1), {STREAM: 1}, time_ms=0)
    assert query(tmp_path, "select count(*) from {entries}") == [(2,)]


@pytest.mark.parametrize("table", TABLES, ids=lambda schema: schema.name)
def test_an_older_sink_refuses_a_table_with_newer_columns_and_the_newer_one_continues(
    table: TableSchema, tmp_path: Path
) -> None:
    """After a rollback, nothing is written until the sink is upgraded again."""
    added = table.columns[-1]
    newer = StreamTable(table, store_uri=str(tmp_path))
    older = StreamTable(replace(table, columns=table.columns[:-1]), store_uri=str(tmp_path))
    newer.load([])
    created = DeltaTable(newer.uri).version()

    with pytest.raises(UserError, match=rf"differs in column {added.name};"):
        older.load([])

    assert DeltaTable(newer.uri).version() == created
    assert newer.load([]) == {}


def test_a_sink_that_was_rolled_back_and_upgraded_again_repeats_no_row(tmp_path: Path) -> None:
    make_first(tmp_path)
    newer = EntriesTable(store_uri=str(tmp_path))
    newer.load([STREAM])
    newer.append(a_row(1), {STREAM: 1}, time_ms=0)
    first = [column for column in ENTRIES.columns if column.name in FIRST]
    with pytest.raises(UserError):
        StreamTable(replace(ENTRIES, columns=first), store_uri=str(tmp_path)).load([STREAM])

    again = EntriesTable(store_uri=str(tmp_path))
    assert again.load([STREAM]) == {STREAM: 1}
    again.append(a_row(2), {STREAM: 2}, time_ms=0)

    sql = "select kafka_offset from {entries} order by 1"
    assert query(tmp_path, sql) == [(0,), (1,), (2,)]


@pytest.mark.parametrize("missing", ["node", "kafka_offset"])
def test_a_table_without_a_required_column_is_another_table(missing: str, tmp_path: Path) -> None:
    make_first(tmp_path, without=missing)

    with pytest.raises(UserError, match=rf"differs in column {missing};"):
        EntriesTable(store_uri=str(tmp_path)).load([])


def test_a_table_with_a_new_columns_name_and_another_type_is_another_table(tmp_path: Path) -> None:
    fields = [ENTRIES.arrow.field(ENTRIES.arrow.get_field_index(name)) for name in FIRST]
    other = Field("allocated_pod", DataType.int64(), nullable=True)
    DeltaTable.create(str(tmp_path / "entries"), schema=Schema([*fields, other]))

    with pytest.raises(UserError, match="differs in column allocated_pod;"):
        EntriesTable(store_uri=str(tmp_path)).load([])
