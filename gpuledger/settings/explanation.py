"""Help on settings: the most common ones for `--help`, all of them for `config explain`.

The meanings are parsed from the source code, which takes time. Only `--help` and `config explain`
read them.
"""

import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from gpuledger.settings.build import describe
from gpuledger.settings.secret import Secret
from gpuledger.settings.sources import REQUIRED, Setting

_MAX_WIDTH: Final = 100
_ANY_TEXT: Final = ("a text", "a path")
"""Descriptions of types that help leaves out."""
HEAD: Final = """\
Settings by name in the file, with default and environment variable. Variables override the
file, options override both. A secret can also be read from the file that NAME_file or
VARIABLE_FILE names. If the default of a text or path is none, null and the empty text
also mean none.
"""


def explain_all(settings: Sequence[Setting]) -> str:
    """Return the help on all settings of a component."""
    return "\n".join((HEAD, explain(settings)))


def explain(settings: Sequence[Setting]) -> str:
    """Return name, default, variable, meaning and accepted values of each setting."""
    return "\n".join(_entry(setting, setting.meaning) for setting in settings)


def summarize(settings: Sequence[Setting]) -> str:
    """Return the same as `explain`, with only the first sentence of the meaning."""
    return "\n".join(_entry(setting, _first_sentence(setting.meaning)) for setting in settings)


def fold(text: str, *, indent: str = "") -> str:
    """Return a text in lines that fit the terminal, at most 100 columns wide."""
    width = min(_MAX_WIDTH, shutil.get_terminal_size((_MAX_WIDTH, 0)).columns)
    return textwrap.fill(text, width=width, initial_indent=indent, subsequent_indent=indent)


def _entry(setting: Setting, meaning: str) -> str:
    default = (
        "required" if setting.default is REQUIRED else f"default {show_default(setting.default)}"
    )
    accepted = describe(setting.type)
    values = "" if accepted in _ANY_TEXT else f" Accepts {accepted}."
    filled = fold(meaning + values, indent=" " * 6)
    return f"  {setting.name} ({default})\n      {setting.variable}\n{filled}\n"


def _first_sentence(meaning: str) -> str:
    first, ends, _ = " ".join(meaning.split()).partition(". ")
    return f"{first}." if ends else first


def show_default(default: Any) -> str:  # noqa: ANN401  # any setting
    """Return a setting's default for display; `none` for null and the empty text."""
    if default is None or default == "":
        return "none"
    if isinstance(default, Secret | Path | str):
        return str(default)
    return msgspec.json.encode(default, enc_hook=str).decode()
