"""Rows of a query on a terminal of any width: no value is ever cut."""

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from gpuledger_cli.__main__ import main
from gpuledger_cli.query import print_rows
from tests.tables import for_each
from tests.unit.reports.stores import allocated, inventory_row, write_store

COLUMNS = ["namespace", "cost"]
ROWS = [["research", "2834.5600"], ["a-namespace-with-a-rather-long-name", "13300.00"]]


def printed(*, width: int | None = None, expanded: bool | None = None) -> str:
    out = io.StringIO()
    print_rows(out, COLUMNS, ROWS, expanded=expanded, width=width)
    return out.getvalue()


@given(width=st.none() | st.integers(1, 200), expanded=st.sampled_from([True, False, None]))
def test_every_value_is_shown_in_full_at_any_width(
    *, width: int | None, expanded: bool | None
) -> None:
    text = printed(width=width, expanded=expanded)
    assert [cell for row in ROWS for cell in row if cell not in text] == []


def test_rows_wider_than_the_terminal_are_expanded_and_others_are_a_table() -> None:
    narrow = printed(width=40)
    assert narrow.splitlines()[:3] == [
        "-[ RECORD 1 ]+-",
        "namespace | research",
        "cost      | 2834.5600",
    ]
    assert printed(width=120) == printed(width=120, expanded=False) == printed()
    assert "RECORD" not in printed()


WIDE = ["pod", "note", "cost", "cpu"]
WIDE_ROWS = [
    ["train-0", "its nodes lack memory, so it waits", "2834.5600", "24"],
    ["train-1", "https://example.test/a-word-of-more-than-16-characters", "1.5", ""],
]


@given(width=st.integers(1, 120))
def test_a_table_that_is_too_wide_wraps_and_then_omits_columns_but_cuts_no_value(
    width: int,
) -> None:
    out = io.StringIO()
    omitted = print_rows(
        out, WIDE, WIDE_ROWS, expanded=None, width=width, wrapped=[1], droppable=[3, 2]
    )
    text = out.getvalue()
    assert omitted in ([], [3], [3, 2])
    for row in WIDE_ROWS:
        for at, cell in enumerate(row):
            assert at == 1 or cell == "" or (cell in text) == (at not in omitted)
    assert "…" not in text
    assert "RECORD" in text or all(cell_len(line) <= width for line in text.splitlines())
    notes = text.replace("│", " ").split()
    assert all(word in notes for word in WIDE_ROWS[0][1].split())


@for_each(
    "width, omitted, form",
    [
        (120, [], "table"),
        (60, [], "table"),
        (45, [3], "table"),
        (40, [3, 2], "table"),
        (20, [], "records"),
    ],
)
def test_a_table_omits_only_the_columns_for_which_there_is_no_room(
    width: int, omitted: list[int], form: str
) -> None:
    out = io.StringIO()
    found = print_rows(
        out, WIDE, WIDE_ROWS, expanded=None, width=width, wrapped=[1], droppable=[3, 2]
    )
    assert found == omitted
    assert ("RECORD" in out.getvalue()) == (form == "records")


def test_the_option_overrides_the_width() -> None:
    assert printed(width=120, expanded=True) == printed(width=40)
    assert printed(width=40, expanded=False) == printed()


def test_the_further_lines_of_a_value_are_below_its_first_one() -> None:
    out = io.StringIO()
    print_rows(out, ["a", "long"], [["one\ntwo", "[x]"]], expanded=True)
    assert out.getvalue().splitlines()[1:] == ["a    | one", "     | two", "long | [x]"]


def test_the_store_and_its_options_come_from_the_environment_of_the_components(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = write_store(tmp_path, usage_hourly=[allocated(0, "a")], inventory=[inventory_row()])
    monkeypatch.setenv("GPULEDGER_STORE__URI", store)
    monkeypatch.setenv("GPULEDGER_STORE__STORAGE_OPTIONS", "{timeout: 5s}")
    assert main(["query", "SELECT count(*) AS n FROM usage_hourly", "--format", "csv"]) == 0
    assert capsys.readouterr().out.split() == ["n", "1"]
    monkeypatch.setenv("GPULEDGER_STORE__STORAGE_OPTIONS", "5s")
    assert main(["query", "SELECT 1"]) == 2
    assert "GPULEDGER_STORE__STORAGE_OPTIONS" in capsys.readouterr().err


def test_only_tables_can_be_expanded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["query", "SELECT 1", "--store", "s", "--format", "csv", "--expanded"]) == 2
    assert "--expanded: only for --format table" in capsys.readouterr().err
