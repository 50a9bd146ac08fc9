"""A missing or damaged store makes the service unready and is named, until it is back."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from deltalake import DeltaTable
from structlog.testing import capture_logs

from gpuledger_reports.api.endpoints import PAGES
from gpuledger_reports.api.processes import BillProcesses
from tests.unit.reports.api.report_requests import NOW_SECONDS, InlinePages, small_store

TABLE = "usage_hourly"
COMMITS = 5


def log_of(table: Path) -> Path:
    return table / "_delta_log"


def commits_of(table: Path) -> list[Path]:
    return sorted(log_of(table).glob("*.json"))


def rows_of(table: Path) -> Path:
    return next(table.rglob("part-*.parquet"))


def cut(file: Path) -> str:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    return file.name


def remove(file: Path) -> str:
    file.unlink()
    return file.name


def checkpoint_of(table: Path) -> Path:
    DeltaTable(str(table)).create_checkpoint()
    return next(log_of(table).glob("*.checkpoint.parquet"))


def remove_store(table: Path) -> str:
    shutil.rmtree(table.parent)
    return str(table.parent)


def remove_table(table: Path) -> str:
    shutil.rmtree(table)
    return TABLE


def remove_log(table: Path) -> str:
    shutil.rmtree(log_of(table))
    return "_delta_log"


DAMAGE: dict[str, Callable[[Path], str]] = {
    "the directory of the store is missing": remove_store,
    "a table is missing": remove_table,
    "a log is missing": remove_log,
    "the newest commit is cut short": lambda table: cut(commits_of(table)[-1]),
    "a commit is missing": lambda table: remove(commits_of(table)[2]),
    "a checkpoint is cut short": lambda table: cut(checkpoint_of(table)),
    "a checkpoint is missing": lambda table: remove(checkpoint_of(table)) and "_last_checkpoint",
    "a file with rows is cut short": lambda table: cut(rows_of(table)),
    "a file with rows is missing": lambda table: remove(rows_of(table)),
}


@pytest.mark.parametrize("what", DAMAGE)
async def test_a_damaged_store_is_named_and_the_service_is_ready_once_it_is_restored(
    tmp_path: Path, what: str
) -> None:
    served = InlinePages(small_store(tmp_path))
    store, whole = tmp_path / "store", tmp_path / "whole"
    table = DeltaTable(str(store / TABLE))
    for number in range(COMMITS):
        table.alter.set_table_properties({"x": str(number)}, raise_if_not_exists=False)
    shutil.copytree(store, whole)
    with capture_logs() as logged:
        async with served.running():
            assert served.readiness.is_ready()
            named = DAMAGE[what](store / TABLE)
            await served.check_store()
            assert not served.readiness.is_ready()
            assert named in served.check.detail
            shutil.rmtree(store, ignore_errors=True)
            shutil.copytree(whole, store)
            await served.check_store()
            assert served.readiness.is_ready()
    assert named in next(line["detail"] for line in logged if line["event"] == "check_failed")


async def test_a_store_that_is_missing_at_the_start_makes_the_service_ready_once_it_is_there(
    tmp_path: Path,
) -> None:
    served = InlinePages(small_store(tmp_path / "elsewhere"))
    store, elsewhere = tmp_path / "elsewhere/store", tmp_path / "moved"
    store.rename(elsewhere)
    async with served.running():
        assert str(store) in served.check.detail
        assert not served.readiness.is_ready()
        elsewhere.rename(store)
        await served.check_store()
        assert served.readiness.is_ready()


@pytest.mark.parametrize(("path", "query"), [("/bill", "period=2026-10"), ("/capacity/fleet", "")])
async def test_a_file_that_cannot_be_read_is_named_in_the_log_but_not_to_the_client(
    tmp_path: Path, path: str, query: str
) -> None:
    """Its size is right, so that only reading it shows the damage."""
    settings = small_store(tmp_path)
    file = rows_of(tmp_path / "store" / TABLE)
    file.write_bytes(bytes(file.stat().st_size))
    bills = BillProcesses(settings, count=1, max_waiting=0, timeout_seconds=60)
    with capture_logs() as logged:
        answer = await bills.ask(PAGES[path](query, int(NOW_SECONDS) * 10**6))
    assert answer.status == 503
    assert file.name not in answer.body.decode()
    (line,) = (line for line in logged if line["event"] == "store_read_failed")
    assert file.name in line["error"]
