"""A damaged store is reported in one line that names the file; the documented repair works."""

from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest
from deltalake import DeltaTable

from gpuledger.bus.protocol import Record
from gpuledger.store.query import entries_sql
from gpuledger_sinks.errors import ReceiverUnavailableError
from gpuledger_sinks.store.buffer import rows_of
from gpuledger_sinks.store.damage import announce, explain, is_complete
from gpuledger_sinks.store.table import EntriesTable
from tests.unit.sinks.builders import START_NS, event

STREAM = "stream"
COMMITS = 12


def filled(store: Path) -> Path:
    """Fill a store with a commit for each event, and return the directory of its log."""
    table = EntriesTable(store_uri=str(store))
    table.load([STREAM])
    for offset in range(COMMITS):
        append(table, offset)
    return store / "entries" / "_delta_log"


def append(table: EntriesTable, offset: int) -> None:
    rows = list(
        rows_of(
            event(offset),
            Record("topic", 0, offset, 1, None, b""),
            ingested_time_ns=START_NS,
        )
    )
    table.append(rows, {STREAM: offset}, time_ms=1)


def rows(store: Path) -> dict[int, int]:
    """Return how many rows each offset has."""
    with duckdb.connect() as connection:
        relation = connection.sql(f"FROM {entries_sql(str(store))}")
        return dict(relation.aggregate("kafka_offset, count(*)").fetchall())


def cut(path: Path) -> str:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    return path.name


def cut_newest_commit(log: Path) -> str:
    return cut(max(log.glob("*.json")))


def zero_newest_commit(log: Path) -> str:
    """Zero the newest commit, as a power failure does: the length without the content."""
    newest = max(log.glob("*.json"))
    newest.write_bytes(bytes(newest.stat().st_size))
    return newest.name


def keep_lines(log: Path, count: int) -> str:
    """Cut the newest commit right after a line, so that the rest is valid JSON."""
    newest = max(log.glob("*.json"))
    newest.write_bytes(b"".join(newest.read_bytes().splitlines(keepends=True)[:count]))
    return newest.name


def keep_commit_info(log: Path) -> str:
    return keep_lines(log, 1)


def keep_commit_info_and_rows(log: Path) -> str:
    return keep_lines(log, 2)


def cut_newest_checkpoint(log: Path) -> str:
    DeltaTable(str(log.parent)).create_checkpoint()
    return cut(max(log.glob("*.checkpoint.parquet")))


def empty_newest_checkpoint(log: Path) -> str:
    name = cut_newest_checkpoint(log)
    (log / name).write_bytes(b"")
    return name


@pytest.mark.parametrize(
    "damage",
    [
        cut_newest_commit,
        zero_newest_commit,
        keep_commit_info,
        keep_commit_info_and_rows,
        cut_newest_checkpoint,
        empty_newest_checkpoint,
    ],
)
def test_a_damaged_log_is_one_line_that_names_the_file_and_the_documented_repair_works(
    tmp_path: Path, damage: Callable[[Path], str]
) -> None:
    log = filled(tmp_path)
    name = damage(log)

    with pytest.raises(ReceiverUnavailableError) as raised:
        EntriesTable(store_uri=str(tmp_path)).load([STREAM])
    message = str(raised.value)
    assert f"is damaged ({name})" in message
    assert "docs/guides/store.md" in message
    assert "\n" not in message
    assert "<unknown>" not in message

    # Repair: move the file away, and for a checkpoint also the pointer to it.
    (log / name).rename(tmp_path / name)
    if name.endswith(".parquet"):
        (log / "_last_checkpoint").unlink()

    table = EntriesTable(store_uri=str(tmp_path))
    stored = table.load([STREAM])[STREAM]
    assert stored == (COMMITS - 1 if name.endswith(".parquet") else COMMITS - 2)
    for offset in range(stored + 1, COMMITS + 1):
        append(table, offset)
    assert rows(tmp_path) == dict.fromkeys(range(COMMITS + 1), 2)


@pytest.mark.parametrize("damage", [cut_newest_commit, zero_newest_commit])
def test_a_log_that_is_damaged_while_a_sink_runs_is_named_too(
    tmp_path: Path, damage: Callable[[Path], str]
) -> None:
    log = filled(tmp_path)
    one, other = (EntriesTable(store_uri=str(tmp_path)) for _ in range(2))
    one.load(["of another partition"])
    other.load([STREAM])
    append(other, COMMITS)
    name = damage(log)

    rows_of_one = list(
        rows_of(
            event(0),
            Record("topic", 1, 0, 1, None, b""),
            ingested_time_ns=START_NS,
        )
    )
    with pytest.raises(ReceiverUnavailableError, match=rf"is damaged \({name}\)"):
        one.append(rows_of_one, {"of another partition": 0}, time_ms=1)
    with pytest.raises(ReceiverUnavailableError, match=rf"is damaged \({name}\)"):
        one.remove_orphans(older_than_hours=1)


def test_a_commit_that_lacks_the_offsets_of_one_of_several_streams_is_damaged(
    tmp_path: Path,
) -> None:
    """Even if another sink that had read the table before has committed after it."""
    log = filled(tmp_path)
    table = EntriesTable(store_uri=str(tmp_path))
    table.load(["a", "b"])
    rows_of_both = list(
        rows_of(
            event(0),
            Record("topic", 1, 0, 1, None, b""),
            ingested_time_ns=START_NS,
        )
    )
    table.append(rows_of_both, {"a": 0, "b": 0}, time_ms=1)
    name = keep_lines(log, 3)
    other = DeltaTable(str(tmp_path / "entries"))
    other.alter.set_table_properties({"delta.logRetentionDuration": "interval 30 days"})

    with pytest.raises(ReceiverUnavailableError, match=rf"is damaged \({name}\).*offsets"):
        EntriesTable(store_uri=str(tmp_path)).load(["a"])


def test_an_empty_commit_counts_as_one_that_did_not_happen(tmp_path: Path) -> None:
    log = filled(tmp_path)
    keep_lines(log, 0)

    table = EntriesTable(store_uri=str(tmp_path))
    assert table.load([STREAM]) == {STREAM: COMMITS - 2}
    append(table, COMMITS - 1)
    assert rows(tmp_path) == dict.fromkeys(range(COMMITS), 2)


def test_commits_that_announce_no_offsets_count_as_complete() -> None:
    history: list[dict[str, str]] = [{"operation": "WRITE"}, announce({STREAM: 7})]
    assert is_complete(history, {STREAM: 7}.get)
    assert is_complete(history, {STREAM: 8}.get)
    assert not is_complete(history, {STREAM: 6}.get)
    assert not is_complete(history, {"another": 7}.get)


def test_an_unavailable_storage_is_not_reported_as_damage(tmp_path: Path) -> None:
    (tmp_path / "entries").write_text("a file where the folder should be")

    with pytest.raises(ReceiverUnavailableError) as raised:
        EntriesTable(store_uri=str(tmp_path)).load([])
    assert "damaged" not in str(raised.value)


def test_an_error_is_reported_with_its_causes_and_missing_credentials_with_the_remedy() -> None:
    """The first line of deltalake's message is the least specific."""
    output = """Kernel error -> Operation not supported
          \x1b[31m\u21b3\x1b[0m an error occurred while loading credentials
           \x1b[31m\u21b3\x1b[0m failed to load a token
       at /rust/backtrace.rs:7
"""

    reported = explain(OSError(output), "s3://ledger/gpuledger")

    assert reported.startswith(
        "Kernel error -> Operation not supported: an error occurred while loading credentials:"
        " failed to load a token; set the credentials of the object store in store.storage_options"
    )
    assert "backtrace" not in reported
