"""The demo's help explains the columns and rows of its tables."""

import pytest

from gpuledger_cli.command import main
from gpuledger_cli.demo.run_bill import COLUMNS
from gpuledger_cli.demo.tables import BILL_COLUMNS, LIVE_COLUMNS, LIVE_ROWS, SUMMARY_COLUMNS


def test_the_help_says_what_every_name_means(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    meanings = LIVE_COLUMNS | LIVE_ROWS | SUMMARY_COLUMNS | BILL_COLUMNS
    for name, meaning in meanings.items():
        assert f"{name}: {meaning}" in shown


def test_no_name_has_two_meanings() -> None:
    """Of two tables one below the other, each column says what it counts."""
    assert not SUMMARY_COLUMNS.keys() & BILL_COLUMNS.keys()
    assert {column.name for column in COLUMNS} == {"Owner", *BILL_COLUMNS}
    assert not {"unused", "used", "held"} & (SUMMARY_COLUMNS | BILL_COLUMNS).keys()
