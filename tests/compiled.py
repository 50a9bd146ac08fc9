"""Which of the hot modules are compiled in this environment."""

import re
import tomllib
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]


def hot_modules() -> list[str]:
    """Return the import names of the modules that pyproject.toml lists for compilation."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = pyproject["tool"]["hatch"]["build"]["targets"]["wheel"]
    return [_import_name(path) for path in wheel["hooks"]["custom"]["modules"]]


def compiled_modules() -> list[str]:
    """Return the hot modules that are imported in compiled form."""
    return [name for name in hot_modules() if _is_compiled(name)]


def describe_compiled() -> str:
    """Return a line about compiled modules for the header of test and benchmark reports."""
    compiled, total = len(compiled_modules()), len(hot_modules())
    if compiled == total:
        return f"compiled: yes, {compiled} modules"
    return f"compiled: {f'{compiled} of {total} modules' if compiled else 'no'}"


def _import_name(path: str) -> str:
    return re.sub(r"^(?!gpuledger/)\w+/", "", path).removesuffix(".py").replace("/", ".")


def _is_compiled(name: str) -> bool:
    found = find_spec(name)
    return found is not None and str(found.origin).endswith(tuple(EXTENSION_SUFFIXES))
