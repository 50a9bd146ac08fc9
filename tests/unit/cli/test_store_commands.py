"""`gpuledger store maintain` and `gpuledger query`, as users run them."""

import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import duckdb
import pytest

from gpuledger.store.confinement import confine, parse_question
from gpuledger.store.views import create_views
from gpuledger_cli.__main__ import main
from gpuledger_cli.long_work import run_interruptible
from tests.hanging import HANG_SECONDS
from tests.unit.sinks.store.test_maintainer import fill


@pytest.fixture(scope="module")
def summed_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store of ten minutes that are summed up, to copy."""
    path = tmp_path_factory.mktemp("summed-up") / "store"
    fill(path, commits=10)
    assert maintain(path, *FOREVER) == 0
    return path


@pytest.fixture
def store(summed_up: Path, tmp_path: Path) -> Path:
    """Return a store of ten minutes that are summed up."""
    return Path(shutil.copytree(summed_up, tmp_path / "store"))


def ask(store: Path, sql: str, *options: str) -> int:
    return main(["query", "--store", str(store), sql, *options])


def maintain(store: Path, *options: str) -> int:
    return main(["store", "maintain", "--store", str(store), *options])


FOREVER = ("--usage-retention", "0d", "--usage-hourly-retention", "0d")


def cells(table: str) -> list[list[str]]:
    """Return the cells of a printed table, without its head."""
    lines = [line for line in table.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_maintain_runs_each_step_and_prints_a_table_of_the_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path, commits=10)
    orphan = tmp_path / "usage" / "event_date=2024-10-04" / "part-left.parquet"
    orphan.write_bytes(b"of a writer that was killed")
    os.utime(orphan, (0, 0))
    assert maintain(tmp_path, *FOREVER, "--verbose") == 0
    shown = capsys.readouterr()
    assert cells(shown.out) == [
        ["sum up", "usage_hourly", "1 hour"],
        ["sum up", "usage_daily", "1 day"],
        ["merge small files", "usage", "10 files"],
        ["vacuum", "usage", "1 file"],
    ]
    steps = shown.err.splitlines()
    assert steps[0] == f"gpuledger: 1 of {len(steps)}: sum up (usage_hourly)"
    assert maintain(tmp_path) == 0
    shown = capsys.readouterr()
    assert cells(shown.out) == [["remove old rows", "usage", "1 file"]]
    assert shown.err == ""


def test_on_a_terminal_one_line_shows_the_current_step(tmp_path: Path) -> None:
    fill(tmp_path, commits=10)
    ours, theirs = os.openpty()
    argv = [sys.executable, "-m", "gpuledger_cli", "store", "maintain", "--store", str(tmp_path)]
    done = subprocess.run(
        argv,
        env={**os.environ, "TERM": "xterm"},
        stderr=theirs,
        stdout=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )
    os.close(theirs)
    shown = os.read(ours, 65536).decode()
    os.close(ours)

    assert done.returncode == 0
    assert "sum up (usage_hourly)" in shown
    assert shown.count("\n") <= 1


@pytest.mark.parametrize("command", [("store", "maintain"), ("query",)])
def test_the_help_describes_each_option(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--help"]) == 0
    shown = capsys.readouterr().out
    without = r"^  --[\w-]+ +(\[default.*)?$"
    assert re.findall(without, shown, re.MULTILINE) == []
    assert "--empty-" not in shown


def test_a_dry_run_shows_the_steps_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path, commits=10)
    before = sorted(tmp_path.rglob("*"))
    assert maintain(tmp_path, "--dry-run") == 0
    assert cells(capsys.readouterr().out) == [
        ["sum up", "usage_hourly", "1 hour"],
        ["sum up", "usage_daily", "1 day"],
        ["remove old rows", "usage", "10 files"],
        ["merge small files", "usage", "10 files"],
    ]
    assert sorted(tmp_path.rglob("*")) == before


def test_maintenance_repeats_until_the_process_is_stopped(tmp_path: Path) -> None:
    """It waits for a store that does not exist yet."""
    path = tmp_path / "store"
    command = ["store", "maintain", "--store", str(path), *FOREVER, "--every", "1s"]
    with subprocess.Popen(
        [sys.executable, "-m", "gpuledger_cli", *command], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            assert "no such directory" in process.stderr.readline()
            fill(path, commits=1)
            while not (path / "usage_daily").exists():
                assert process.poll() is None
                time.sleep(0.05)
            process.terminate()
            assert process.wait(timeout=10) == 0
        finally:
            process.kill()


def test_a_mistyped_store_is_not_created(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert maintain(tmp_path / "mistyped") == 2
    assert "no such directory" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


SQL = "SELECT node, busy_ns, memory_byte_ns, busy_seconds FROM usage_hourly"


def test_json_and_csv_have_every_digit(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert ask(store, SQL, "--format", "json") == 0
    digits = "100000000000000000000000010"
    assert json.loads(capsys.readouterr().out) == [
        {"node": "node-a", "busy_ns": 10, "memory_byte_ns": digits, "busy_seconds": "0.000000010"}
    ]
    assert ask(store, SQL, "--format", "csv") == 0
    assert list(csv.reader(io.StringIO(capsys.readouterr().out))) == [
        ["node", "busy_ns", "memory_byte_ns", "busy_seconds"],
        ["node-a", "10", digits, "0.000000010"],
    ]


def test_json_has_numbers_beyond_64_bits_and_tables_show_text_in_brackets(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    huge = 2**64
    sql = f"SELECT {huge}::HUGEINT AS n, [{huge}::HUGEINT] AS many, {{'n': {huge}::HUGEINT}} AS s"
    assert ask(store, sql, "--format", "json") == 0
    assert json.loads(capsys.readouterr().out) == [{"n": huge, "many": [huge], "s": {"n": huge}}]
    assert ask(store, "SELECT '[drm] x [/closed]' AS name") == 0
    assert "[drm] x [/closed]" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["csv", "table"])
def test_decimals_in_lists_and_structs_are_written_like_others(
    store: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    sql = "SELECT [1.50, 2.25] AS many, {'n': 1.50, 't': 'a, b', 'u': [NULL]} AS one"
    assert ask(store, sql, "--format", form) == 0
    shown = capsys.readouterr().out
    assert "[1.50, 2.25]" in shown
    assert "{'n': 1.50, 't': 'a, b', 'u': [None]}" in shown


def test_a_damaged_log_is_one_line(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = max((store / "usage_hourly" / "_delta_log").glob("*.json"))
    newest.write_bytes(newest.read_bytes()[:100])
    capsys.readouterr()
    assert ask(store, SQL) == 2
    shown = capsys.readouterr().err
    assert (shown.count("\n"), "usage_hourly" in shown, "Repair" in shown) == (1, True, True)


def test_maintaining_a_store_with_a_missing_data_file_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path, commits=2)
    next((tmp_path / "usage").rglob("*.parquet")).unlink()
    assert maintain(tmp_path) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot read its rows" in line


def test_a_table_is_not_cut_off_in_a_pipe(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert ask(store, "SELECT * FROM usage_hourly") == 0
    shown = capsys.readouterr().out
    assert "100000000000000000000000010" in shown
    assert "namespace_annotations" in shown


def test_json_is_written_in_parts_as_one_list(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for count in (0, 1, 25_000):
        capsys.readouterr()
        assert ask(store, f"FROM range({count}) AS numbers(i)", "--format", "json") == 0
        assert json.loads(capsys.readouterr().out) == [{"i": number} for number in range(count)]


def test_parquet_is_written_to_a_file_with_exact_values(store: Path, tmp_path: Path) -> None:
    file = tmp_path / "found.parquet"
    assert ask(store, SQL, "--format", "parquet", "--output", str(file)) == 0
    with duckdb.connect() as connection:
        found = connection.execute(f"SELECT busy_ns FROM '{file}'").fetchall()  # noqa: S608  # our own file
    assert found == [(10,)]


@pytest.mark.parametrize(
    ("sql", "options", "named"),
    [
        ("SELECT nope FROM usage", (), "nope"),
        ("SELECT 1", ("--format", "parquet"), "--output"),
        ("SELECT 1", ("--storage-option", "region"), "KEY=VALUE"),
        ("SELECT 1", ("--storage-option", "=x"), "KEY=VALUE"),
        ("CREATE TABLE kept (number INTEGER)", (), "no rows"),
        ("", (), "empty"),
        ("SELECT 1; SELECT 2", (), "2 statements"),
        ("SELECT 1 AS a, 2 AS a", ("--format", "json"), "names: a;"),
        ("PIVOT usage ON category", (), "IN"),
    ],
)
def test_an_invalid_query_is_one_line_and_exit_code_2(
    store: Path,
    sql: str,
    options: tuple[str, ...],
    named: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    capsys.readouterr()
    assert ask(store, sql, *options) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1
    assert named in shown.err
    assert shown.out == ""


@pytest.mark.parametrize(
    "sql",
    [
        "COPY (SELECT 42) TO '{outside}/made'",
        "COPY (SELECT 42) TO '{store}/made'",
        "SELECT 1; COPY (SELECT 42) TO '{store}/made'",
        "WITH copied AS (COPY (SELECT 42) TO '{store}/made') SELECT 1",
        "EXPLAIN ANALYZE COPY (SELECT 42) TO '{store}/made'",
        "FROM query($$COPY (SELECT 42) TO '{store}/made'$$)",
        "EXPORT DATABASE '{store}/made'",
        "IMPORT DATABASE '{outside}'",
        "PRAGMA import_database('{outside}')",
        "ATTACH '{store}/made'",
        "INSTALL httpfs",
        "LOAD '{outside}/secret'",
        "FROM st_read('{outside}/secret')",
        "SET enable_external_access = true",
        "SET GLOBAL lock_configuration = false",
        "SET VARIABLE kept = 1",
        "PRAGMA enable_profiling",
        "PRAGMA profiling_output = '{outside}/made'",
        "CALL pragma_version()",
        "PREPARE kept AS SELECT 1",
        "DROP VIEW usage",
        "FROM read_csv('{outside}/secret')",
        "FROM read_text('{outside}/secret')",
        "FROM read_text('{store}/../outside/secret')",
        "FROM read_blob('/proc/self/environ')",
        "FROM '{outside}/secret'",
        "FROM glob('{outside}/*')",
        "FROM glob('{store}*')",
        "FROM sniff_csv('{outside}/secret')",
        "FROM query('FROM read_text(''{outside}/secret'')')",
        "FROM read_csv('http://127.0.0.1:1/secret')",
        "FROM duckdb_secrets()",
        # Names of variables of the program that queries.
        "FROM rows",
        "FROM files",
    ],
)
def test_a_query_creates_no_file_and_reads_only_those_of_the_store(
    store: Path, tmp_path: Path, sql: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("secret", "schema.sql", "load.sql"):
        (outside / name).write_text("SELECT 'kept to itself';")
    before = sorted(tmp_path.rglob("*"))
    capsys.readouterr()

    assert ask(store, sql.format(store=store, outside=outside)) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "kept to itself" not in shown.err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("sql", ["SHOW TABLES", "DESCRIBE usage", "SUMMARIZE usage", "FROM usage;"])
def test_every_statement_that_returns_rows_of_the_store_is_executed(store: Path, sql: str) -> None:
    assert ask(store, sql) == 0


@pytest.mark.parametrize("name", ["it's", "a[b]*?", "a=b c", "linked"])
def test_the_stores_directory_may_have_any_name(
    store: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = store.parent / name
    if name == "linked":
        moved.symlink_to(store)
    else:
        store.rename(moved)
    monkeypatch.chdir(store.parent)
    capsys.readouterr()

    for address in (moved, Path(name)):
        assert ask(address, "SELECT count(*) AS n FROM usage", "--format", "json") == 0
        assert json.loads(capsys.readouterr().out) == [{"n": 10}]


def test_a_result_that_does_not_fit_into_memory_is_spilled(
    store: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """To DuckDB's directory for it, which a confined connection may use."""
    monkeypatch.chdir(tmp_path)
    with duckdb.connect() as connection:
        files = create_views(connection, str(store))
        connection.execute("SET memory_limit = '60MB'; SET threads = 1")
        confine(connection, files)
        sql = "SELECT count(*) FROM (SELECT DISTINCT hash(range) FROM range(5000000), usage)"
        found = connection.sql(parse_question(connection, sql)).fetchall()
    assert found == [(5_000_000,)]


def test_a_query_of_hours_that_are_not_summed_up_reports_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path, commits=1)
    capsys.readouterr()
    assert ask(tmp_path, "SELECT * FROM usage_hourly", "--format", "json") == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == []
    assert f"gpuledger store maintain --store {tmp_path}" in shown.err
    assert ask(tmp_path, "SELECT * FROM usage", "--format", "json") == 0
    assert capsys.readouterr().err == ""


def test_ctrl_c_ends_a_query_that_would_run_for_hours(store: Path) -> None:
    slow = "SELECT sum(a.range * b.range) FROM range(1000000) AS a, range(1000000) AS b"
    command = [sys.executable, "-m", "gpuledger_cli", "query", slow, "--store", str(store)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        try:
            wait_until_busy(running.pid)
            running.send_signal(signal.SIGINT)
            _, error = running.communicate(timeout=HANG_SECONDS)
        finally:
            running.kill()
    assert (running.returncode, error) == (130, "")


def wait_until_busy(pid: int) -> None:
    """Wait until threads other than the main one have run for half a second."""
    end = time.monotonic() + HANG_SECONDS
    while time.monotonic() < end:
        ticks = 0
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # threads come and go
                stat = (task / "stat").read_text().rpartition(")")[2].split()
                ticks += int(stat[11]) if task.name != str(pid) else 0
        if ticks > os.sysconf("SC_CLK_TCK") / 2:
            return
        time.sleep(0.05)
    raise AssertionError("the query did not begin")


def test_an_interrupt_before_the_query_begins_is_not_lost() -> None:
    interrupts = threading.Semaphore(0)

    def begins_late() -> bool:
        signal.raise_signal(signal.SIGINT)  # the main thread handles it
        return all(interrupts.acquire(timeout=HANG_SECONDS) for _ in range(3))

    try:
        with pytest.raises(KeyboardInterrupt):
            run_interruptible(begins_late, interrupt=interrupts.release)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("command", [["bill"], ["query", "SHOW TABLES"], ["store", "maintain"]])
@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ("", "GPULEDGER_STORE__URI: empty value"),
        ("ftp://ledger", "unknown scheme: ftp"),
        ("absent", "no such directory: absent"),
        (".", "store at ."),
    ],
)
def test_an_error_of_a_store_names_its_cause(
    command: list[str],
    uri: str,
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    monkeypatch.setenv("GPULEDGER_STORE__URI", uri)

    assert main(command) == 2
    error = capsys.readouterr().err
    assert problem in error.replace("store with rows at", "store at").replace(
        "in the store", "store"
    )
    assert error.count("\n") == 1
