"""Tables and sentences that fit a screen, and what the columns of the demo's tables mean.

Pure text: no colours, no terminal. Numbers are never cut, names give way, the least needed column
goes. A name is shortened in the middle, because the names of one workload's pods begin alike and
differ at their ends. Imports nothing else of the demo, as its help is shown without loading it.
"""

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

_GAP: Final = "  "
_ELLIPSIS: Final = "…"
_MIN_PART: Final = 12
"""Characters of a pod's name for the sake of which its namespace is shortened too."""


class TableColumn(NamedTuple):
    """A column of a table."""

    name: str
    justify: Literal["left", "right"] = "right"
    floor: int | None = None
    """A name's characters below which no other column is kept; `None`: a number, never cut."""
    leaves: int | None = None
    """Its turn to be left out where the screen is narrow, 1 first; `None`: it stays."""
    keeps: Literal["both ends", "beginning"] = "both ends"
    """What stays of a name that is shortened."""


def shorten(text: str, width: int) -> str:
    """Return a text in at most `width` characters; of `namespace/name` both stay."""
    if len(text) <= width:
        return text
    parent, slash, name = text.rpartition("/")
    if not slash:
        return _shorten_middle(text, width)
    name_width = max(width - len(parent) - 1, min(len(name), _MIN_PART, width))
    parent_width = width - 1 - name_width
    if parent_width < 1:
        return _shorten_middle(name, width)
    return f"{cut(parent, parent_width)}/{_shorten_middle(name, name_width)}"


def cut(text: str, width: int) -> str:
    """Return a text in at most `width` characters, of a longer one its beginning."""
    return text if len(text) <= width else text[: max(0, width - 1)] + _ELLIPSIS[:width]


def _shorten_middle(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    kept = max(0, width - 1)
    tail = kept - kept * 2 // 5  # the end distinguishes more than the beginning
    return text[: kept - tail] + _ELLIPSIS[:width] + text[len(text) - tail :]


def fit(columns: Sequence[TableColumn], rows: Sequence[Sequence[str]], *, width: int) -> list[int]:
    """Return each column's width in a table of at most `width` characters; 0 is left out."""
    wanted = [
        max(map(len, [column.name, *(row[index] for row in rows)]))
        for index, column in enumerate(columns)
    ]
    minimum = [
        maximum if column.floor is None else min(maximum, column.floor)
        for column, maximum in zip(columns, wanted, strict=True)
    ]
    leaving = [index for index, column in enumerate(columns) if column.leaves is not None]
    for index in sorted(leaving, key=lambda index: columns[index].leaves or 0):
        if _total(minimum) <= width:
            break
        minimum[index] = 0
    # What is left is shared out among the names, the first one first. It may be less than nothing,
    # where not even the names' floors fit: then they give way below them.
    widths = list(minimum)
    for index, column in enumerate(columns):
        if column.floor is not None and widths[index]:
            spare = width - _total(widths)
            widths[index] = max(1, min(wanted[index], widths[index] + spare))
    return widths


def _total(widths: Sequence[int]) -> int:
    kept = [width for width in widths if width]
    return sum(kept) + len(_GAP) * (len(kept) - 1)


def line(columns: Sequence[TableColumn], cells: Sequence[str], widths: Sequence[int]) -> str:
    """Return one line of the table, without blanks at its end."""
    placed = []
    for column, cell, width in zip(columns, cells, widths, strict=True):
        if width:
            shortened = shorten if column.keeps == "both ends" else cut
            text = cell if column.floor is None else shortened(cell, width)
            placed.append(text.ljust(width) if column.justify == "left" else text.rjust(width))
    return _GAP.join(placed).rstrip()


def shown(columns: Sequence[TableColumn], widths: Sequence[int]) -> set[str]:
    """Return the names of the columns that are not left out."""
    return {column.name for column, width in zip(columns, widths, strict=True) if width}


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


LIVE_COLUMNS: Final = {
    "Util %": "share of the last sampling interval in which its kernels ran",
    "Watts": "its share of the GPU's power",
    "Method": "measured, measured (shared), or estimated (how the GPU's value is split)",
}
LIVE_ROWS: Final = {
    "__unused__ POD": "allocated to POD and unused",
    "__host__": "used by processes outside pods",
    "__unattributed__": "used, by an unknown process",
}
"""The rows that are no pod's use."""
SUMMARY_COLUMNS: Final = {
    "GPU s": "seconds in which its kernels ran, as attributed",
    "true": "the same in the scenario",
    "unused s": "its share of the seconds in which GPUs allocated to it ran no kernel",
    "GiB h": "GPU memory that it used, times hours",
    "kJ": "its energy",
}
BILL_COLUMNS: Final = {
    "Allocated GPU s": "GPU seconds that were allocated to it",
    "Used GPU s": "GPU seconds in which its kernels ran",
    "Efficiency": "used ÷ allocated",
    "Billed GPU s": "GPU seconds that it pays for: allocated while the GPU responded",
    "Cost": "billed GPU seconds at the prices that the last line names",
    "Unused cost": "the part of the cost for GPUs that were allocated and unused",
}


def as_facts(meanings: Mapping[str, str]) -> list[str]:
    """Return a phrase for each name."""
    return [f"{name}: {meaning}" for name, meaning in meanings.items()]


def as_help() -> str:
    """Return the tables' names with their meanings, as Markdown."""
    tables = {
        "The table while it runs": LIVE_COLUMNS | LIVE_ROWS,
        "The usage by pod, at the end": SUMMARY_COLUMNS,
        "The bill below that": BILL_COLUMNS,
    }
    return "\n\n".join(
        "\n".join([f"{title}:\n", *(f"- {fact}" for fact in as_facts(meanings))])
        for title, meanings in tables.items()
    )
