"""The benchmark command: selection, output, and the file of figures."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import benchmarks
from benchmarks.__main__ import main
from benchmarks.figure import Figure
from benchmarks.harness import discover

PASSING = '''"""Counts fast, against nothing."""
from benchmarks.figure import Figure
NAME = "count"
def run():
    yield Figure(name="count.one", value=3.0, unit="ticks/s", reference=2.0)
    yield Figure(name="count.two", value=7.0, unit="seconds")
'''
UNAVAILABLE = '''"""Needs what is not there."""
from benchmarks.figure import Figure
from gpuledger.errors import UnavailableError
NAME = "absent"
def run():
    yield Figure(name="absent.first", value=1.0, unit="seconds")
    raise UnavailableError("no broker answers")
'''


@pytest.fixture(autouse=True)
def two_benchmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the package contain two small benchmarks, because the project's own take minutes."""
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "bench_passing_xyz.py").write_text(PASSING)
    (folder / "bench_unavailable_xyz.py").write_text(UNAVAILABLE)
    (folder / "helper_xyz.py").write_text("raise RuntimeError('no benchmark, so never imported')")
    monkeypatch.setattr(benchmarks, "__path__", [str(folder)])
    yield
    for name in ("passing_xyz", "unavailable_xyz"):
        sys.modules.pop(f"benchmarks.bench_{name}", None)


def test_each_bench_module_is_a_benchmark_described_by_its_first_docstring_line() -> None:
    found = discover(benchmarks)

    assert list(found) == ["absent", "count"]
    assert found["count"].summary == "Counts fast, against nothing."


def test_every_figure_is_printed_and_written_with_its_ratio(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"

    assert main(["count", "--json", str(file)]) == 0

    assert json.loads(file.read_text()) == [
        {"name": "count.one", "value": 3.0, "unit": "ticks/s", "reference": 2.0, "ratio": 1.5},
        {"name": "count.two", "value": 7.0, "unit": "seconds", "reference": None, "ratio": None},
    ]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["compiled:", "count.one", "count.two"]
    assert "1.5 of the reference's 2" in lines[1]


def test_a_line_is_printed_before_the_next_figure_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed_before_second: list[str] = []

    def run() -> Iterator[Figure]:
        yield Figure(name="a", value=1.0, unit="seconds")
        printed_before_second.append(capsys.readouterr().out)
        yield Figure(name="b", value=1.0, unit="seconds")

    _replace_run("count", run)
    main(["count"])

    assert printed_before_second[0].splitlines()[-1].startswith("a ")


def test_all_benchmarks_run_by_default_and_one_that_cannot_be_measured_gives_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"

    assert main(["--json", str(file)]) == 1

    names = [figure["name"] for figure in json.loads(file.read_text())]
    assert names == ["absent.first", "count.one", "count.two"]
    assert capsys.readouterr().err == "absent: not measured: no broker answers\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["coumt"], "no benchmark is named 'coumt'; did you mean count?\n"),
        (["count", "qqq"], "no benchmark is named 'qqq'; there are: absent, count\n"),
        (
            ["--json", "/no/such/a.json"],
            "--json /no/such/a.json: missing directory: /no/such; create it first\n",
        ),
    ],
)
def test_an_invalid_call_runs_nothing_and_explains_the_right_one(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2

    assert capsys.readouterr() == ("", message)


def test_list_names_the_benchmarks_and_runs_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0

    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["absent", "count"]


def test_measured_figures_are_written_even_if_a_benchmark_breaks(tmp_path: Path) -> None:
    def run() -> Iterator[Figure]:
        yield Figure(name="before", value=1.0, unit="seconds")
        raise ZeroDivisionError

    _replace_run("count", run)
    file = tmp_path / "figures.json"

    with pytest.raises(ZeroDivisionError):
        main(["count", "--json", str(file)])

    assert [figure["name"] for figure in json.loads(file.read_text())] == ["before"]


def _replace_run(name: str, run: object) -> None:
    assert name in discover(benchmarks)
    module: ModuleType = sys.modules["benchmarks.bench_passing_xyz"]
    module.run = run  # type: ignore[attr-defined]  # a module made by this test
