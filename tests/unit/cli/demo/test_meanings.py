"""What stands in the demo's tables is said where users look: in its help and in the README."""

from pathlib import Path

import pytest

from gpuledger_cli.command import main
from gpuledger_cli.demo.run_bill import COLUMNS
from gpuledger_cli.demo.tables import BILL_COLUMNS, LIVE_COLUMNS, LIVE_ROWS, SUMMARY_COLUMNS

README = Path(__file__).parents[4] / "README.md"


def test_the_help_says_what_every_name_means(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    meanings = LIVE_COLUMNS | LIVE_ROWS | SUMMARY_COLUMNS | BILL_COLUMNS
    for name, meaning in meanings.items():
        assert f"{name}: {meaning}" in shown


def test_the_readme_has_a_row_for_every_name_of_the_tables_that_it_shows() -> None:
    text = README.read_text()
    shown = LIVE_COLUMNS | LIVE_ROWS | BILL_COLUMNS
    for name in shown:
        assert any(f"`{name}`" in line for line in text.splitlines() if line.startswith("|")), name
    assert [name for name in SUMMARY_COLUMNS if f"`{name}`" in text] == []


def test_no_name_has_two_meanings() -> None:
    """Of two tables one below the other, each column says what it counts."""
    assert not SUMMARY_COLUMNS.keys() & BILL_COLUMNS.keys()
    assert {column.name for column in COLUMNS} == {"Owner", *BILL_COLUMNS}
    assert not {"unused", "used", "held"} & (SUMMARY_COLUMNS | BILL_COLUMNS).keys()
