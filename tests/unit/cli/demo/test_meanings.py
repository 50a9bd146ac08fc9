"""The demo's help explains the columns and rows of its tables."""

import pytest

from gpuledger_cli.command import main
from gpuledger_cli.demo.run_bill import bill_columns
from gpuledger_cli.demo.screen import draw
from gpuledger_cli.demo.summary import draw_summary
from gpuledger_cli.demo.tables import BILL_COLUMNS, LIVE_COLUMNS, LIVE_ROWS, SUMMARY_COLUMNS
from gpuledger_cli.demo.totals import Tally
from tests.unit.cli.demo.test_screen import HEADER
from tests.unit.cli.demo.test_summary import SIMULATED


def test_the_help_explains_every_column_and_special_row(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["demo", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for meanings in (LIVE_COLUMNS | LIVE_ROWS, SUMMARY_COLUMNS, BILL_COLUMNS):
        for name, meaning in meanings.items():
            assert f"{name}: {meaning}" in shown


def test_every_explained_column_is_in_its_table() -> None:
    live = draw(Tally(), HEADER, width=160, height=99)[1].text
    assert live.split() == ["GPU", "Pod", *" ".join(LIVE_COLUMNS).split()]
    usage = draw_summary(SIMULATED, width=160)[1].text
    assert usage.split() == ["Pod", *" ".join(SUMMARY_COLUMNS).split(), "Workload"]
    assert [column.name for column in bill_columns("USD")] == ["Workload", *BILL_COLUMNS]


def test_a_column_in_two_tables_has_one_meaning() -> None:
    for name in SUMMARY_COLUMNS.keys() & BILL_COLUMNS.keys():
        assert SUMMARY_COLUMNS[name] == BILL_COLUMNS[name]
