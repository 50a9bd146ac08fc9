"""Measures how scattered the code is, and which names mean two things.

    python -m tests.shape

A reader pays for each hop, so this counts helpers with one caller, private functions, and names
with another meaning elsewhere. The counts show where to look, not what is right.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

PACKAGES = ("gpuledger", "agent", "enricher", "sinks", "reports", "simulator", "cli")
TINY_LINES = 6
"""Maximum number of lines of a tiny helper, including its `def`."""
DIRECTIVES = ("noqa", "type: ignore", "pragma")
"""Comments for tools do not describe the code."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file of a package."""

    package: str
    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text)

    @property
    def lines(self) -> int:
        """Return the number of lines that are not blank."""
        return sum(1 for line in self.text.splitlines() if line.strip())

    @property
    def comments(self) -> int:
        """Return the number of comments for people."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return sum(
            token.type == tokenize.COMMENT and not any(word in token.string for word in DIRECTIVES)
            for token in tokens
        )

    @property
    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Yield the functions and methods."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node

    @property
    def private_functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Yield the functions whose name begins with one underscore."""
        for function in self.functions:
            if function.name.startswith("_") and not function.name.startswith("__"):
                yield function

    @property
    def tiny_helpers(self) -> Iterator[str]:
        """Yield the names of private functions of a few lines that are used in one place."""
        used = Counter(_names(self.tree))
        for function in self.private_functions:
            lines = (function.end_lineno or 0) - function.lineno + 1
            if lines <= TINY_LINES and used[function.name] == 1:
                yield function.name

    @property
    def classes(self) -> Iterator[str]:
        """Yield the names of the classes."""
        return (node.name for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef))


def read_sources(root: Path, packages: Iterable[str] = PACKAGES) -> list[Source]:
    """Return the files of the packages in a directory."""
    return [
        Source(package=package, path=path, text=path.read_text())
        for package in packages
        for path in sorted((root / package).rglob("*.py"))
    ]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The measures of some sources."""

    lines: int
    tiny_helpers_per_1000: float
    private_functions_per_1000: float
    comments_percent: float
    repeated_classes: Sequence[str]
    """Class names that occur in several files."""
    repeated_modules: Sequence[str]
    """Module names, with their package, that occur in several of its directories."""
    files: dict[str, int]
    """Number of files that contain code, by package."""


def measure(sources: Sequence[Source]) -> Shape:
    """Return the measures."""
    lines = sum(source.lines for source in sources)
    per_1000 = 1000 / max(lines, 1)
    classes = [(name, source.path) for source in sources for name in source.classes]
    modules = [
        (f"{source.package}: {source.path.stem}", source.path)
        for source in sources
        if not source.path.stem.startswith("__")
    ]
    return Shape(
        lines=lines,
        tiny_helpers_per_1000=per_1000 * sum(len(list(each.tiny_helpers)) for each in sources),
        private_functions_per_1000=per_1000
        * sum(len(list(each.private_functions)) for each in sources),
        comments_percent=per_1000 / 10 * sum(source.comments for source in sources),
        repeated_classes=_repeated(classes),
        repeated_modules=_repeated(modules),
        files=dict(Counter(source.package for source in sources if source.tree.body)),
    )


def report(shape: Shape) -> str:
    """Return the measures as a table, and the names that mean two things."""
    rows = [
        ("lines that are not blank", f"{shape.lines:,}"),
        (
            f"one-caller helpers of {TINY_LINES} lines, per 1,000",
            f"{shape.tiny_helpers_per_1000:.1f}",
        ),
        ("private functions, per 1,000", f"{shape.private_functions_per_1000:.1f}"),
        ("comments for people", f"{shape.comments_percent:.1f} %"),
        ("class names in several files", str(len(shape.repeated_classes))),
        ("module names twice in a package", str(len(shape.repeated_modules))),
        *((f"files of {package}", str(count)) for package, count in shape.files.items()),
        ("files of all", str(sum(shape.files.values()))),
    ]
    table = [f"{name:45}{figure:>10}" for name, figure in rows]
    names = [
        f"\n{title}: {', '.join(found)}"
        for title, found in (
            ("classes", shape.repeated_classes),
            ("modules", shape.repeated_modules),
        )
        if found
    ]
    return "\n".join([*table, *names])


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def _repeated(named: Iterable[tuple[str, Path]]) -> list[str]:
    where: dict[str, set[Path]] = defaultdict(set)
    for name, path in named:
        where[name].add(path)
    return sorted(name for name, paths in where.items() if len(paths) > 1)


if __name__ == "__main__":
    sys.stdout.write(report(measure(read_sources(Path()))) + "\n")
