"""Flat rows equal the event and the store's rows, and an SQL engine reads them directly."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.bus.protocol import Record
from gpuledger.codec import Decoder, encode
from gpuledger.ledger.quantities import APPORTIONED, BOOKED, apportion
from gpuledger.ledger.rows import COLUMNS, ColumnType, EntryRow
from gpuledger.records import Category, Entry, GpuEvent
from gpuledger.store.schema import ENTRIES
from gpuledger_sinks.rows import encoded_rows_of
from gpuledger_sinks.store.buffer import rows_of as store_rows_of
from tests.default_topics import ROWS
from tests.errors import has_words
from tests.examples import examples
from tests.unit.sinks.builders import (
    START_NS,
    books,
    entry,
    event,
    holder,
    pod,
    reading,
    settlement,
)
from tests.unit.sinks.events import events

RECORD = Record("gpuledger.events.v1", 3, 17, 0, None, b"")
# Only the store has the day, its partition column, and the Kafka position, for its offsets.
STORES_OWN = {"event_date", "kafka_partition", "kafka_offset"}


def rows(one: GpuEvent) -> list[dict[str, Any]]:
    return [
        json.loads(value)
        for value in encoded_rows_of(
            one,
            ingested_time_ns=START_NS,
        )
    ]


MAPS = {column.name for column in COLUMNS if column.type is ColumnType.LABELS}


def as_in_the_store(row: dict[str, Any]) -> dict[str, Any]:
    """Return a flat row with the values that the store has for the same entry."""
    names = [column.name for column in ENTRIES.columns if column.name not in STORES_OWN]
    at = datetime.fromisoformat(row["time"])
    since = at - datetime(1970, 1, 1, tzinfo=UTC)
    time_us = (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
    found = {name: row.get(name) for name in names} | {"time": time_us}
    maps = {
        name: json.dumps(value, sort_keys=True, separators=(",", ":"))
        for name, value in found.items()
        if isinstance(value, dict)
    }
    return found | maps


def in_the_store(one: GpuEvent) -> list[dict[str, Any]]:
    names = [column.name for column in ENTRIES.columns]
    found = [
        dict(zip(names, row, strict=True))
        for row in store_rows_of(
            one,
            RECORD,
            ingested_time_ns=START_NS,
        )
    ]
    return [{name: row[name] for name in names if name not in STORES_OWN} for row in found]


@examples(50)
@given(events())
def test_a_row_has_the_values_of_the_stores_row_under_the_same_names(one: GpuEvent) -> None:
    assert [as_in_the_store(row) for row in rows(one)] == in_the_store(one)


@examples(50)
@given(events())
def test_a_row_has_only_the_stores_columns_and_its_number(one: GpuEvent) -> None:
    allowed = {column.name for column in ENTRIES.columns} - STORES_OWN | {"row"}

    assert all(row.keys() <= allowed for row in rows(one))


@examples(50)
@given(events())
def test_the_rows_of_an_event_are_numbered_consecutively(one: GpuEvent) -> None:
    count = sum(len(each.entries) for each in [*one.gpus, *(one.late_adjustments or ())])

    assert [row["row"] for row in rows(one)] == list(range(count))


@examples(50)
@given(events())
def test_a_row_has_the_exact_values_of_its_entry(one: GpuEvent) -> None:
    """Whatever its category and methods are; a newer version may have other ones."""
    for row, (booked, methods) in zip(rows(one), entries_of(one), strict=True):
        message = {name: row.get(name) for name in (*AMOUNTS, *methods)}
        assert message == {name: getattr(booked, name) for name in AMOUNTS} | methods
        assert row["category"] == str(booked.category)


AMOUNTS = tuple(quantity.name for quantity in BOOKED)


def entries_of(one: GpuEvent) -> Iterator[tuple[Entry, dict[str, str | None]]]:
    """Yield the entries of an event in their order, each with the methods of its amounts."""
    for of_gpu in one.gpus:
        methods = (of_gpu.busy_method, of_gpu.memory_method, of_gpu.energy_method)
        for booked in of_gpu.entries:
            yield booked, dict(zip(METHODS, methods, strict=True))
    for settled in one.late_adjustments or ():
        for booked in settled.entries:
            yield booked, dict(zip(METHODS, (settled.busy_method, None, None), strict=True))


METHODS = ("busy_method", "memory_method", "energy_method")


@given(
    busy=st.lists(st.integers(0, 10**10), min_size=1, max_size=6),
    millionths=st.integers(0, 10**6),
    interval_ns=st.integers(1, 10**11),
)
def test_the_active_time_of_a_gpus_rows_sums_to_its_counters_exactly(
    busy: list[int], millionths: int, interval_ns: int
) -> None:
    booked = [entry(busy_ns=each) for each in busy]
    booked += [entry(Category.UNATTRIBUTED, busy_ns=0), entry(Category.IDLE)]
    of_gpu = books(reading(sm_active_ratio=millionths / 10**6), *booked)
    one = event(gpus=[of_gpu], interval_ns=interval_ns)
    (active,) = (each for each in APPORTIONED if each.name == "sm_active_ns")

    found = [row.get("sm_active_ns") for row in rows(one)]

    assert sum(each or 0 for each in found) == active.total([of_gpu.reading], interval_ns)
    at = APPORTIONED.index(active)
    assert found == [amounts[at] for amounts in apportion(of_gpu, interval_ns)]


@examples(50)
@given(events())
def test_a_row_is_a_flat_record_of_its_topic(one: GpuEvent) -> None:
    decoder: Decoder[Any] = Decoder(topic=ROWS.name, record=EntryRow)
    for value in encoded_rows_of(
        one,
        ingested_time_ns=START_NS,
    ):
        assert json.loads(encode(decoder.decode(value))) == json.loads(value)
        nested = {name for name, at in json.loads(value).items() if isinstance(at, dict | list)}
        assert nested <= MAPS


@examples(50)
@given(events())
def test_an_event_that_is_encoded_and_decoded_gives_the_same_bytes(one: GpuEvent) -> None:
    decoder: Decoder[GpuEvent] = Decoder(topic="events", record=GpuEvent)

    assert encoded_rows_of(
        decoder.decode(encode(one)), ingested_time_ns=START_NS
    ) == encoded_rows_of(
        one,
        ingested_time_ns=START_NS,
    )


@pytest.mark.parametrize(
    ("time_ns", "written"),
    [
        (START_NS, "2026-09-21T14:13:20.000000Z"),
        (START_NS + 1_999, "2026-09-21T14:13:20.000001Z"),
        (0, "1970-01-01T00:00:00.000000Z"),
        (2**63 - 1, "2262-04-11T23:47:16.854775Z"),
    ],
)
def test_time_is_utc_in_microseconds(time_ns: int, written: str) -> None:
    assert {row["time"] for row in rows(event(time_ns=time_ns))} == {written}


def test_an_allocatee_that_the_event_does_not_list_is_rejected_by_its_position() -> None:
    booked = [entry(Category.IDLE, allocation=1)]

    with pytest.raises(ValueError, check=has_words("allocation", "1")):
        encoded_rows_of(event(entries=booked, allocated_to=[holder()]), ingested_time_ns=START_NS)


def test_a_gpu_that_the_event_does_not_list_is_rejected_by_its_position() -> None:
    with pytest.raises(ValueError, check=has_words("gpu", "1")):
        encoded_rows_of(
            event(late_adjustments=[settlement(gpu=1)]),
            ingested_time_ns=START_NS,
        )


SQL: list[tuple[str, str, list[tuple[Any, ...]]]] = [
    (
        "GPU-seconds by pod",
        """SELECT namespace, pod, sum(busy_ns) / 1e9
           FROM (SELECT DISTINCT ON (node, boot_id, seq, row) * FROM rows)
           WHERE category = 'pod' GROUP BY ALL""",
        [("research", "train-0", 1.0)],
    ),
    (
        "a label is an element of a map",
        "SELECT DISTINCT labels['team'] FROM rows WHERE category = 'pod'",
        [("vision",)],
    ),
    (
        "a repeated row is dropped by its identity",
        "SELECT count(*), count(DISTINCT (node, boot_id, seq, row)) FROM rows",
        [(8, 4)],
    ),
    (
        "an unknown value is null",
        "SELECT DISTINCT category FROM rows WHERE namespace IS NULL AND energy_millijoules IS NULL",
        [("idle",)],
    ),
    (
        "the time is a timestamp",
        "SELECT epoch_ms(max(time)) - epoch_ms(min(time)) FROM rows",
        [(1000,)],
    ),
]


@pytest.mark.parametrize(("case", "query", "expected"), SQL, ids=[row[0] for row in SQL])
def test_an_sql_engine_reads_rows_by_columns_without_parsing(
    case: str, query: str, expected: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    booked = [entry(), entry(Category.IDLE, energy_millijoules=None)]
    ticks = [event(tick, entries=booked, pods=[pod()]) for tick in (0, 1, 0, 1)]
    file = tmp_path / "rows.json"
    file.write_bytes(
        b"\n".join(
            value
            for one in ticks
            for value in encoded_rows_of(
                one,
                ingested_time_ns=START_NS,
            )
        )
    )

    with duckdb.connect() as connection:
        connection.execute(
            f"CREATE VIEW rows AS FROM read_json('{file}', format = 'newline_delimited',"
            f" columns = {{{columns()}}})"
        )
        assert connection.execute(query).fetchall() == expected, case


def columns() -> str:
    types = {"Utf8": "VARCHAR", "Int32": "INTEGER", "Int64": "BIGINT"}
    types |= {"Boolean": "BOOLEAN", 'Timestamp(µs, "UTC")': "TIMESTAMPTZ"}
    shown = {
        column.name: types[str(column.kind).removeprefix("arro3.core.DataType<").rstrip(">\n")]
        for column in ENTRIES.columns
        if column.name not in STORES_OWN
    }
    shown |= {"row": "BIGINT", "labels": "MAP(VARCHAR, VARCHAR)"}
    return ", ".join(f"{name}: '{kind}'" for name, kind in shown.items())
