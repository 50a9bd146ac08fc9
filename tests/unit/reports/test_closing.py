"""Closed bills do not change; later changes are correction lines."""

import csv
import io
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.errors import UserError
from gpuledger.store.bill_table import BILL_LINES, append_revision
from gpuledger_cli.command import main
from gpuledger_reports.api.answering import AnswerSettings, answer_to
from gpuledger_reports.api.questions import BillQuestion, ExplainQuestion
from gpuledger_reports.pricing.billing import Bill
from gpuledger_reports.pricing.closing import (
    ClosedLine,
    close,
    closed_lines,
    revision_rows,
    standing_bill,
)
from gpuledger_reports.pricing.rows import COSTS, NUMBERS, row_of
from gpuledger_reports.reading.times import DAY_US, Window
from tests.examples import examples
from tests.unit.reports.api.report_requests import settings_for
from tests.unit.reports.stores import (
    BEGIN_US,
    HOUR_NS,
    Row,
    allocated,
    inventory_row,
    pod_row,
    used,
    write_store,
)
from tests.unit.reports.test_bill import POLICIES, bill_of, store_of
from tests.unit.reports.test_charging import rows_of_hours

PRICES = "prices: [{name: h100, model: H100, per_gpu_hour: 7}]\n"
DAY = Window(BEGIN_US, BEGIN_US + DAY_US)


@pytest.fixture
def store(tmp_path: Path) -> str:
    """Return a store of a day in which every hour is covered."""
    return write_store(
        tmp_path / "store",
        usage_hourly=[allocated(hour, "a" if hour < 20 else None) for hour in range(24)],
        inventory=[inventory_row()],
        pods=[pod_row("a")],
    )


@pytest.fixture
def arguments(store: str, tmp_path: Path) -> list[str]:
    (tmp_path / "prices.yaml").write_text(PRICES)
    prices = str(tmp_path / "prices.yaml")
    return ["--store", store, "--period", "2026-10-01", "--by", "pod", "--prices", prices]


def test_a_late_hour_after_the_close_causes_corrections_that_sum_to_the_difference(
    store: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bill", "close", *arguments]) == 0
    assert "revision 1: 2 lines, 168.00" in capsys.readouterr().out
    # A second GPU, whose rows arrive after the close.
    write_store(
        Path(store),
        usage_hourly=[
            allocated(3, "b", gpu="GPU-b"),
            used(3, "b", HOUR_NS, gpu="GPU-b"),
        ],
    )
    assert main(["bill", "--recompute", *arguments]) == 0
    assert "closed as revision 1; the cost has changed by 7.00" in capsys.readouterr().err
    assert main(["bill", "close", *arguments]) == 0
    assert (
        "revision 2: 1 correction lines, net 7.00 USD, gross 7.00 USD; new total 175.00 USD"
        in capsys.readouterr().out
    )
    closed = closed_lines(store, DAY, ["pod"])
    assert sorted((each.revision, each.charge_class or "", each.cost) for each in closed) == [
        (1, "", Decimal(28)),
        (1, "", Decimal(140)),
        (2, "correction", Decimal(7)),
    ]
    assert closed[-1].supersedes == 1
    assert main(["bill", "close", *arguments]) == 0
    assert "nothing has changed" in capsys.readouterr().out


def test_a_line_that_the_last_closing_did_not_change_has_its_prices(
    store: str, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def explained() -> str:
        capsys.readouterr()
        assert main(["bill", "explain", line, *arguments]) == 0
        return capsys.readouterr().out

    main(["bill", "close", *arguments])
    line = next(
        each.line for each in closed_lines(store, DAY, ["pod"]) if each.key.values == ("a",)
    )
    # A price for other GPUs, and a late GPU that changes another line.
    prices = tmp_path / "prices.yaml"
    prices.write_text(PRICES.replace("[", "[{name: l4, model: L4, per_gpu_hour: 1}, "))
    write_store(Path(store), usage_hourly=[allocated(3, "b", gpu="GPU-b")])
    assert "closed with other prices" in explained()
    main(["bill", "close", *arguments])
    assert "closed with other prices" not in explained()


def test_a_closed_period_shows_the_closed_bill_whatever_its_cost_now(
    store: str, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def written(*options: str) -> tuple[list[dict[str, str]], str]:
        assert main(["bill", *arguments, "--format", "csv", *options]) == 0
        captured = capsys.readouterr()
        rows = list(csv.DictReader(io.StringIO(captured.out)))
        of_bill = {(row.pop("state"), row.pop("revision")) for row in rows}
        assert of_bill in ({("provisional", "")}, {("closed", "1")}, {("closed", "2")})
        return rows, captured.err

    before, _ = written()
    main(["bill", "close", *arguments])
    capsys.readouterr()
    # Another price, and a GPU whose rows arrive late.
    (tmp_path / "prices.yaml").write_text(PRICES.replace("7", "9"))
    write_store(Path(store), usage_hourly=[allocated(3, "b", gpu="GPU-b")])
    after, message = written()
    assert after == before
    assert "closed as revision 1 at" in message
    restarted, message = written("--recompute")
    assert restarted != before
    assert "changed by 57.00" in message
    main(["bill", "close", *arguments])
    capsys.readouterr()
    assert written()[0] == restarted
    assert "the cost has not changed" in written("--recompute")[1]


@pytest.mark.parametrize(
    ("format_", "words"),
    [
        ("table", "closed, in USD"),
        ("json", '"state": "closed"'),
        ("csv", "140.00"),
        ("focus", "140.00"),
        ("html", "closed as revision 1"),
    ],
)
def test_a_closed_period_is_shown_in_every_format(
    arguments: list[str], format_: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["bill", "close", *arguments])
    capsys.readouterr()
    assert main(["bill", *arguments, "--format", format_]) == 0
    assert words in capsys.readouterr().out


@examples(10)
@given(first=rows_of_hours(), late=rows_of_hours(), policy=st.sampled_from(POLICIES))
def test_revisions_sum_to_the_bill_at_the_time_of_the_last_one(
    first: list[Row], late: list[Row], policy: str
) -> None:
    with TemporaryDirectory() as folder:
        store = write_store(Path(folder), usage_hourly=first, inventory=[inventory_row()])
        closed: list[ClosedLine] = []
        for number, rows in enumerate([[], late], 1):
            write_store(Path(folder), usage_hourly=rows)
            bill = bill_of(store, policy, by=["pod", "gpu"])
            if added := revision_rows(bill, closed, closed_time_us=number):
                append_revision(store, added, stream="bill", revision=added[0]["revision"])
            closed = closed_lines(store, bill.window, bill.by)
            standing = standing_bill(
                closed, window=bill.window, by=bill.by, policy=bill.policy.policy
            )
            assert shown_rows(standing) == shown_rows(bill)
            assert standing.data_coverage_ratio == bill.data_coverage_ratio or not added


def shown_rows(bill: Bill) -> list[dict[str, object]]:
    """Return the rows of lines with an amount, with the displayed digits."""
    rows = [row_of(bill, line) for line in bill.lines]
    return [row for row in rows if any(row[name] for name in (*NUMBERS, *COSTS))]


def test_an_explanation_shows_every_revision_of_a_line(
    store: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["bill", "close", *arguments])
    write_store(Path(store), usage_hourly=[allocated(3, "a", gpu="GPU-b")])
    main(["bill", "close", *arguments])
    line = next(each.line for each in closed_lines(store, DAY, ["pod"]) if each.charge_class)
    capsys.readouterr()
    assert main(["bill", "explain", line, *arguments]) == 0
    explained = capsys.readouterr().out
    assert "revision 1: closed 140.00 USD" in explained
    assert "revision 2: correction 7.00 USD" in explained


def test_remarks_belong_to_the_revision_with_which_they_were_given(
    store: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bill", "close", *arguments, "--approved-by", "Ada"]) == 0
    write_store(Path(store), usage_hourly=[allocated(3, "a", gpu="GPU-b")])
    assert main(["bill", "close", *arguments, "--note", "[late] usage"]) == 0
    capsys.readouterr()
    assert main(["bill", "close", *arguments, "--note", "again"]) == 0
    assert "--note and --approved-by are not stored" in capsys.readouterr().out
    assert main(["bill", *arguments, "--format", "json"]) == 0
    revisions = json.loads(capsys.readouterr().out)["revisions"]
    assert [(each["revision"], each["note"], each["approved_by"]) for each in revisions] == [
        (1, None, "Ada"),
        (2, "[late] usage", None),
    ]
    (line, *_) = (each.line for each in closed_lines(store, DAY, ["pod"]) if each.charge_class)
    assert main(["bill", "explain", line, *arguments]) == 0
    first, approved, second, note, *_ = capsys.readouterr().out.splitlines()
    assert (first[:11], approved) == ("revision 1:", "  approved by: Ada")
    assert (second[:11], note) == ("revision 2:", "  note: [late] usage")


@pytest.mark.parametrize("option", ["--note", "--approved-by"])
def test_a_remark_is_one_line(
    arguments: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bill", "close", *arguments, option, "a\nb"]) == 2
    assert option in capsys.readouterr().err


def test_a_line_that_was_closed_with_another_id_is_explained_by_both_ids(
    store: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """An older version closed it."""
    made = bill_of(store, PRICES, hours=24)
    close(replace(made, lines=[replace(line, id=f"0{line.id}") for line in made.lines]), store)
    (line,) = (line.id for line in made.lines if line.values == ("a",))
    explained = set()
    for id_ in (line, f"0{line}"):
        assert main(["bill", "explain", id_, *arguments]) == 0
        explained.add(capsys.readouterr().out)
    (text,) = explained
    assert "revision 1: closed 140.00 USD" in text
    assert f"line {line}: pod a" in text


def test_a_line_that_no_longer_exists_is_corrected_to_zero(tmp_path: Path) -> None:
    before = bill_of(store_of(tmp_path / "before", allocated(0, "a")))
    after = bill_of(store_of(tmp_path / "after", allocated(0, "b")))
    first = revision_rows(before, [], closed_time_us=0)
    assert [(row["revision"], row["supersedes"], row["cost"]) for row in first] == [(1, None, 7)]
    store = str(tmp_path / "closed")
    append_revision(store, first, stream="bill", revision=1)
    closed = closed_lines(store, before.window, before.by)
    second = revision_rows(after, closed, closed_time_us=0)
    assert sorted(row["cost"] for row in second) == [-7, 7]
    assert {row["charge_class"] for row in second} == {"correction"}


def test_the_second_of_two_concurrent_closes_is_rejected(tmp_path: Path) -> None:
    rows = revision_rows(bill_of(store_of(tmp_path, allocated(0, "a"))), [], closed_time_us=0)
    append_revision(str(tmp_path), rows, stream="bill", revision=1)
    with pytest.raises(UserError, match="revision 1"):
        append_revision(str(tmp_path), rows, stream="bill", revision=1)


def test_concurrent_first_closes_share_one_table_and_only_one_succeeds(
    tmp_path: Path,
) -> None:
    rows = revision_rows(bill_of(store_of(tmp_path, allocated(0, "a"))), [], closed_time_us=0)

    def close_it(_: int) -> str:
        try:
            append_revision(str(tmp_path), rows, stream="bill", revision=1)
        except UserError as error:
            return str(error)[:10]
        return "closed"

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(close_it, range(4))) == ["closed", *["revision 1"] * 3]


def test_a_bill_is_corrected_in_the_currency_in_which_it_was_closed(tmp_path: Path) -> None:
    store = store_of(tmp_path, allocated(0, "a"))
    close(bill_of(store, "currency: EUR\n" + PRICES, hours=1), store)
    with pytest.raises(UserError, match="closed in EUR"):
        close(bill_of(store, PRICES.replace("7", "8"), hours=1), store)


def test_prices_in_another_currency_correct_a_bill_by_their_exchange_rate(tmp_path: Path) -> None:
    """As the message of the rejection and docs/guides/close-a-month.md recommend."""
    store = store_of(tmp_path, allocated(0, "a"))
    close(bill_of(store, "currency: EUR\n" + PRICES, hours=1), store)
    dollars = (
        "currency: EUR\nexchange_rates: [{currency: USD, rate: 0.9, from: 2020-01-01}]\n"
        "prices: [{name: h100, model: H100, per_gpu_hour: 8, currency: USD}]"
    )
    (correction,) = close(bill_of(store, dollars, hours=1), store)
    assert (correction["cost"], correction["currency"]) == (Decimal("0.20"), "EUR")


def test_a_move_between_lines_is_a_change_and_can_be_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A late name does not change the sum of the bill, and empties a line."""
    late = [
        allocated(h, None, allocated_pod_uid="uid-x", allocated_pod_state="pending")
        for h in range(24)
    ]
    store = write_store(tmp_path / "store", usage_hourly=late, inventory=[inventory_row()])
    (tmp_path / "prices.yaml").write_text(PRICES)
    prices = str(tmp_path / "prices.yaml")
    arguments = ["--store", store, "--period", "2026-10-01", "--prices", prices]
    assert main(["bill", "close", *arguments]) == 0
    write_store(Path(store), pods=[pod_row("x", namespace="late")])
    capsys.readouterr()
    assert main(["bill", *arguments, "--recompute"]) == 0
    assert "changed by 0.00 USD in 2 lines" in capsys.readouterr().err
    capsys.readouterr()
    assert main(["bill", "close", *arguments]) == 0
    assert "2 correction lines, net 0.00 USD, gross 336.00 USD" in capsys.readouterr().out
    closed = closed_lines(store, DAY, ["namespace"])
    (gone,) = (each.line for each in closed if each.cost < 0)
    capsys.readouterr()
    assert main(["bill", "explain", gone, *arguments]) == 0
    assert "revision 2: correction -168" in capsys.readouterr().out


def test_the_service_can_explain_a_line_that_it_shows_as_closed(tmp_path: Path) -> None:
    """Even if the line no longer has any cost."""
    late = [
        allocated(h, None, allocated_pod_uid="uid-x", allocated_pod_state="pending")
        for h in range(24)
    ]
    store = write_store(tmp_path / "store", usage_hourly=late, inventory=[inventory_row()])
    prices = tmp_path / "prices.yaml"
    prices.write_text(PRICES)
    arguments = ["--store", store, "--period", "2026-10-01", "--prices", str(prices)]
    assert main(["bill", "close", *arguments]) == 0
    write_store(Path(store), pods=[pod_row("x", namespace="late")])
    settings = settings_for(store, prices=prices)
    question = BillQuestion(window=DAY, by=("namespace",))
    (shown,) = json.loads(answer_to(question, settings).body)["lines"]
    requested = ExplainQuestion(bill=question, line=shown["line"], rows=1)
    explained = json.loads(answer_to(requested, settings).body)
    assert (explained["line"], explained["cost"]) == (shown["line"], "0.00")
    assert explained["namespace"] == shown["namespace"]
    assert explained["explanation"][0].startswith("revision 1: closed 168.00 USD")
    assert "no longer in the bill" in explained["explanation"][-1]
    refused = answer_to(ExplainQuestion(bill=question, line="zz", rows=1), settings)
    assert refused.status == 400
    assert "--" not in json.loads(refused.body)["message"]


@pytest.mark.parametrize(
    ("usage", "prices", "reason"),
    [
        ([allocated(3, "a")], PRICES, "no usage up to the end"),
        ([allocated(h, "a", gpu="GPU-b") for h in range(24)], PRICES, "the inventory lacks: 1"),
        ([allocated(23, "a"), used(23, "a", 1)], PRICES, "min_data_coverage_ratio"),
        ([allocated(hour, "a") for hour in range(24)], "prices: []", "no price for H100"),
    ],
)
def test_a_period_with_missing_data_or_prices_is_not_closed(
    tmp_path: Path,
    usage: list[dict[str, object]],
    prices: str,
    reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = write_store(tmp_path / "store", usage_hourly=usage, inventory=[inventory_row()])
    file = tmp_path / "prices.yaml"
    file.write_text(prices)
    arguments = ["--store", store, "--period", "2026-10-01", "--prices", str(file)]
    assert main(["bill", "close", *arguments]) == 1
    assert reason in capsys.readouterr().err
    assert closed_lines(store, DAY, ["namespace"]) == []


def test_the_page_has_the_columns_of_the_table() -> None:
    page = (Path(__file__).parents[3] / "docs/reference/bill-columns.md").read_text()
    table = page.partition("<!-- bill_lines:begin -->")[2].partition("<!-- bill_lines:end -->")[0]
    rows = [line.split("|")[1:4] for line in table.strip().splitlines()[2:]]
    assert [(name.strip(" `"), null.strip()) for name, _, null in rows] == [
        (column.name, "yes" if column.nullable else "") for column in BILL_LINES.columns
    ]


def answer_settings(store: str, folder: Path, *, memory_bytes: int = 256 * 2**20) -> AnswerSettings:
    prices = str(folder / "prices.yaml")
    return AnswerSettings(
        store_uri=store, storage_options={}, prices=prices, memory_bytes=memory_bytes
    )


def test_a_closed_period_has_the_memory_limit_of_an_open_one(
    store: str, arguments: list[str], tmp_path: Path
) -> None:
    main(["bill", "close", *arguments])
    question = BillQuestion(window=DAY, by=("pod",))
    tight = answer_to(question, answer_settings(store, tmp_path, memory_bytes=200_000))
    assert (tight.status, json.loads(tight.body)["parameter"]) == (400, "period")


def test_the_service_shows_a_closed_period_like_the_command(
    store: str, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = answer_settings(store, tmp_path)
    question = BillQuestion(window=DAY, by=("pod",))
    assert json.loads(answer_to(question, settings).body)["state"] == "provisional"
    main(["bill", "close", *arguments])
    write_store(Path(store), usage_hourly=[allocated(3, "b", gpu="GPU-b")])
    capsys.readouterr()
    main(["bill", *arguments, "--format", "json"])
    answered = json.loads(answer_to(question, settings).body)
    assert answered == json.loads(capsys.readouterr().out)
    assert (answered["state"], answered["revision"]) == ("closed", 1)


def test_two_lines_with_the_same_id_are_both_closed(store: str) -> None:
    """Ids are short, and users choose names."""
    made = bill_of(store, PRICES, hours=24)
    bill = replace(made, lines=[replace(line, id="c55a851b8b23") for line in made.lines])
    rows = close(bill, store)
    assert sum(row["cost"] for row in rows) == bill.line_cost
    closed = closed_lines(store, bill.window, bill.by)
    stands = standing_bill(closed, window=bill.window, by=bill.by, policy=bill.policy.policy)
    assert [line.key for line in stands.lines] == [line.key for line in bill.lines]
    assert stands.line_cost == bill.line_cost
    assert not close(bill, store)
