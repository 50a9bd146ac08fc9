"""A file that a command writes is complete or unchanged, whatever fails."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gpuledger.texts import shorten_middle
from gpuledger_cli.__main__ import main
from tests.unit.reports.stores import allocated, inventory_row, write_store

QUERY = ("query", "SELECT * FROM usage_hourly")
COMMANDS = [
    *((*QUERY, "--format", name) for name in ("table", "csv", "json", "parquet")),
    *(("bill", "--format", name) for name in ("table", "csv", "json", "parquet", "focus")),
]
by_command = pytest.mark.parametrize("command", COMMANDS, ids=" ".join)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("store")
    return write_store(folder, usage_hourly=[allocated(0, "a")], inventory=[inventory_row()])


def run(store: str, command: tuple[str, ...], output: Path) -> int:
    return main([*command, "--store", store, "--output", str(output)])


def in_no_folder(folder: Path) -> Path:
    return folder / "no-such-folder" / "made"


def a_folder(folder: Path) -> Path:
    (folder / "made").mkdir()
    return folder / "made"


def of_a_name_too_long(folder: Path) -> Path:
    return folder / ("x" * 300)


@by_command
@pytest.mark.parametrize("place", [in_no_folder, a_folder, of_a_name_too_long])
def test_a_file_that_cannot_be_written_is_named_in_one_line(
    store: str,
    command: tuple[str, ...],
    place: Callable[[Path], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = place(tmp_path)
    assert run(store, command, output) == 2
    (line,) = capsys.readouterr().err.splitlines()
    named = shorten_middle(str(output), 120)
    assert line.startswith(f"gpuledger: --output: cannot write {named}: ")


@by_command
def test_a_full_disk_is_reported_for_the_file(
    store: str, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(store, command, Path("/dev/full")) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("gpuledger: --output: cannot write /dev/full: ")
    assert "No space left" in line


@by_command
def test_the_file_is_replaced_without_leftovers_and_a_link_to_it_remains(
    store: str, command: tuple[str, ...], tmp_path: Path
) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("of last month")
    link.symlink_to(target)
    assert run(store, command, link) in (0, 3)
    assert b"of last month" not in target.read_bytes()
    assert link.is_symlink()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link", "target"]


@by_command
def test_a_run_that_fails_keeps_the_previous_file(
    store: str, command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "made"
    output.write_text("of last month")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert run(store, command, output) == 2
    assert output.read_text() == "of last month"
    assert [each.name for each in tmp_path.iterdir()] == ["made"]
