"""Helpers for generated pages: the docstrings of fields and constants, and the command line.

Python discards the string under a field or constant. Help texts, pages and JSON Schemas need these
strings, so this module reads them from the source code, once per class or module. Classes that are
made at run time have the strings in an attribute. This module does not depend on settings or
records.
"""

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Final

from gpuledger.errors import UserError


def generate(write: Callable[[Path], None], *, into: str) -> int:
    """Call `write` with the directory to write to; return the exit code.

    The directory is the first argument on the command line, or `into` if there is none. The exit
    code is 2, with a message on standard error, if `write` raises a `UserError`.
    """
    try:
        write(Path(sys.argv[1] if len(sys.argv) > 1 else into))
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


FIELD_DOCSTRINGS: Final = "__field_docstrings__"
"""Attribute of a class without source code: the docstrings of its fields, by field name."""


@cache
def field_docstrings(cls: type) -> MappingProxyType[str, str]:
    """Return the docstrings of a class's fields on one line each, including inherited fields."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        found |= _own_docstrings(base)
    return MappingProxyType(found)


@cache
def constant_docstrings(module: ModuleType) -> MappingProxyType[str, str]:
    """Return the docstrings of a module's constants on one line each, by name."""
    return MappingProxyType(_docstrings(ast.parse(inspect.getsource(module)).body))


def class_docstring(cls: type) -> str:
    """Return the class's own docstring on one line; empty if it has none."""
    return " ".join((cls.__dict__.get("__doc__") or "").split())


def _own_docstrings(cls: type) -> dict[str, str]:
    if FIELD_DOCSTRINGS in cls.__dict__:
        return dict(cls.__dict__[FIELD_DOCSTRINGS])
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):  # built in, or installed without source code
        return {}
    defined = ast.parse(source).body[0]
    if not isinstance(defined, ast.ClassDef):
        return {}
    return _docstrings(defined.body)


def _docstrings(body: list[ast.stmt]) -> dict[str, str]:
    """Return the string under each annotated name, on one line."""
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
