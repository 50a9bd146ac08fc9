"""The table of DCGM's fields that this node can answer: `fields.csv` beside this module.

Here it is read, and searched by either of a field's names. Which of them are shown is chosen by a
counters file.
"""

import csv
import difflib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, Literal, NamedTuple

from agent.exposition.devices import Read, read_at

Kind = Literal["gauge", "counter", "label"]
FILE: Final = Path(__file__).with_name("fields.csv")
NAMES_FILE: Final = Path(__file__).with_name("dcgm_names.txt")
SEVERAL_UNIT: Final = "several"
"""The unit of a field with several series of a device."""
_SAME: Final = "="
_OF_MEMORY: Final = {
    "reading.memory_used_bytes",
    "reading.memory_total_bytes",
    "reading.memory_reserved_bytes",
    "derived.memory_free_bytes",
    "derived.memory_used_ratio",
}


class Field(NamedTuple):
    """One field of DCGM's."""

    old: str
    """The name that it has had until DCGM 4.5, under which dcgm-exporter shows it."""
    new: str
    """The name that it has since DCGM 4.6."""
    kind: Kind
    """What dcgm-exporter's own list makes of it."""
    is_default: bool
    """Whether dcgm-exporter's own list shows it."""
    meaning: str
    """The help text of that list."""
    path: str
    """Where its value stands: part and field of a device."""
    unit: str
    """The unit in which DCGM gives it, or empty where the record has the same."""
    read: Read
    """Reads its value."""

    @property
    def is_text(self) -> bool:
        """Whether its value is a text, which can only be a label."""
        return self.unit == "text"

    @property
    def is_of_memory(self) -> bool:
        """Whether it tells of a memory, which compute instances of one GPU instance share."""
        return self.path in _OF_MEMORY


@cache
def all_fields() -> tuple[Field, ...]:
    """Return the table in its order."""
    with FILE.open(newline="") as lines:
        return tuple(_fields(csv.reader(line for line in lines if not line.startswith("#"))))


def _fields(rows: Iterator[list[str]]) -> Iterator[Field]:
    for old, new, kind, default, meaning, path, unit in rows:
        yield Field(
            old=old,
            new=old if new == _SAME else new,
            kind=kind,  # type: ignore[arg-type]  # a test holds the file to the kinds
            is_default=default == "on",
            meaning=meaning,
            path=path,
            unit=unit,
            read=read_at(path, unit),
        )


def find_field(name: str) -> Field | None:
    """Find a field by its old or its new name."""
    return next((field for field in all_fields() if name in (field.old, field.new)), None)


def is_dcgms(name: str) -> bool:
    """Return whether DCGM, or dcgm-exporter, has a field of this name, be it ours or not."""
    return name in _read_names()


def nearest_name(name: str) -> str | None:
    """Return the name of DCGM's most like `name`; `None` if none is like it."""
    return next(iter(difflib.get_close_matches(name, sorted(_read_names()), n=1)), None)


def _read_names() -> frozenset[str]:
    """Read all of DCGM's names; not kept, as only a list with a name that is not ours asks."""
    lines = NAMES_FILE.read_text(encoding="ascii").splitlines()
    return frozenset(line for line in lines if not line.startswith("#"))
