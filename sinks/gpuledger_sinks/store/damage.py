"""Explains deltalake's errors in one line, for whoever has to act.

A table whose newest commit or checkpoint was cut short (full disk, power failure) can be neither
read nor written until that file is removed; see "Repair a table" in docs/guides/store.md.
deltalake's error does not name the file, so it is looked for here if the store is a local
directory.

deltalake accepts a commit that was cut off right after a line: such a commit has rows without their
offsets, and the rows would be appended again. Each commit therefore announces the offsets of its
last lines in `commitInfo`, its first line, and these are compared with the table's offsets.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from deltalake.exceptions import DeltaError

from gpuledger.store.query import is_damage, unfold
from gpuledger_sinks.errors import ReceiverUnavailableError

_NO_CREDENTIALS: Final = "loading credentials"
_GIVE_CREDENTIALS: Final = (
    "set the credentials of the object store in store.storage_options, in the environment"
    " (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) or by the machine's role"
)
_REPAIR: Final = 'see "Repair a table" in docs/guides/store.md'
_SHOWN_CHARACTERS: Final = 600
ANNOUNCEMENT: Final = "gpuledger.offsets"
"""The key in `commitInfo` for the streams that the commit moves, with their offsets, as JSON."""
ANNOUNCED_COMMITS: Final = 10
"""Number of newest commits that are compared with their announcement; each is a file to read."""
_NEWEST_COMMITS: Final = 100
_PARQUET: Final = b"PAR1"


def explain(error: Exception, uri: str) -> str:
    """Return the first line of the error with its causes, and what to do about known ones."""
    first = first_line_of(error)
    if is_damage(first):
        return f"{_damaged(uri)}; error of deltalake: {first[:300]}"
    shown = unfold(error)[:_SHOWN_CHARACTERS]
    return f"{shown}; {_GIVE_CREDENTIALS}" if _NO_CREDENTIALS in shown else shown


@contextmanager
def storage_errors(uri: str) -> Iterator[None]:
    """Raise ReceiverUnavailableError for deltalake's errors from storage or damage.

    Use it around every call that queries a table, because even looking up a number may read the
    log. Also use it around every call that builds columns: a panic in Rust, there or in a write,
    is not an `Exception`, so an `except Exception` would not catch it.
    """
    try:
        yield
    except (DeltaError, OSError) as error:
        raise ReceiverUnavailableError(f"store {uri}: {explain(error, uri)}") from error
    except BaseException as error:
        if type(error) is Exception:  # DataFusion's errors do not have their own class
            cause = unfold(error)[:_SHOWN_CHARACTERS]
            message = f"store {uri}: cannot read its rows: {cause}; {_REPAIR}"
            raise ReceiverUnavailableError(message) from error
        if not is_panic(error):
            raise
        message = f"store {uri}: the writer failed: {first_line_of(error)[:300]}"
        raise ReceiverUnavailableError(message) from error


def announce(offsets: Mapping[str, int]) -> dict[str, str]:
    """Return the part of `commitInfo` that announces the offsets in the same commit."""
    return {ANNOUNCEMENT: json.dumps(dict(sorted(offsets.items())))}


def is_complete(
    history: Iterable[Mapping[str, Any]], offset_of: Callable[[str], int | None]
) -> bool:
    """Return whether the table has the offsets that the commits of its history announce.

    Offsets only grow, so a later commit's offset is enough. A commit without an announcement, such
    as a compaction, counts as complete.
    """
    for commit in history:
        for stream, offset in _announced(commit).items():
            stored = offset_of(stream)
            if stored is None or stored < offset:
                return False
    return True


def explain_incomplete(uri: str) -> str:
    """Return the error for a table with an incomplete history, and what to do."""
    return f"{_damaged(uri)}; its last lines, the offsets of its rows, are missing"


def _announced(commit_info: Mapping[str, Any]) -> dict[str, int]:
    announced: dict[str, int] = json.loads(commit_info.get(ANNOUNCEMENT, "{}"))
    return announced


def _damaged(uri: str) -> str:
    files = ", ".join(damaged_files(uri)) or "one of the newest files of _delta_log"
    return f"its log is damaged ({files}); {_REPAIR}"


def is_panic(error: BaseException) -> bool:
    """Return whether Rust has panicked; each of its libraries has its own exception class."""
    return type(error).__name__ == "PanicException"


def first_line_of(error: BaseException) -> str:
    """Return the first line of an error, without the backtrace from Rust that follows."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def damaged_files(uri: str) -> list[str]:
    """Return the names of commits and checkpoints that were cut short, the newest last.

    Looks only at a store in a local directory; returns nothing for any other.
    """
    parts = urlsplit(uri)
    if parts.scheme not in {"", "file"}:
        return []  # an object store writes whole objects or nothing
    folder = Path(unquote(parts.path) if parts.scheme else uri)
    log, damaged = folder / "_delta_log", list[str]()
    # If the directory cannot be read, only the files found so far are returned.
    with suppress(OSError):
        # A checkpoint replaces all commits before it, so only the newest commits are ever read.
        for commit in sorted(log.glob("*.json"))[-_NEWEST_COMMITS:]:
            if not _is_whole_commit(commit):
                damaged.append(commit.name)
        for checkpoint in log.glob("*.checkpoint*.parquet"):
            if not _is_whole_parquet(checkpoint):
                damaged.append(checkpoint.name)
    return sorted(damaged)


def _is_whole_commit(path: Path) -> bool:
    try:
        actions = [json.loads(line) for line in path.read_bytes().splitlines()]
    except ValueError:
        return False
    if not all(isinstance(action, dict) for action in actions):
        return False
    announced: set[str] = set()
    for action in actions:
        announced |= _announced(action.get("commitInfo", {})).keys()
    return announced <= {action["txn"]["appId"] for action in actions if "txn" in action}


def _is_whole_parquet(path: Path) -> bool:
    # Parquet has a marker at both ends and is written from the front, so a cut file lacks the last.
    with path.open("rb") as file:
        if file.read(len(_PARQUET)) != _PARQUET:
            return False
        file.seek(-len(_PARQUET), 2)
        return file.read() == _PARQUET
