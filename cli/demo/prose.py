"""Sentences that fit a screen: broken between words, or with words left out of their middle.

Pure text, as `cli.demo.columns`. A word that is wider than the screen is shortened as names are.
"""

import re
import textwrap
from collections.abc import Iterable
from typing import Final

from cli.demo.columns import shorten

_GAP: Final = "  "
_LEFT_OUT: Final = " … "


def fold(text: str, *, width: int, indent: str = "") -> list[str]:
    """Return lines of whole words; those after the first one are indented."""
    room = max(1, width - len(indent))
    return textwrap.wrap(
        re.sub(r"\S+", lambda word: shorten(word[0], room), text),
        width=max(width, len(indent) + 1),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def elide(text: str, *, width: int) -> str:
    """Return a text in one line: of a longer one its first and last words, more of the first."""
    if len(text) <= width:
        return text
    room = width - len(_LEFT_OUT)
    last = text[text.find(" ", len(text) - room * 2 // 5 - 1) + 1 :]
    first = text[: max(0, text.rfind(" ", 0, max(0, room - len(last) + 1)))].rstrip()
    return f"{first}{_LEFT_OUT}{last}" if first else shorten(text, width)


def wrap(facts: Iterable[str], *, width: int) -> list[str]:
    """Return lines of whole facts, as many of them on each as fit; a longer one is folded."""
    lines: list[str] = []
    for fact in facts:
        if lines and len(lines[-1]) + len(_GAP) + len(fact) <= width:
            lines[-1] += _GAP + fact
        else:
            lines += fold(fact, width=width)
    return lines
