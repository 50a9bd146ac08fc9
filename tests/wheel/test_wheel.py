"""The contents of the wheel, built with and without a compiler."""

import tomllib
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from tests.compiled import hot_modules
from tests.wheel.building import ROOT, build_wheel, run_hatchling

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: list[str] = PYPROJECT["tool"]["importlinter"]["root_packages"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the names of the wheel's files."""
    with zipfile.ZipFile(build_wheel(tmp_path_factory.mktemp("wheel"))) as archive:
        return archive.namelist()


def test_the_wheel_contains_only_the_packages(wheel: list[str]) -> None:
    top = {name.partition("/")[0] for name in wheel}

    assert top == {*PACKAGES, f"gpuledger-{PYPROJECT['project']['version']}.dist-info"}


def test_the_wheel_contains_each_hot_module_compiled_and_as_source(wheel: list[str]) -> None:
    suffix = EXTENSION_SUFFIXES[0]
    compiled = {name.removesuffix(suffix) for name in wheel if name.endswith(suffix)}
    expected = {name.replace(".", "/") for name in hot_modules()}

    assert compiled == expected
    assert {f"{name}.py" for name in expected} <= set(wheel)
    assert [name for name in wheel if Path(name).suffix in {".c", ".pxd"}] == []


@pytest.mark.parametrize(
    "file",
    [
        "gpuledger_cli/demo/demo.yaml",
        "gpuledger_cli/demo/month.yaml",
        "gpuledger_reports/presenting/bill_page/bill_page.css",
        "gpuledger_reports/presenting/bill_page/bill_page.html.jinja",
        "gpuledger_reports/presenting/bill_page/bill_page.js",
        "gpuledger_reports/api/openapi.yaml",
        "gpuledger_reports/pricing/list_prices.yaml",
    ],
)
def test_data_files_of_programs_are_in_the_wheel(wheel: list[str], file: str) -> None:
    """So that they work without a checkout."""
    assert file in wheel


def test_an_editable_install_compiles_nothing(tmp_path: Path) -> None:
    """A developer runs the edited sources, and needs no compiler."""
    with zipfile.ZipFile(
        build_wheel(tmp_path, "--target", "wheel:editable", CC="no-such-compiler")
    ) as archive:
        assert [name for name in archive.namelist() if name.endswith(".so")] == []


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_working_compiler_the_wheel_is_pure_and_one_line_names_the_remedy(
    tmp_path: Path, compiler: str
) -> None:
    built = run_hatchling(tmp_path, CC=compiler)
    (wheel,) = tmp_path.glob("*.whl")
    lines = [line for line in built.stderr.splitlines() if "pure-Python wheel" in line]

    assert built.returncode == 0
    assert wheel.name.endswith("-py3-none-any.whl")
    assert len(lines) == 1
    for part in (compiler, "gcc", "python3-dev"):
        assert part in lines[0]
