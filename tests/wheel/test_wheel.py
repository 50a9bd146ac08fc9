"""The wheel: what it holds, and what is said where it cannot be compiled."""

import tomllib
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from tests.compiled import hot_modules
from tests.wheel.building import ROOT, build_wheel, run_hatchling

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: list[str] = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the names of what the wheel holds."""
    with zipfile.ZipFile(build_wheel(tmp_path_factory.mktemp("wheel"))) as archive:
        return archive.namelist()


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: list[str]) -> None:
    top = {name.partition("/")[0] for name in wheel}
    programs = {name.split("/")[2] for name in wheel if name.startswith("gpuledger/_programs/")}

    assert top == {"gpuledger", f"gpuledger-{PYPROJECT['project']['version']}.dist-info"}
    assert {"gpuledger", *programs} == set(PACKAGES)


def test_beside_each_hot_module_the_wheel_holds_what_was_compiled_of_it(wheel: list[str]) -> None:
    suffix = EXTENSION_SUFFIXES[0]
    compiled = {name.removesuffix(suffix) for name in wheel if name.endswith(suffix)}

    assert compiled == {str(place_in_wheel(module).with_suffix("")) for module in hot_modules()}
    assert {str(place_in_wheel(module)) for module in hot_modules()} <= set(wheel)
    assert [name for name in wheel if Path(name).suffix in {".c", ".pxd"}] == []


def place_in_wheel(module: Path) -> Path:
    """Return where the wheel has a module of the checkout (ADR 024)."""
    return module if module.parts[0] == "gpuledger" else Path("gpuledger", "_programs", module)


@pytest.mark.parametrize(
    "file",
    [
        "cli/gpuledger_cli/demo/demo.yaml",
        "reports/gpuledger_reports/bill_page/bill_page.css",
        "reports/gpuledger_reports/bill_page/bill_page.html.jinja",
        "reports/gpuledger_reports/bill_page/bill_page.js",
        "reports/gpuledger_reports/api/openapi.yaml",
        "reports/gpuledger_reports/list_prices.yaml",
    ],
)
def test_what_programs_read_beside_their_code_is_in_the_wheel(wheel: list[str], file: str) -> None:
    """So that it works where there is no checkout."""
    assert f"gpuledger/_programs/{file}" in wheel


def test_an_editable_install_compiles_nothing(tmp_path: Path) -> None:
    """One runs what one edits; and it needs no compiler."""
    with zipfile.ZipFile(
        build_wheel(tmp_path, "--target", "wheel:editable", CC="no-such-compiler")
    ) as archive:
        assert [name for name in archive.namelist() if name.endswith(".so")] == []


def test_without_a_compiler_the_build_ends_with_one_line_that_names_the_remedy(
    tmp_path: Path,
) -> None:
    built = run_hatchling(tmp_path, CC="no-such-compiler")

    assert built.returncode == 1
    (line,) = built.stderr.strip().splitlines()
    for part in ("no-such-compiler", "gcc", "libc6-dev", "python3-dev", "HATCH_BUILD_NO_HOOKS"):
        assert part in line


def test_where_the_compiler_fails_the_build_ends_without_a_traceback(tmp_path: Path) -> None:
    """As it does without C's own headers."""
    built = run_hatchling(tmp_path, CC="false")

    assert built.returncode == 1
    assert "Traceback" not in built.stderr
    assert built.stderr.strip().startswith("false failed, and says above why")
    assert "libc6-dev" in built.stderr


def test_without_hooks_the_wheel_is_pure_python(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path, CC="no-such-compiler", HATCH_BUILD_NO_HOOKS="true")

    assert wheel.name.endswith("-py3-none-any.whl")
