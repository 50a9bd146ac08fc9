"""Flat rows: they say what the event and the store's rows say, and an SQL engine reads them."""

import json
from datetime import UTC, datetime
from math import fsum
from pathlib import Path
from typing import Any

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuledger.bus.protocol import Record
from gpuledger.codec import Decoder, encode
from gpuledger.ledger.quantities import APPORTIONED, apportion
from gpuledger.ledger.rows import EntryRow
from gpuledger.records import Account, GpuBooks, GpuEvent
from gpuledger.store.schema import ENTRIES
from sinks.rows import encoded_rows_of
from sinks.store.buffer import rows_of as store_rows_of
from tests.default_topics import ROWS
from tests.unit.sinks.builders import START_NS, allocation, entry, event, pod, reading, settlement
from tests.unit.sinks.events import events

RECORD = Record("gpuledger.events.v1", 3, 17, 0, None, b"")
# The day and the place on Kafka are the store's own: partition column and trace of its offsets.
STORES_OWN = {"event_date", "kafka_partition", "kafka_offset"}


def rows(one: GpuEvent) -> list[dict[str, Any]]:
    return [json.loads(value) for value in encoded_rows_of(one)]


def as_in_the_store(row: dict[str, Any]) -> dict[str, Any]:
    """Return a flat row with the values that the store has for the same."""
    names = [column.name for column in ENTRIES.columns if column.name not in STORES_OWN]
    at = datetime.fromisoformat(row["time"])
    since = at - datetime(1970, 1, 1, tzinfo=UTC)
    time_us = (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
    labels = row.get("labels")
    written = None if labels is None else json.dumps(labels, sort_keys=True, separators=(",", ":"))
    return {name: row.get(name) for name in names} | {"time": time_us, "labels": written}


def in_the_store(one: GpuEvent) -> list[dict[str, Any]]:
    names = [column.name for column in ENTRIES.columns]
    found = [dict(zip(names, row, strict=True)) for row in store_rows_of(one, RECORD)]
    return [{name: row[name] for name in names if name not in STORES_OWN} for row in found]


@settings(max_examples=50, deadline=None)
@given(events())
def test_a_row_says_what_the_stores_row_says_under_the_same_names(one: GpuEvent) -> None:
    assert [as_in_the_store(row) for row in rows(one)] == in_the_store(one)


@settings(max_examples=50, deadline=None)
@given(events())
def test_a_row_has_no_other_column_than_the_stores_and_its_number(one: GpuEvent) -> None:
    allowed = {column.name for column in ENTRIES.columns} - STORES_OWN | {"row"}

    assert all(row.keys() <= allowed for row in rows(one))


@settings(max_examples=50, deadline=None)
@given(events())
def test_rows_are_numbered_through_their_event(one: GpuEvent) -> None:
    count = sum(len(each.entries) for each in [*one.gpus, *(one.settlements or ())])

    assert [row["row"] for row in rows(one)] == list(range(count))


QUANTITIES = ("busy_seconds", "memory_byte_seconds", "joules")


@settings(max_examples=50, deadline=None)
@given(events())
def test_the_rows_of_a_gpu_sum_to_what_its_entries_sum_to(one: GpuEvent) -> None:
    for books in one.gpus:
        of_gpu = [row for row in rows(one) if row["gpu_uuid"] == books.reading.uuid]
        for name in QUANTITIES:
            booked = [getattr(each, name) for each in books.entries]
            assert fsum(row.get(name, 0) for row in of_gpu) == fsum(each or 0 for each in booked)


@given(
    busy=st.lists(st.floats(0, 1), min_size=1, max_size=6),
    ratio=st.floats(0, 1),
    seconds=st.floats(0.1, 10),
)
def test_the_active_seconds_of_a_gpus_rows_sum_to_its_counters(
    busy: list[float], ratio: float, seconds: float
) -> None:
    booked = [entry(busy_seconds=share * seconds) for share in busy]
    booked += [entry(Account.UNATTRIBUTED, busy_seconds=0.0), entry(Account.IDLE)]
    books = GpuBooks(reading=reading(sm_active_ratio=ratio), entries=booked)
    one = event(gpus=[books], interval_ns=round(seconds * 1e9))

    found = [row.get("sm_active_seconds") for row in rows(one)]

    assert fsum(each or 0 for each in found) == pytest.approx(
        ratio * round(seconds * 1e9) / 1e9, rel=1e-9, abs=1e-12
    )
    at = [quantity.name for quantity in APPORTIONED].index("sm_active_seconds")
    assert found == [amounts[at] for amounts in apportion(books, one.interval_ns / 1e9)]


@settings(max_examples=50, deadline=None)
@given(events())
def test_a_row_is_the_record_of_its_topic_and_flat(one: GpuEvent) -> None:
    decoder: Decoder[Any] = Decoder(topic=ROWS.name, record=EntryRow)
    for value in encoded_rows_of(one):
        assert json.loads(encode(decoder.decode(value))) == json.loads(value)
        nested = [name for name, at in json.loads(value).items() if isinstance(at, dict | list)]
        assert nested in ([], ["labels"])


@settings(max_examples=50, deadline=None)
@given(events())
def test_an_event_that_is_read_again_gives_the_same_bytes(one: GpuEvent) -> None:
    decoder: Decoder[GpuEvent] = Decoder(topic="events", record=GpuEvent)

    assert encoded_rows_of(decoder.decode(encode(one))) == encoded_rows_of(one)


@pytest.mark.parametrize(
    ("time_ns", "written"),
    [
        (START_NS, "2026-09-21T14:13:20.000000Z"),
        (START_NS + 1_999, "2026-09-21T14:13:20.000001Z"),
        (0, "1970-01-01T00:00:00.000000Z"),
        (2**63 - 1, "2262-04-11T23:47:16.854775Z"),
    ],
)
def test_time_is_utc_to_the_microsecond(time_ns: int, written: str) -> None:
    assert {row["time"] for row in rows(event(time_ns=time_ns))} == {written}


def test_a_holder_that_the_event_does_not_list_is_refused_by_its_position() -> None:
    booked = [entry(Account.IDLE, allocation=1)]

    with pytest.raises(ValueError, match=r"allocation: position 1 .*there are 1"):
        encoded_rows_of(event(entries=booked, allocations=[allocation()]))


def test_a_gpu_that_the_event_does_not_list_is_refused_by_its_position() -> None:
    with pytest.raises(ValueError, match=r"gpu: position 1 .*there are 1"):
        encoded_rows_of(event(settlements=[settlement(gpu=1)]))


SQL: list[tuple[str, str, list[tuple[Any, ...]]]] = [
    (
        "GPU-seconds by pod",
        """SELECT namespace, pod, sum(busy_seconds)
           FROM (SELECT DISTINCT ON (node, boot_id, seq, row) * FROM rows)
           WHERE account = 'pod' GROUP BY ALL""",
        [("research", "train-0", 1.0)],
    ),
    (
        "a label is an element of a map",
        "SELECT DISTINCT labels['team'] FROM rows WHERE account = 'pod'",
        [("vision",)],
    ),
    (
        "what comes again is dropped by its identity",
        "SELECT count(*), count(DISTINCT (node, boot_id, seq, row)) FROM rows",
        [(8, 4)],
    ),
    (
        "what is not known is null",
        "SELECT DISTINCT account FROM rows WHERE namespace IS NULL AND joules IS NULL",
        [("idle",)],
    ),
    (
        "the time is a timestamp",
        "SELECT epoch_ms(max(time)) - epoch_ms(min(time)) FROM rows",
        [(1000,)],
    ),
]


@pytest.mark.parametrize(("case", "query", "expected"), SQL, ids=[row[0] for row in SQL])
def test_an_sql_engine_reads_rows_by_columns_without_taking_anything_apart(
    case: str, query: str, expected: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    booked = [entry(), entry(Account.IDLE, joules=None)]
    ticks = [event(tick, entries=booked, pods=[pod()]) for tick in (0, 1, 0, 1)]
    file = tmp_path / "rows.json"
    file.write_bytes(b"\n".join(value for one in ticks for value in encoded_rows_of(one)))

    with duckdb.connect() as connection:
        connection.execute(
            f"CREATE VIEW rows AS FROM read_json('{file}', format = 'newline_delimited',"
            f" columns = {{{columns()}}})"
        )
        assert connection.execute(query).fetchall() == expected, case


def columns() -> str:
    types = {"Utf8": "VARCHAR", "Int32": "INTEGER", "Int64": "BIGINT", "Float64": "DOUBLE"}
    types |= {"Boolean": "BOOLEAN", 'Timestamp(µs, "UTC")': "TIMESTAMPTZ"}
    shown = {
        column.name: types[str(column.kind).removeprefix("arro3.core.DataType<").rstrip(">\n")]
        for column in ENTRIES.columns
        if column.name not in STORES_OWN
    }
    shown |= {"row": "BIGINT", "labels": "MAP(VARCHAR, VARCHAR)"}
    return ", ".join(f"{name}: '{kind}'" for name, kind in shown.items())
