"""Which of the modules that the wheel carries compiled are compiled where this runs."""

import tomllib
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]


def hot_modules() -> list[Path]:
    """Return the sources that pyproject.toml lists to be compiled."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = pyproject["tool"]["hatch"]["build"]["targets"]["wheel"]
    return [Path(module) for module in wheel["hooks"]["custom"]["modules"]]


def compiled_modules() -> list[Path]:
    """Return those of them that an import finds compiled."""
    return [module for module in hot_modules() if _is_compiled(module)]


def describe_compiled() -> str:
    """Say it in a line, for whoever reads figures or results."""
    compiled, all_of_them = len(compiled_modules()), len(hot_modules())
    if compiled == all_of_them:
        return f"compiled: yes, {compiled} modules"
    return f"compiled: {f'{compiled} of {all_of_them} modules' if compiled else 'no'}"


def _is_compiled(module: Path) -> bool:
    found = find_spec(".".join(module.with_suffix("").parts))
    return found is not None and str(found.origin).endswith(tuple(EXTENSION_SUFFIXES))
