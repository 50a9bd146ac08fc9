"""The capacity reports over HTTP are those of the command."""

import csv
import io
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from urllib.parse import urlencode

import duckdb
import pytest

from gpuledger_cli.command import main
from gpuledger_reports.api.answering import AnswerSettings
from gpuledger_reports.api.description import capacity_list
from gpuledger_reports.api.pages import FIXED
from gpuledger_reports.capacity.registry import REPORTS
from gpuledger_reports.capacity.report import Row
from tests.unit.reports.api.report_requests import (
    InlinePages,
    Response,
    fleet_store,
    settings_for,
)
from tests.unit.reports.stores import (
    inventory_row,
    minute_row,
    used,
    write_store,
)

DAY = "2026-10-01"


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> AnswerSettings:
    return fleet_store(tmp_path_factory.mktemp("fleet"))


async def get(settings: AnswerSettings, report: str, **parameters: str) -> Response:
    served = InlinePages(settings)
    async with served.running():
        return await served.get(f"/capacity/{report}", urlencode(parameters))


def command(
    settings: AnswerSettings,
    report: str,
    *options: str,
    capsys: pytest.CaptureFixture[str],
) -> tuple[str, list[str]]:
    """Return what `gpuledger capacity` prints, and its notes."""
    prices = ["--prices", settings.prices or ""] if REPORTS[report].has_prices else []
    arguments = ["capacity", report, "--store", settings.store_uri, *prices, *options]
    assert main(arguments) in (0, 4)
    printed = capsys.readouterr()
    notes = [line.removeprefix("gpuledger: ") for line in printed.err.splitlines()]
    # On a busy machine, the progress is printed, too.
    return printed.out, [note for note in notes if not note.endswith(" of 100 percent")]


def options_for(parameters: dict[str, str]) -> Sequence[str]:
    return [
        text
        for name, value in parameters.items()
        for text in (f"--{name.replace('_', '-')}", value)
    ]


@pytest.mark.parametrize(
    ("report", "parameters"),
    [
        *((name, {}) for name in REPORTS if name != "forecast"),
        ("fleet", {"window": DAY, "by": "cluster,pool", "history": "day"}),
        ("waste", {"from": f"{DAY}T01:00:00Z", "to": "2026-10-02", "by": "namespace", "top": "1"}),
        ("waste", {"idle_minutes": "120"}),
        ("waste", {"by": "team", "where": "namespace=ns,cluster=prod"}),
        ("rightsizing", {"minimum_history": "1d", "explain": "ns/Pod/small-a"}),
        ("forecast", {"horizon": "1d", "added": "-64"}),
    ],
)
async def test_a_page_has_the_rows_and_notes_that_the_command_prints(
    reported: AnswerSettings,
    capsys: pytest.CaptureFixture[str],
    report: str,
    parameters: dict[str, str],
) -> None:
    answer = json.loads((await get(reported, report, **parameters)).body)
    options = options_for(parameters)
    printed, notes = command(reported, report, *options, "--format", "json", capsys=capsys)
    assert answer == json.loads(printed)
    assert answer["rows"] != []
    assert [f"Usage from {answer['from']} to {answer['to']}.", *answer["notes"]] == notes
    table = await get(reported, report, **parameters, format="csv")
    found, _ = command(reported, report, *options, "--format", "csv", capsys=capsys)
    assert table.body.decode() == found
    assert table.headers["content-type"] == "text/csv; charset=utf-8"


@pytest.mark.parametrize("report", [name for name in REPORTS if REPORTS[name].dimensions])
def test_selected_rows_are_those_of_a_finer_grouping(
    reported: AnswerSettings, capsys: pytest.CaptureFixture[str], report: str
) -> None:
    """A selection thus never has sums of more than it selects."""

    def rows(*options: str) -> list[Row]:
        printed, _ = command(reported, report, "--format", "json", *options, capsys=capsys)
        return [*json.loads(printed)["rows"]]

    names = [*REPORTS[report].dimensions]
    finer = rows("--by", ",".join(names)) if REPORTS[report].has_by else rows()
    # Without `by`, rows show only some dimensions.
    names = [name for name in names if name in finer[-1]]
    hidden = {*names} - {*REPORTS[report].columns, *REPORTS[report].default_by.split(",")}
    values = [finer[-1][name] for name in names]
    where = ",".join(f"{name}={value or ''}" for name, value in zip(names, values, strict=True))
    assert rows("--where", where) == [
        {name: row[name] for name in row if name not in hidden}
        for row in finer
        if [row[name] for name in names] == values
    ]


@pytest.mark.parametrize("report", REPORTS)
async def test_columns_of_counts_are_those_with_whole_numbers(
    reported: AnswerSettings, report: str
) -> None:
    """Their type in files does not depend on the rows. `value` is the value of any column."""
    rows = json.loads((await get(reported, report)).body)["rows"]
    for name in REPORTS[report].columns.keys() - {"value"}:
        for value in filter(None, (row[name] for row in rows)):
            assert isinstance(value, int) == (name in REPORTS[report].counts), name


async def test_parquet_has_the_rows_of_csv(reported: AnswerSettings, tmp_path: Path) -> None:
    file = tmp_path / "fleet.parquet"
    file.write_bytes((await get(reported, "fleet", format="parquet")).body)
    text = (await get(reported, "fleet", format="csv")).body.decode()
    (row,) = csv.DictReader(io.StringIO(text))
    query = f"SELECT model, total, fits_1, period_begin FROM '{file}'"  # noqa: S608  # the test's own file
    found = duckdb.sql(query)
    assert found.types == ["VARCHAR", "DOUBLE", "BIGINT", "TIMESTAMP WITH TIME ZONE"]
    ((model, total, fits, begin),) = found.fetchall()
    assert (model, total, fits) == (row["model"], float(row["total"]), int(row["fits_1"]))
    assert begin == datetime.fromisoformat(row["period_begin"])


@pytest.mark.parametrize(
    ("report", "query", "message"),
    [
        ("fleet", "by=modle", "by: unknown dimension 'modle'; did you mean model?"),
        ("fleet", "by=", "by: empty; choose from cluster"),
        ("fleet", "history=week", "history: invalid value 'week'; give day"),
        ("fleet", "horizon=7d", "horizon: unknown parameter; parameters are by, format, from"),
        ("summary", "by=model", "by: unknown parameter"),
        # It names a file, which would be the server's.
        ("queue", "slurm_jobs=/etc/passwd", "slurm_jobs: unknown parameter"),
        ("rightsizing", "by=namespace", "by: unknown parameter"),
        ("queue", "where=modle%3Dx", "where: unknown dimension 'modle'; choose from cluster, name"),
        ("waste", "top=-1", "top: invalid value '-1'; give a whole number from 1"),
        ("waste", "window=2020", "window: has no complete usage; give a time between 2026-10-01T"),
        ("waste", "window=7d&from=-1d", "window: conflicts with from and to; give either"),
        ("waste", "to=2026-10-02", "from: is missing; give it with `to`"),
        ("waste", "format=xml", "format: invalid value 'xml'; use json, csv, parquet"),
        ("forecast", "horizon=500d", "horizon: '500d' is longer than 366 days"),
        ("forecast", f"added={'many' * 200}", "added: invalid value 'manymany"),
        ("rightsizing", "explain=ns/Job/none", "explain: unknown workload 'ns/Job/none'"),
    ],
)
async def test_a_mistake_is_named_with_its_parameter_and_its_fix(
    reported: AnswerSettings, report: str, query: str, message: str
) -> None:
    served = InlinePages(reported)
    async with served.running():
        response = await served.get(f"/capacity/{report}", query)
    content = json.loads(response.body)
    assert response.status == 400
    assert content["message"].startswith(message)
    assert content["parameter"] == message.partition(":")[0]
    assert len(content["message"]) < 1000


async def test_too_little_memory_is_an_invalid_window(reported: AnswerSettings) -> None:
    tight = settings_for(reported.store_uri, memory_bytes=200_000)
    response = await get(tight, "waste")
    assert (response.status, json.loads(response.body)["parameter"]) == (400, "window")


async def test_a_store_without_hourly_sums_is_unavailable_and_names_the_command(
    tmp_path: Path,
) -> None:
    usage = [minute_row(used(0, "a", 1), 1)]
    store = write_store(tmp_path, usage=usage, inventory=[inventory_row()])
    response = await get(settings_for(store), "fleet")
    assert response.status == 503
    assert "run `gpuledger store maintain`" in json.loads(response.body)["message"]


async def test_equal_requests_within_an_hour_share_an_answer(reported: AnswerSettings) -> None:
    served = InlinePages(reported)
    async with served.running():
        first = await served.get("/capacity/waste", "window=week&by=namespace")
        assert await served.get("/capacity/waste", "by=namespace&window=week&format=json") == first
    assert len(served.answerer.requests) == 1


async def test_the_list_has_each_report_with_its_parameters(reported: AnswerSettings) -> None:
    response = await InlinePages(reported).get("/capacity")
    assert response.body == capacity_list() == FIXED["/capacity"]()
    listed = {one["name"]: one for one in json.loads(response.body)["reports"]}
    assert [*listed] == [*REPORTS]
    assert "slurm_jobs" not in listed["queue"]["parameters"]
    assert {*listed["waste"]["parameters"]} > {"window", "from", "to", "by", "top", "idle_minutes"}
    assert "--" not in json.dumps(listed)
