"""docs/node-metrics.md is what the agent shows of its GPUs, made from the agent's own tables."""

import sys
from itertools import pairwise
from pathlib import Path

import pytest

from cli.node_page import main, node_page

ROOT = Path(__file__).parents[3]


def test_the_committed_page_is_the_generated_one() -> None:
    assert (ROOT / "docs" / "node-metrics.md").read_text() == node_page(), "run `make docs`"


def test_every_row_of_the_page_has_its_columns() -> None:
    page = node_page().splitlines()
    for line, following in pairwise(page):
        if line.startswith("|") and following.startswith("|"):
            assert line.count(" | ") == following.count(" | "), following


def test_the_command_writes_the_page_and_names_a_file_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["node_page", str(tmp_path / "page.md")])
    assert main() == 0
    assert (tmp_path / "page.md").read_text() == node_page()
    monkeypatch.setattr(sys, "argv", ["node_page", str(tmp_path / "missing" / "page.md")])
    assert main() == 2
    assert "missing/page.md" in capsys.readouterr().err
