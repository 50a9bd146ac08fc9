"""What deltalake's errors mean for who has to act, in one line.

A table whose newest commit or checkpoint was cut short (a full disk, a machine that lost power) can
be neither read nor written until that file is gone; docs/store.md says under "Repair" how. The
error names no file, so where the store is a folder it is looked for here.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

_SIGNS: Final = (
    "Json error",
    "Parquet error",
    "Invalid JSON in log",
    "Corrupt footer",
    "Expected contiguous commit files",
    "No table metadata or protocol found",
    "Invalid Checkpoint",
)
"""What deltalake 1.6 says of a log that it cannot read, as opposed to a storage that is away."""
_NEWEST_COMMITS: Final = 100
_PARQUET: Final = b"PAR1"


def explain(error: Exception, uri: str) -> str:
    """Return the first line of the error, and what to do where the table's log is damaged."""
    first = first_line_of(error)
    if not any(sign in first for sign in _SIGNS):
        return first
    files = ", ".join(damaged_files(uri)) or "one of the newest files of _delta_log"
    return (
        f"its log is damaged ({files}): repair it as docs/store.md says under Repair;"
        f" deltalake says: {first[:300]}"
    )


def first_line_of(error: Exception) -> str:
    """Return the first line of an error: what follows it is a backtrace of Rust's."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def damaged_files(uri: str) -> list[str]:
    """Return the names of commits and checkpoints that were cut short, the newest last.

    Only of a store that is a folder of this machine; of any other, nothing.
    """
    folder = _folder_of(uri)
    return [] if folder is None else sorted(_damaged_in(folder / "_delta_log"))


def _folder_of(uri: str) -> Path | None:
    parts = urlsplit(uri)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return None if parts.scheme else Path(uri)


def _damaged_in(log: Path) -> Iterator[str]:
    try:
        for commit in sorted(log.glob("*.json"))[-_NEWEST_COMMITS:]:
            if not _is_whole_commit(commit):
                yield commit.name
        for checkpoint in log.glob("*.checkpoint*.parquet"):
            if not _is_whole_parquet(checkpoint):
                yield checkpoint.name
    except OSError:
        return


def _is_whole_commit(path: Path) -> bool:
    try:
        for line in path.read_bytes().splitlines():
            json.loads(line)
    except ValueError:
        return False
    return True


def _is_whole_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        if file.read(len(_PARQUET)) != _PARQUET:
            return False
        file.seek(-len(_PARQUET), 2)
        return file.read() == _PARQUET
