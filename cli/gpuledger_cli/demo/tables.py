"""Fits tables and sentences to a screen, and explains the columns of the demo's tables.

Pure text: no colours, no terminal. Numbers are never cut; names are shortened, and the least
important columns are left out. Names are shortened in the middle, because the pods of a workload
differ at the end of their names. This module imports nothing else of the demo, so that the help
is fast.
"""

import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple

_GAP: Final = "  "
_ELLIPSIS: Final = "…"
_MIN_PART: Final = 12
"""The namespace is shortened if a pod's name would otherwise have fewer characters than this."""


class TableColumn(NamedTuple):
    """A column of a table."""

    name: str
    justify: Literal["left", "right"] = "right"
    floor: int | None = None
    """Minimum width of a column of names; it becomes narrower only if no other column is left to
    leave out. `None` for a column of numbers, which are never cut."""
    leaves: int | None = None
    """Order in which columns are left out on a narrow screen, 1 first; `None`: never."""
    keeps: Literal["both ends", "beginning"] = "both ends"
    """The part that remains of a shortened name."""


def shorten(text: str, width: int) -> str:
    """Return a text in at most `width` characters; `namespace/name` keeps a part of both."""
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
    """Return the beginning of a text, in at most `width` characters."""
    return text if len(text) <= width else text[: max(0, width - 1)] + _ELLIPSIS[:width]


def _shorten_middle(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    kept = max(0, width - 1)
    tail = kept - kept * 2 // 5  # the end distinguishes more than the beginning
    return text[: kept - tail] + _ELLIPSIS[:width] + text[len(text) - tail :]


def fit(columns: Sequence[TableColumn], rows: Sequence[Sequence[str]], *, width: int) -> list[int]:
    """Return each column's width in a table of at most `width` characters; 0 if left out."""
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
    # The names share the remaining width, the first one first. It is negative if even their
    # minimum widths do not fit; then the names become narrower than that.
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
    """Return one line of the table, without trailing spaces."""
    placed = []
    for column, cell, width in zip(columns, cells, widths, strict=True):
        if width:
            shortened = shorten if column.keeps == "both ends" else cut
            text = cell if column.floor is None else shortened(cell, width)
            placed.append(text.ljust(width) if column.justify == "left" else text.rjust(width))
    return _GAP.join(placed).rstrip()


def note_hidden(columns: Sequence[TableColumn], widths: Sequence[int], *, width: int) -> list[str]:
    """Return the line that names the columns for which `fit` found no room; empty if none."""
    hidden = [column.name for column, kept in zip(columns, widths, strict=True) if not kept]
    return fold(f"Hidden, widen the terminal: {', '.join(hidden)}.", width=width) if hidden else []


_LEFT_OUT: Final = " … "


def fold(text: str, *, width: int, indent: str = "") -> list[str]:
    """Return lines of whole words; all lines but the first are indented."""
    room = max(1, width - len(indent))
    return textwrap.wrap(
        re.sub(r"\S+", lambda word: shorten(word[0], room), text),
        width=max(width, len(indent) + 1),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def elide(text: str, *, width: int) -> str:
    """Return a text in at most `width` characters; words in the middle are left out."""
    if len(text) <= width:
        return text
    room = width - len(_LEFT_OUT)
    last = text[text.find(" ", len(text) - room * 2 // 5 - 1) + 1 :]
    first = text[: max(0, text.rfind(" ", 0, max(0, room - len(last) + 1)))].rstrip()
    return f"{first}{_LEFT_OUT}{last}" if first else shorten(text, width)


def wrap(facts: Iterable[str], *, width: int) -> list[str]:
    """Return lines with as many whole facts as fit; a fact wider than a line is folded."""
    lines: list[str] = []
    for fact in facts:
        if lines and len(lines[-1]) + len(_GAP) + len(fact) <= width:
            lines[-1] += _GAP + fact
        else:
            lines += fold(fact, width=width)
    return lines


LIVE_TITLE: Final = "GPUs in the last sample"
SUMMARY_TITLE: Final = "Usage by pod"
BILL_TITLE: Final = "Bill by workload"
LIVE_COLUMNS: Final = {
    "Util %": "share of the last sampling interval in which the pod's kernels ran",
    "Memory": "GPU memory that the pod holds",
    "Power W": "the pod's share of the GPU's power",
    "Source": "measured, measured (shared), or estimated (how the GPU's value is split)",
    "Workload": "controller that owns the pod",
}
LIVE_ROWS: Final = {
    "__unused__ POD": "allocated to POD and unused",
    "__host__": "used by processes outside pods",
    "__unattributed__": "used by an unknown process",
    "__idle__": "not allocated and not used",
    "__unresponsive__": "the GPU does not respond",
}
"""The rows of the live table that do not show the usage of a pod, with their meanings."""
SUMMARY_COLUMNS: Final = {
    "Used GPU-s": "GPU-seconds in which its kernels ran",
    "True GPU-s": "the same, according to the scenario",
    "Unused GPU-s": "GPU-seconds that were allocated to it and unused",
    "GiB-h": "GPU memory that it held, times hours",
    "kJ": "its energy",
}
ACCURACY: Final = {
    "Attributed wrongly": (
        "GPU time attributed to another pod than in the scenario ÷ GPU time that pods used"
    ),
    "Entries sum to the device": (
        "the usage of pods, host and idle time adds up to each GPU's time, memory and energy"
    ),
}
BILL_COLUMNS: Final = {
    "Allocated GPU-s": "GPU-seconds that were allocated to it",
    "Used GPU-s": "GPU-seconds in which its kernels ran",
    "Efficiency": "used ÷ allocated",
    "Billed GPU-s": (
        "allocated GPU-seconds while the GPU responded; for __host__ the used ones, for"
        " __unresponsive__ those without a response, for __idle__ the rest"
    ),
    "Cost USD": "price of the billed GPU-seconds",
    "Unused USD": "part of the cost for GPUs that were allocated and unused",
}


def as_help() -> str:
    """Return the tables' titles, columns and special rows with their meanings, as Markdown."""
    tables = {
        LIVE_TITLE: LIVE_COLUMNS | LIVE_ROWS,
        SUMMARY_TITLE: SUMMARY_COLUMNS,
        BILL_TITLE: BILL_COLUMNS,
        "Accuracy": ACCURACY,
    }
    return "\n\n".join(
        "\n".join([f"{title}:\n", *(f"- {name}: {text}" for name, text in meanings.items())])
        for title, meanings in tables.items()
    )
