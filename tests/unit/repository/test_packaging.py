"""What pyproject.toml promises: scripts that start, and a wheel of the right packages."""

import ast
import importlib
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: list[str] = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
SCRIPTS: dict[str, str] = PYPROJECT["project"]["scripts"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_names_a_function_that_can_be_called(script: str) -> None:
    module, _, function = SCRIPTS[script].partition(":")

    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_typed_and_says_what_it_is_for(package: str) -> None:
    folder = ROOT / package

    assert (folder / "py.typed").exists()
    assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))


def test_the_wheel_holds_the_packages_and_nothing_else(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")

    with zipfile.ZipFile(wheel) as archive:
        top = {name.partition("/")[0] for name in archive.namelist()}

    assert top == {*PACKAGES, f"gpuledger-{PYPROJECT['project']['version']}.dist-info"}


def test_the_dependency_rules_cover_every_package() -> None:
    assert PYPROJECT["tool"]["importlinter"]["root_packages"] == PACKAGES
