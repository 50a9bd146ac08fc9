"""`gpuledger bill` as users run it: formats, exit codes, errors in one line."""

import html
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import duckdb
import pytest
from arro3.core import Array, DataType, Table
from deltalake import DeltaTable, write_deltalake

from gpuledger.store.commits import describe
from gpuledger_cli.bill import MADE, BillOf
from gpuledger_cli.command import OWN_ERROR, main
from gpuledger_reports.pricing.totals import BillTally, UnbalancedBillError
from gpuledger_reports.reading.times import time_text
from tests.unit.reports.stores import (
    BEGIN_US,
    HOUR_NS,
    HOUR_US,
    allocated,
    inventory_row,
    pod_row,
    used,
    write_store,
)
from tests.unit.reports.test_bill import bill_of

PRICES = "prices: [{name: h100, model: H100, per_gpu_hour: 7}]\n"


@pytest.fixture
def store(tmp_path: Path) -> str:
    return write_store(
        tmp_path / "store",
        usage_hourly=[
            allocated(0, "a", busy_ns=HOUR_NS // 2),
            used(0, "a", HOUR_NS // 2),
            allocated(1, "b"),
            allocated(2, None),
        ],
        inventory=[inventory_row()],
        pods=[pod_row("a", owner_kind="Job", owner_name="train")],
    )


@pytest.fixture
def prices(tmp_path: Path) -> str:
    file = tmp_path / "prices.yaml"
    file.write_text(PRICES)
    return str(file)


def test_a_time_relative_to_now_is_in_whole_hours(
    store: str, prices: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last week has no usage, because the store's usage is only of 2026-10-01."""
    arguments = ["--from", "-7d", "--to", "now", "--prices", prices, "--format", "json"]
    code = main(["bill", "--store", store, *arguments])
    assert "whole hours" not in capsys.readouterr().err
    assert code in (0, 4)


def test_a_period_without_an_end_ends_where_usage_is_complete(
    store: str, prices: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bill", "--store", store, "--prices", prices, "--format", "json"]
    assert main([*arguments, "--from", "2026-10-01T01:00:00Z"]) == 0
    bill = json.loads(capsys.readouterr().out)
    assert (bill["from"], bill["to"]) == ("2026-10-01T01:00:00Z", "2026-10-01T03:00:00Z")
    assert bill["line_cost"] == "14.00"
    assert main([*arguments, "--from", "2026-10-05T01:00:00Z"]) == 4
    assert "usage is complete up to 2026-10-01T03:00:00Z only" in capsys.readouterr().err


def test_now_is_the_end_of_the_current_hour(
    store: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = (BEGIN_US + 2 * HOUR_US) * 1000 + HOUR_NS // 2
    monkeypatch.setattr("gpuledger_cli.bill.time.time_ns", lambda: now_ns)
    arguments = ["bill", "--store", store, "--from", "-3h", "--to", "now", "--format", "json"]
    assert main(arguments) == 0
    bill = json.loads(capsys.readouterr().out)
    assert (bill["from"], bill["to"]) == ("2026-10-01T00:00:00Z", "2026-10-01T03:00:00Z")


def test_an_internal_error_is_one_line_with_its_own_exit_code(
    store: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: BillTally) -> None:
        raise UnbalancedBillError("lines of 7 for asset cost of 14")

    monkeypatch.setattr(BillTally, "check_balance", fail)
    assert main(["bill", "--store", store]) == OWN_ERROR
    error = capsys.readouterr().err
    assert error.startswith("gpuledger: internal error")
    assert error.count("\n") == 1


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_bytes(b"PAR1")])
def test_an_unreadable_file_of_the_store_is_one_line_and_a_retryable_exit_code(
    store: str,
    prices: str,
    damage: Callable[[Path], object],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By the exit code a CronJob retries; 1 would mean that the month cannot be closed."""
    for file in (Path(store) / "usage_hourly").rglob("*.parquet"):
        damage(file)
    arguments = ["--store", store, "--period", "2026-10", "--prices", prices]
    for command in (["bill"], ["bill", "close"]):
        assert main([*command, *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("gpuledger: cannot read the store")
        assert error.count("\n") == 1


@pytest.mark.parametrize("name", ["inventory", "pods", "usage_hourly"])
def test_a_table_of_the_same_name_with_other_columns_is_one_line(
    store: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(Path(store) / name)
    other = Table.from_pydict({"cluster": Array(["eu"], type=DataType.utf8())})
    write_deltalake(str(Path(store) / name), other)
    assert main(["bill", "--store", store]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"gpuledger: the table {name} lacks ")
    assert "node" in error
    assert error.count("\n") == 1


def test_an_impossible_period_is_rejected_immediately(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--from", "2016-01-01T00:00:00Z", "--to", "2027-01-01T00:00:00Z"]
    assert main(["bill", "--store", store, *arguments]) == 2
    assert "--from: is more than 3660 days" in capsys.readouterr().err
    assert main(["bill", "--store", store, "--period", "\u0662\u0660\u0662\u0666-10"]) == 2


def test_json_has_the_content_of_the_bill_with_costs_as_strings(
    store: str, prices: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bill", "--store", store, "--period", "2026-10", "--by", "namespace,pod"]
    assert main([*arguments, "--prices", prices, "--format", "json"]) == 0
    written = capsys.readouterr().out
    bill = json.loads(written, parse_float=Decimal)
    assert [(line["pod"], line["cost"], line["idle_kind"]) for line in bill["lines"]] == [
        ("__idle__", "7.00", "idle"),
        ("a", "7.00", None),
        ("b", "7.00", None),
    ]
    line = bill["lines"][1]
    assert (line["allocated_gpu_seconds"], line["used_gpu_seconds"]) == (3600, 1800)
    assert line["unused_cost"] == "3.50"
    assert (bill["currency"], bill["asset_cost"], bill["line_cost"]) == ("USD", "21.00", "21.00")
    assert (bill["state"], bill["usage_until"]) == ("open", "2026-10-01T03:00:00Z")
    assert bill["data_coverage_ratio"] == 1
    assert main([*arguments, "--prices", prices, "--format", "json"]) == 0
    assert capsys.readouterr().out == written


def test_without_options_the_newest_month_is_billed_at_example_prices(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bill", "--store", store]) == 0
    printed = capsys.readouterr()
    assert "2026-10-01T00:00:00Z to 2026-11-01T00:00:00Z" in printed.out
    assert "built-in example prices" in printed.out
    message = "usage is complete up to 2026-10-01T03:00:00Z only; the bill goes no further"
    assert message in printed.err


def test_csv_and_parquet_have_the_same_lines(
    store: str, prices: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bill", "--store", store, "--prices", prices, "--by", "owner"]
    csv, parquet = tmp_path / "bill.csv", tmp_path / "bill.parquet"
    assert main([*arguments, "--format", "csv", "--output", str(csv)]) == 0
    assert main([*arguments, "--format", "parquet", "--output", str(parquet)]) == 0
    with duckdb.connect() as connection:
        rows = connection.execute(
            "SELECT owner, cost, (typeof(cost), typeof(period_begin)) FROM read_parquet(?)"
            " WHERE period_end = '2026-11-01T00:00:00Z' AND state = 'open' AND revision IS NULL"
            " ORDER BY ALL",
            [str(parquet)],
        ).fetchall()
    lines = [line.split(",") for line in csv.read_text().splitlines()]
    head = lines[0]
    in_csv = sorted((line[1], Decimal(line[head.index("cost")])) for line in lines[1:])
    assert in_csv == [(owner, cost) for owner, cost, *_ in rows]
    assert {kinds for *_, kinds in rows} == {("DECIMAL(38,2)", "TIMESTAMP WITH TIME ZONE")}
    assert ("Job/train", Decimal("7.00")) in in_csv
    of_bill = ("2026-10-01T00:00:00Z", "2026-11-01T00:00:00Z", "open", "")
    assert {tuple(line[-4:]) for line in lines[1:]} == {of_bill}
    assert head[-4:] == ["period_begin", "period_end", "state", "revision"]


def test_the_command_on_a_page_explains_a_line_of_that_page(
    store: str, prices: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "bill.html"
    arguments = ["--store", store, "--prices", prices, "--by", "pod"]
    assert main(["bill", *arguments, "--format", "html", "--output", str(page)]) == 0
    written = page.read_text()
    (command,) = re.findall(r'id="command">([^<]+)<', written)
    (_, line) = re.findall(r">(a|b)</bdi>.*?class=\"line\">(\w+)<", written, re.DOTALL)[0]
    program, *requested = shlex.split(html.unescape(command))
    assert program == "gpuledger"
    assert main([line if word == "LINE" else word for word in requested]) == 0
    assert "price h100: 7 USD per GPU h" in capsys.readouterr().out


def test_the_page_of_last_month_contains_the_dates_for_later_readers(store: str) -> None:
    made = bill_of(store)
    requested = BillOf(store=store, period="lastmonth").arguments(made)
    begin, end = map(time_text, made.window)
    assert requested == ["--store", store, "--from", begin, "--to", end, "--by", "pod"]


def test_a_page_has_no_value_of_a_storage_option(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bill", "--store", store, "--format", "html"]
    assert main([*arguments, "--storage-option", "AWS_SECRET_ACCESS_KEY=s3cr3t"]) == 0
    page = capsys.readouterr().out
    assert "AWS_SECRET_ACCESS_KEY=..." in page
    assert "s3cr3t" not in page


def test_without_its_libraries_a_page_is_one_line_with_the_remedy(store: str) -> None:
    code = (
        "import sys; sys.modules['vl_convert'] = None; from gpuledger_cli.command import main;"
        " sys.exit(main(sys.argv[1:]))"
    )
    argv = [sys.executable, "-c", code, "bill", "--store", store, "--format", "html"]
    ran = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    (line,) = ran.stderr.splitlines()
    assert [word for word in ("vl_convert", "-r requirements/html.lock") if word not in line] == []


def test_a_line_is_explained_down_to_its_price_and_its_events(
    store: str, prices: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--store", store, "--prices", prices, "--by", "pod"]
    main(["bill", *arguments, "--format", "json"])
    (line,) = (
        line["line"] for line in json.loads(capsys.readouterr().out)["lines"] if line["pod"] == "a"
    )
    assert main(["bill", "explain", line, *arguments]) == 0
    explained = capsys.readouterr().out
    assert "1 GPU h x 7 = 7" in explained
    assert "price h100: 7 USD per GPU h" in explained
    assert "GPU-a a allocated 3600  partition 3, offsets 0 to 9" in explained
    assert "GPU-a a used 1800  partition 3, offsets 0 to 9" in explained
    assert "all 2 rows: allocated 3600 s, used 1800 s" in explained
    # As over HTTP: a unique prefix is enough.
    assert main(["bill", "explain", line[:8], *arguments]) == 0
    assert capsys.readouterr().out == explained


@pytest.mark.parametrize(("model", "named"), [("H100", "H100"), (None, "__unallocated__")])
def test_gpus_without_a_price_have_their_own_exit_code_and_get_the_suggested_price(
    tmp_path: Path, model: str | None, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    usage, inventory = [allocated(0, "a", model=model)], [inventory_row(model=model)]
    store = write_store(tmp_path / "store", usage_hourly=usage, inventory=inventory)
    prices = tmp_path / "prices.yaml"
    prices.write_text("prices: []\n")
    requested = ["bill", "--store", store, "--prices", str(prices)]
    assert main(requested) == 3
    error = capsys.readouterr().err
    assert f"no price for {named}: 1.0 GPU-hours" in error
    (suggested,) = re.findall(r"such as (\{.*\})", error)
    prices.write_text(f"prices: [{suggested}]\n")
    assert main(requested) == MADE
    assert "Sum of line items 2.50" in capsys.readouterr().out


def test_a_period_with_nothing_to_bill_has_its_own_exit_code(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A future period is not an error, and the output shows where usage exists."""
    for period, message in (
        ("2027-01", "nothing to bill: usage is complete up to 2026-10-01T03:00:00Z only"),
        ("2026-09-01", "nothing to bill: usage begins at 2026-10-01T00:00:00Z"),
    ):
        arguments = ["bill", "--store", store, "--period", period, "--format", "json"]
        assert main(arguments) == 4
        printed = capsys.readouterr()
        assert printed.err.splitlines()[-1] == f"gpuledger: {message}"
        bill = json.loads(printed.out)
        assert (bill["asset_cost"], bill["line_cost"]) == ("0.00", "0.00")
        assert bill["usage_until"] == min("2026-10-01T03:00:00Z", bill["to"])


def test_a_period_within_a_gap_of_usage_reports_the_usage_around_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = [allocated(0, "a"), allocated(47, "a")]
    store = write_store(tmp_path, usage_hourly=usage)
    times = ["--from", "2026-10-01T10:00:00Z", "--to", "2026-10-01T11:00:00Z"]
    assert main(["bill", "--store", store, *times]) == 4
    assert "from 2026-10-01T00:00:00Z to 2026-10-03T00:00:00Z" in capsys.readouterr().err


def test_a_store_without_a_complete_minute_asks_for_another_try(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    complete = describe(valid_through={"0": BEGIN_US - 30_000_000})
    store = write_store(tmp_path, properties=complete, usage=[allocated(0, "a")])
    for period in ([], ["--period", "2026-10-01"], ["--period", "2026-09-01"]):
        assert main(["bill", "--store", store, *period]) == 4
        assert capsys.readouterr().err.splitlines()[-1] == (
            "gpuledger: nothing to bill: no minute is complete yet; try again in about two minutes"
        )


def test_check_names_every_error_and_summarizes_a_valid_file(
    prices: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bill", "check", prices]) == 0
    assert "ok: 1 price in USD" in capsys.readouterr().out
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("currency: XXX\nteams:\n- {team: a, match: {nmespace: b}}")
    assert main(["bill", "check", str(wrong)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[2][:6] for line in lines] == ["line 1", "line 3"]


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ("", "a: any GPU: 7 USD per GPU h"),
        ('model: "*H100*"', "a: model *H100*: 7 USD per GPU h"),
        ("model: H100", "a: model H100 (only this whole name; *H100* matches parts): 7"),
        ("product: L4, cluster: eu", "a: product L4, cluster eu: 7"),
        ("from: 2026-10-01, to: 2026-11-01", "a: from 2026-10-01, to 2026-11-01: 7"),
    ],
)
def test_check_lists_each_price_with_its_conditions(
    row: str, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(f"prices: [{{name: a, per_gpu_hour: 7, {row}}}]\n")
    assert main(["bill", "check", str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith(f"  {shown}")


def test_check_lists_teams_and_budgets_and_prices_that_never_apply(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text("""
prices:
- {name: rest, per_gpu_hour: 2}
- {name: h100, product: H100, per_gpu_hour: 3}
teams: [{team: nlp, match: {namespace: "nlp-*"}, from: 2026-10-01}]
budgets:
- {name: october, amount: 500, from: 2026-10-01, to: 2026-11-01, match: {team: nlp}}
""")
    assert main(["bill", "check", str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  rest: any GPU: 2 USD per GPU h",
        "  h100: product H100: 3 USD per GPU h; never applies, because rest precedes it",
        "  team nlp: namespace nlp-*, from 2026-10-01",
        "  budget october: team nlp, from 2026-10-01, to 2026-11-01: 500 USD",
    ]


@pytest.mark.parametrize("text", ["", "currency: EUR\n", "prices: []\n"])
def test_a_file_without_a_price_is_an_error(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(text)
    assert main(["bill", "check", str(file)]) == 1
    assert "prices: missing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--period", "last-year"], ["--period", "lastmonth"]),
        (["--period", "2026-13"], ["--period", "lastmonth"]),
        (["--period", "soon"], ["--period", "lastmonth"]),
        (["--to", "2026-10-01T00:00:00Z"], ["--from", "missing"]),
        (["--from", "-2h", "--to", "-30m"], ["--to", "whole hour", "-30m"]),
        (["--from", "-90m"], ["--from", "whole hour", "-90m"]),
        (["--from", "2026-10-01T00:30:00Z", "--to", "2026-10-01T02:00:00Z"], ["whole hour"]),
        (["--from", "2026-10-01T02:00:00Z", "--to", "2026-10-01T02:00:00Z"], ["--to", "later"]),
        (["--by", "nmespace"], ["--by", "nmespace", "did you mean namespace?"]),
        (["--by", "workload"], ["--by", "workload", "label:KEY"]),
        (["--prices", "/nowhere/prices.yaml"], ["/nowhere/prices.yaml", "No such file"]),
        (["--format", "parquet"], ["--output"]),
        (["--format", "csv", "--sort", "used"], ["--sort", "--format table"]),
        (["--format", "json", "--top", "3"], ["--top", "--format table"]),
        (["--top", "0"], ["--top"]),
        (["--focus-allocations"], ["--focus-allocations", "--format focus"]),
        (["--storage-option", "x"], ["--storage-option", "KEY=VALUE"]),
        (["--storage-option", "=x"], ["--storage-option", "KEY=VALUE"]),
    ],
)
def test_an_invalid_option_is_one_line_with_the_remedy(
    store: str, arguments: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bill", "--store", store, *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert [part for part in parts if part not in line] == []


def test_a_store_without_usage_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bill", "--store", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_an_unknown_line_is_rejected_with_the_way_to_list_lines(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bill", "explain", "zzz", "--store", store]) == 2
    assert "--format json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "reads_them"),
    [
        (["--format", "table"], True),
        (["--format", "json"], True),
        (["--format", "html"], True),
        (["--format", "csv"], False),
        (["--format", "focus"], False),
        (["--format", "parquet", "--output", "FILE"], False),
        (["close"], False),
        (["explain", "LINE"], False),
    ],
)
def test_days_of_budgets_outside_the_period_are_read_only_to_show_budgets(
    store: str, prices: str, tmp_path: Path, command: list[str], *, reads_them: bool
) -> None:
    """Here they cannot be read."""
    (line, *_) = bill_of(store, hours=3, by=["namespace"]).lines
    folder = Path(store) / "usage_hourly"
    kept = {*folder.rglob("*.parquet")}
    write_store(Path(store), usage_hourly=[allocated(-24, "a")])
    for file in {*folder.rglob("*.parquet")} - kept:
        file.unlink()
    budget = "budgets: [{name: x, amount: 1, from: 2026-09-30, to: 2026-10-02}]\n"
    Path(prices).write_text(PRICES + budget)
    times = ["--from", "2026-10-01T00:00:00Z", "--to", "2026-10-01T03:00:00Z"]
    given = {"LINE": line.id, "FILE": str(tmp_path / "bill.parquet")}
    arguments = [given.get(word, word) for word in command]
    code = main(["bill", *arguments, "--store", store, *times, "--prices", prices])
    assert code == (2 if reads_them else 0)


def test_a_label_without_values_is_reported(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bill", "--store", store, "--by", "pod,label:teem"]) == 0
    message = capsys.readouterr().err
    assert "--by label:teem: no line item has a value" in message
    assert "--by pod" not in message


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ([], ["--period", "2026-10", "--prices"]),
        (["--period", "2026-10-01"], ["--prices", "examples"]),
        (["--prices", "prices.yaml"], ["--period", "2026-10"]),
    ],
)
def test_close_requires_a_period_and_a_file_of_prices(
    store: str, given: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bill", "close", "--store", store, *given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert [part for part in parts if part not in line] == []
    assert not (Path(store) / "bill_lines").exists()


def test_close_prints_period_dimensions_and_total(
    store: str, prices: str, capsys: pytest.CaptureFixture[str]
) -> None:
    times = ["--from", "2026-10-01T00:00:00Z", "--to", "2026-10-01T03:00:00Z"]
    arguments = ["bill", "close", "--store", store, *times, "--by", "pod", "--prices", prices]
    assert main(arguments) == 0
    closed = capsys.readouterr().out
    assert "2026-10-01T00:00:00Z to 2026-10-01T03:00:00Z by pod: closed as revision 1" in closed
    assert "3 lines, 21.00 USD" in closed
    assert main(arguments) == 0
    assert "by pod: nothing has changed since it was closed: 21.00 USD" in capsys.readouterr().out


def test_other_commands_start_without_the_libraries_of_bills() -> None:
    code = (
        "import sys; from gpuledger_cli.command import main; main(['cgroup', '--help']);"
        " print([m for m in ('duckdb', 'deltalake', 'reports') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"


def test_a_store_from_the_environment_is_billed_without_arguments(
    store: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPULEDGER_STORE__URI", store)
    assert main(["bill"]) == MADE
    assert "2026-10-01" in capsys.readouterr().out


def test_a_store_without_an_inventory_is_reported(
    store: str, prices: str, capsys: pytest.CaptureFixture[str]
) -> None:
    requested = ["bill", "--store", store, "--prices", prices]
    assert main(requested) == MADE
    assert "inventory" not in capsys.readouterr().err
    DeltaTable(Path(store) / "inventory").delete()
    for _ in ("an empty table", "no table"):
        assert main(requested) == MADE
        output = capsys.readouterr()
        assert "the inventory lacks 1 GPU for 3.0 GPU-hours with samples: GPU-a on n;" in output.err
        assert "restart their agents" in output.err
        assert "data coverage 0 %" in output.out
        shutil.rmtree(Path(store) / "inventory", ignore_errors=True)
