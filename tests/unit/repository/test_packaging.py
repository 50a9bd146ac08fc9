"""What pyproject.toml promises; `tests/wheel` builds the wheel and looks into that."""

import ast
import importlib
import sys
import tomllib
from pathlib import Path

import pytest

from hatch_build import UncompiledError, find_modules, recipe_of, require_compiler
from tests.errors import has_words

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


def test_nothing_is_compiled_beside_the_sources() -> None:
    made = [path for name in PACKAGES for path in (ROOT / name).rglob("*")]

    assert made
    assert [path for path in made if path.suffix in {".c", ".so", ".o"}] == []


def test_without_python_s_headers_the_remedy_is_named_too(tmp_path: Path) -> None:
    with pytest.raises(UncompiledError, check=has_words("Python.h", "gcc")):
        require_compiler(sys.executable, tmp_path)


@pytest.mark.parametrize(
    "named",
    ["enricher/gpuledger_enricher/join/gone.py", "enricher/gpuledger_enricher/join", "README.md"],
)
def test_a_list_that_names_no_python_file_is_refused(named: str) -> None:
    with pytest.raises(UncompiledError, check=has_words(named)):
        find_modules(ROOT, ["gpuledger/codec.py", named])


def test_another_compiler_and_other_types_are_compiled_in_another_place() -> None:
    """A file of types that is taken away leaves nothing newer than what it was compiled into."""
    types = [Path("enricher/gpuledger_enricher/join/booking/books.pxd")]

    assert recipe_of("gcc", types) == recipe_of("gcc", types)
    assert len({recipe_of("gcc", types), recipe_of("clang", types), recipe_of("gcc", [])}) == 3


def test_the_dependency_rules_cover_every_package() -> None:
    assert PYPROJECT["tool"]["importlinter"]["root_packages"] == PACKAGES
