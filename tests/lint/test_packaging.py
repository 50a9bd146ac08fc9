"""The promises of pyproject.toml; `tests/wheel` builds the wheel and checks its contents."""

import ast
import importlib
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: list[str] = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
SCRIPTS: dict[str, str] = PYPROJECT["project"]["scripts"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_names_a_function_that_can_be_called(script: str) -> None:
    module, _, function = SCRIPTS[script].partition(":")

    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_typed_and_describes_its_purpose(package: str) -> None:
    folder = ROOT / package

    assert (folder / "py.typed").exists()
    assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))


def test_no_compiled_file_is_beside_the_sources() -> None:
    made = [path for name in PACKAGES for path in (ROOT / name).rglob("*")]

    assert made
    assert [path for path in made if path.suffix in {".c", ".so", ".o"}] == []


def test_the_dependency_rules_cover_every_package() -> None:
    names = [Path(package).name for package in PACKAGES]

    assert PYPROJECT["tool"]["importlinter"]["root_packages"] == names
