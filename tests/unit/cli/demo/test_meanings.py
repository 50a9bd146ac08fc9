"""What stands in the demo's tables is said where users look: in its help and in the README."""

from pathlib import Path

import pytest

from cli.command import main
from cli.demo.tables import LIVE_COLUMNS, LIVE_ROWS, SUMMARY_COLUMNS

README = Path(__file__).parents[4] / "README.md"


def test_the_help_says_what_every_name_means(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name, meaning in (LIVE_COLUMNS | LIVE_ROWS | SUMMARY_COLUMNS).items():
        assert f"{name}: {meaning}" in shown


def test_the_readme_has_a_row_for_every_name() -> None:
    text = README.read_text()
    for name in LIVE_COLUMNS | LIVE_ROWS | SUMMARY_COLUMNS:
        assert any(f"`{name}`" in line for line in text.splitlines() if line.startswith("|")), name
