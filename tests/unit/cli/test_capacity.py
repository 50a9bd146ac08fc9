"""`gpuledger capacity forecast` on a store: its formats, its exit codes and its mistakes."""

import csv
import io
import json
import sys
from pathlib import Path

import duckdb
import pytest
from typing_extensions import override

from gpuledger_cli.command import main
from gpuledger_reports.capacity.registry import REPORTS
from gpuledger_reports.capacity.report import Report
from tests.tables import for_each
from tests.unit.reports.stores import (
    BEGIN_US,
    HOUR_US,
    allocated,
    inventory_row,
    node_row,
    write_store,
)

DAYS = 29


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a month in which pods had one of two GPUs, by turns."""
    usage = [
        {**row, "event_date": (BEGIN_US + hour * HOUR_US) // 86_400_000_000}
        for hour in range(DAYS * 24)
        for row in (
            allocated(hour, "train" if hour // 24 % 7 < 5 else None),
            allocated(hour, None, gpu="GPU-b"),
        )
    ]
    inventory = [inventory_row(gpu) for gpu in ("GPU-a", "GPU-b")]
    folder = tmp_path_factory.mktemp("store")
    return write_store(folder, usage_hourly=usage, inventory=inventory)


def test_the_table_and_the_files_show_the_same_forecast(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = {}
    for output in ("table", "csv", "json"):
        arguments = ["capacity", "forecast", "--store", store, "--horizon", "1d"]
        assert main([*arguments, "--format", output]) == 0
        shown[output] = capsys.readouterr().out
    (row,) = json.loads(shown["json"])["rows"]
    (line,) = csv.DictReader(io.StringIO(shown["csv"]))
    assert (row["model"], row["gpus"], row["method"]) == ("H100", 2.0, line["method"])
    assert line["expected"] == str(row["expected"])
    assert row["method"] in shown["table"]
    assert "> 1" in shown["table"]


def test_a_parquet_file_has_the_same_rows_and_needs_a_name(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "forecast.parquet"
    arguments = ["capacity", "forecast", "--store", store, "--horizon", "1d", "--format", "parquet"]
    assert main([*arguments, "--output", str(output)]) == 0
    query = f"SELECT model, gpus, typeof(full_days_p10) FROM '{output}'"  # noqa: S608  # the test's own file
    assert duckdb.sql(query).fetchall() == [("H100", 2.0, "DOUBLE")]
    assert main(arguments) == 2
    assert "--format parquet: missing --output" in capsys.readouterr().err


def test_selections_and_added_gpus_may_be_repeated(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["capacity", "forecast", "--store", store, "--horizon", "1d", "--format", "json"]
    added = ["--added", "-1", "--added", "model=H100:2.5"]
    assert main([*arguments, *added, "--where", "cluster=prod", "--where", "pool="]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["model"], row["gpus"]) == ("H100", 3.5)
    assert main([*arguments, "--where", "cluster=prod", "--where", "cluster=lab"]) == 2
    assert "--where: cluster is given twice" in capsys.readouterr().err


def test_without_enough_history_the_exit_code_and_the_note_say_so(
    store: str, tmp_path: Path
) -> None:
    output = tmp_path / "forecast.json"
    arguments = ["capacity", "forecast", "--store", store, "--format", "json"]
    assert main([*arguments, "--output", str(output)]) == 4
    (row,) = json.loads(output.read_text())["rows"]
    assert row["note"] == "too short a history; 34 days are needed"


def test_a_table_omits_columns_without_values_and_states_its_time_range(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["capacity", "fleet", "--store", store, "--window", "1d"]) == 0
    shown = capsys.readouterr().out
    assert "Fit: 1 GPU" in shown
    assert "Day" not in shown
    assert "Usage from 2026-10-28T23:00:00Z to 2026-10-29T23:00:00Z." in shown
    assert main(["capacity", "fleet", "--store", store, "--window", "1d", "--history", "day"]) == 0
    shown = capsys.readouterr().out
    assert "Fit: 1 GPU" not in shown
    assert "2026-10-29" in shown


class Terminal(io.StringIO):
    @override
    def isatty(self) -> bool:
        return True


def test_a_table_names_the_columns_for_which_a_terminal_has_no_room(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    assert main(["capacity", "fleet", "--store", store, "--by", "cluster,model"]) == 0
    lines = terminal.getvalue().splitlines()
    assert "Fit: 1 GPU" in lines[1]
    assert "Allocatable" not in lines[1]
    assert len(lines[0]) <= 80
    assert (
        "Columns that do not fit: Mean: free, Mean: used, Mean: allocated, Allocatable"
        in "".join(lines)
    )


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_a_column_that_a_table_may_omit_has_a_heading(report: Report) -> None:
    assert all(report.columns[name] for name in report.droppable)
    assert len({*report.droppable}) == len(report.droppable)


def test_numbers_of_a_column_have_equal_decimals_and_end_in_one_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = [
        row
        for hour in range(2)
        for row in (
            *(allocated(hour, "large", gpu=f"GPU-{gpu}") for gpu in range(1200)),
            allocated(hour, "small", HOUR_US * 500, gpu="GPU-half", model="L4"),
        )
    ]
    large = write_store(tmp_path, usage_hourly=usage)
    assert main(["capacity", "fleet", "--store", large]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()[1:5]
    at = head.split("┃").index(" Allocated ")
    assert [row.split("│")[at] for row in rows] == ["   1,200.0 ", "       0.5 "]


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_headings_of_a_report_differ(report: Report) -> None:
    headings = [heading for heading in report.columns.values() if heading]
    assert len({*headings}) == len(headings)


def test_the_summary_needs_no_dimensions(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capacity", "summary", "--store", store, "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {"report": "fleet", "column": "total", "value": 2.0}.items() <= rows[0].items()
    assert main(["capacity", "summary", "--store", store, "--by", "model"]) == 2


def test_without_hourly_usage_the_report_is_empty_and_a_hint_names_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = write_store(tmp_path, nodes=[node_row()])
    assert main(["capacity", "fleet", "--store", empty]) == 4
    shown = capsys.readouterr()
    assert "The store has no GPUs in the time range." in shown.out
    assert f"gpuledger: --store {empty}: usage_hourly has no complete hour yet" in shown.err
    assert "gpuledger store maintain" in shown.err
    assert main(["capacity", "summary", "--store", empty]) == 4


def test_a_selection_without_rows_does_not_claim_that_the_report_has_none(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["capacity", "fleet", "--store", store, "--where", "pool=x"]) == 4
    shown = capsys.readouterr().out
    assert "No row has pool=x." in shown
    assert "The store has no GPUs" not in shown


def test_control_characters_do_not_reach_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = [
        allocated(hour, "train", allocated_namespace="ns\x1b[31m", model="H100\x1b[2J\nFake.")
        for hour in range(3)
    ]
    hostile = write_store(tmp_path, usage_hourly=usage)
    prices = tmp_path / "prices.yaml"
    prices.write_text("prices: [{name: other, model: L4, per_gpu_hour: 2}]")
    assert main(["capacity", "waste", "--store", hostile, "--prices", str(prices)]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "ns\\x1b[31m" in shown
    assert "no price matches: H100\\x1b[2J\\nFake." in shown


def test_files_have_their_time_range_on_standard_error(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["capacity", "fleet", "--store", store, "--window", "90d", "--format", "csv"]) == 0
    shown = capsys.readouterr()
    usage = "Usage from 2026-10-01T00:00:00Z to 2026-10-29T23:00:00Z."
    assert shown.err.splitlines()[-1] == f"gpuledger: {usage}"
    assert usage not in shown.out


@for_each(
    "report, nothing",
    [
        ("waste", "No allocated time is known to be unused."),
        ("faults", "No GPU is known to have failed."),
    ],
)
def test_a_report_without_rows_does_not_claim_what_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], report: str, nothing: str
) -> None:
    usage = [allocated(hour, "train", busy_ns=None) for hour in range(3)]
    unknown = write_store(tmp_path / report, usage_hourly=usage)
    assert main(["capacity", report, "--store", unknown]) == 4
    assert capsys.readouterr().out.startswith(f"{nothing}\n")


@for_each(
    "option, value, message",
    [
        ("--by", "modle", "--by: unknown dimension 'modle'; did you mean model?"),
        ("--by", ",", "--by: empty; choose from cluster"),
        ("--horizon", "36h", "--horizon: invalid duration '36h'; it must be whole days"),
        ("--horizon", "500d", "--horizon: '500d' is longer than 366 days"),
        ("--added", "many", "--added: invalid value 'many'; give a number"),
        ("--window", "2020", "--window: has no complete usage; give a time between 2026-10-01T00"),
        ("--to", "2026-10-02", "--from: is missing; give it with `to`"),
        ("--top", "-1", "--top: "),
        ("--format", "xml", "--format"),
    ],
)
def test_a_mistake_is_named_with_its_option(
    store: str, capsys: pytest.CaptureFixture[str], option: str, value: str, message: str
) -> None:
    assert main(["capacity", "forecast", "--store", store, option, value]) == 2
    assert message in capsys.readouterr().err
