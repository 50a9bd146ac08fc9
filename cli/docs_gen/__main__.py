"""Writes the pages that are made from the code: `python -m cli.docs_gen docs`.

Here stands which page is made by what. A page is given as it stands, since one may be made in part.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from cli.docs_gen import metrics, node, readings, xids
from gpuledger.codegen import generate
from gpuledger.errors import UserError

PAGES: Final[Mapping[str, Callable[[Path], str]]] = {
    "agent.md": lambda path: readings.page(path.read_text(encoding="utf-8")),
    "metrics.md": lambda _: metrics.page(),
    "node-metrics.md": lambda _: node.page(),
    "xids.md": lambda _: xids.page(),
}


def make_page(path: Path) -> str:
    """Return what a page must say; raises `UserError`, which names the page and what is wrong."""
    try:
        return PAGES[path.name](path)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def write_pages(directory: Path) -> None:
    """Write every page, or none where one cannot be made; raises `UserError`."""
    made = {path: make_page(path) for path in (directory / name for name in PAGES)}
    for path, text in made.items():
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(generate(write_pages, into="docs"))
