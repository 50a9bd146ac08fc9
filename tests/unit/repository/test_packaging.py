"""What pyproject.toml promises: scripts that start, and a wheel whose hot modules are compiled."""

import ast
import importlib
import sys
import tomllib
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from hatch_build import UncompiledError, find_modules, recipe_of, require_compiler
from tests.compiled import hot_modules
from tests.unit.wheel import build_wheel, run_hatchling

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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Give the names of what the wheel holds."""
    with zipfile.ZipFile(build_wheel(tmp_path_factory.mktemp("wheel"))) as archive:
        return archive.namelist()


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: list[str]) -> None:
    top = {name.partition("/")[0] for name in wheel}

    assert top == {*PACKAGES, f"gpuledger-{PYPROJECT['project']['version']}.dist-info"}


def test_beside_each_hot_module_the_wheel_holds_what_was_compiled_of_it(wheel: list[str]) -> None:
    suffix = EXTENSION_SUFFIXES[0]
    compiled = {name.removesuffix(suffix) for name in wheel if name.endswith(suffix)}

    assert compiled == {str(module.with_suffix("")) for module in hot_modules()}
    assert {str(module) for module in hot_modules()} <= set(wheel)
    assert [name for name in wheel if Path(name).suffix in {".c", ".pxd"}] == []


def test_nothing_is_compiled_beside_the_sources() -> None:
    made = [path for name in PACKAGES for path in (ROOT / name).rglob("*")]

    assert made
    assert [path for path in made if path.suffix in {".c", ".so", ".o"}] == []


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


def test_without_python_s_headers_the_remedy_is_named_too(tmp_path: Path) -> None:
    with pytest.raises(
        UncompiledError, match=r"no .*Python\.h here: install gcc and Python's headers"
    ):
        require_compiler(sys.executable, tmp_path)


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


@pytest.mark.parametrize("named", ["enricher/join/gone.py", "enricher/join", "README.md"])
def test_a_list_that_names_no_python_file_is_refused(named: str) -> None:
    with pytest.raises(UncompiledError, match=f"lists {named} to be compiled"):
        find_modules(ROOT, ["gpuledger/codec.py", named])


def test_another_compiler_and_other_types_are_compiled_in_another_place() -> None:
    """A file of types that is taken away leaves nothing newer than what it was compiled into."""
    types = [Path("enricher/join/accounting/books.pxd")]

    assert recipe_of("gcc", types) == recipe_of("gcc", types)
    assert len({recipe_of("gcc", types), recipe_of("clang", types), recipe_of("gcc", [])}) == 3


def test_the_dependency_rules_cover_every_package() -> None:
    assert PYPROJECT["tool"]["importlinter"]["root_packages"] == PACKAGES
