"""docs/xids.md is the catalogue."""

from pathlib import Path

import pytest

from cli import xids_page
from gpuledger.xids import all_xids

ROOT = Path(__file__).parents[3]


def test_the_page_is_what_the_catalogue_says() -> None:
    assert (ROOT / "docs" / "xids.md").read_text() == xids_page.xids_page(), "run `make docs`"


def test_every_class_of_the_catalogue_is_explained() -> None:
    explained = xids_page.xids_page().partition("| XID |")[0]

    assert {xid.category for xid in all_xids() if f"`{xid.category}`" not in explained} == set()


def test_the_page_is_written_where_the_command_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["xids_page", str(tmp_path / "page.md")])

    assert xids_page.main() == 0
    assert (tmp_path / "page.md").read_text() == xids_page.xids_page()


def test_a_page_that_cannot_be_written_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["xids_page", str(tmp_path / "none" / "page.md")])

    assert xids_page.main() == 2
    assert capsys.readouterr().err.count("\n") == 1
