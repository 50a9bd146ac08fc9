"""Generated files are written into the given directory, or one line explains why not."""

import sys
from pathlib import Path

import pytest

from gpuledger.codegen import generate
from gpuledger.errors import UserError


@pytest.mark.parametrize(("argv", "directory"), [([], "docs"), (["elsewhere"], "elsewhere")])
def test_codegen_writes_into_the_given_directory(
    argv: list[str], directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["command", *argv])
    written: list[Path] = []

    assert generate(written.append, into="docs") == 0
    assert written == [Path(directory)]


def test_a_user_error_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(directory: Path) -> None:
        raise UserError(f"cannot write {directory}")

    monkeypatch.setattr(sys, "argv", ["command"])

    assert generate(refuse, into="docs") == 2
    assert capsys.readouterr().err == "cannot write docs\n"
