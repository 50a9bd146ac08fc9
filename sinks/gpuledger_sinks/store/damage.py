"""What deltalake's errors mean for who has to act, in one line.

A table whose newest commit or checkpoint was cut short (a full disk, a machine that lost power) can
be neither read nor written until that file is gone; docs/store.md says under "Repair" how. The
error names no file, so where the store is a folder it is looked for here.

A commit that was cut right behind a line is no error to deltalake: it has rows without their
offsets, which would be appended again. Therefore each commit announces in `commitInfo`, its first
line, the offsets of its last lines, and they are compared with those that the table has.
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
    "give the credentials of the object store in store.storage_options, in the environment"
    " (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) or by the machine's role"
)
_SHOWN_CHARACTERS: Final = 600
ANNOUNCEMENT: Final = "gpuledger.offsets"
"""What of a commit's `commitInfo` names the streams that it moves, and their offsets, in JSON."""
ANNOUNCED_COMMITS: Final = 10
"""How many of the newest commits are compared with what they announced: each is a file to read."""
_NEWEST_COMMITS: Final = 100
_PARQUET: Final = b"PAR1"


def explain(error: Exception, uri: str) -> str:
    """Return the first line of the error with its causes, and what to do about those we know."""
    first = first_line_of(error)
    if is_damage(first):
        return f"{_damaged(uri)}; deltalake says: {first[:300]}"
    shown = unfold(error)[:_SHOWN_CHARACTERS]
    return f"{shown}; {_GIVE_CREDENTIALS}" if _NO_CREDENTIALS in shown else shown


@contextmanager
def storage_errors(uri: str) -> Iterator[None]:
    """Raise ReceiverUnavailableError for what deltalake says of a storage or of damage.

    Whatever queries a table belongs in here: it may read the log, also where it only looks up a
    number. So does what makes columns: a panic of Rust's, there or in a write, is no `Exception`,
    and would end whoever does not wait for it.
    """
    try:
        yield
    except (DeltaError, OSError) as error:
        raise ReceiverUnavailableError(f"store {uri}: {explain(error, uri)}") from error
    except BaseException as error:
        if not is_panic(error):
            raise
        message = f"store {uri}: the writer failed: {first_line_of(error)[:300]}"
        raise ReceiverUnavailableError(message) from error


def announce(offsets: Mapping[str, int]) -> dict[str, str]:
    """Return what a commit's `commitInfo` says of the offsets that the same commit ends with."""
    return {ANNOUNCEMENT: json.dumps(dict(sorted(offsets.items())))}


def is_complete(
    history: Iterable[Mapping[str, Any]], offset_of: Callable[[str], int | None]
) -> bool:
    """Return whether the table has the offsets that the commits of its history announce.

    Offsets only grow, so that of a later commit will do. A commit that announces nothing, as a
    compaction, is taken for whole.
    """
    for commit in history:
        for stream, offset in _announced(commit).items():
            stored = offset_of(stream)
            if stored is None or stored < offset:
                return False
    return True


def explain_incomplete(uri: str) -> str:
    """Return what to do where the history of a table is not complete."""
    return f"{_damaged(uri)}; its last lines, the offsets of its rows, are missing"


def _announced(commit_info: Mapping[str, Any]) -> dict[str, int]:
    announced: dict[str, int] = json.loads(commit_info.get(ANNOUNCEMENT, "{}"))
    return announced


def _damaged(uri: str) -> str:
    files = ", ".join(damaged_files(uri)) or "one of the newest files of _delta_log"
    return f"its log is damaged ({files}): repair it as docs/store.md says under Repair"


def is_panic(error: BaseException) -> bool:
    """Return whether Rust has panicked: each of its libraries has a class of its own for that."""
    return type(error).__name__ == "PanicException"


def first_line_of(error: BaseException) -> str:
    """Return the first line of an error: what follows it is a backtrace of Rust's."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def damaged_files(uri: str) -> list[str]:
    """Return the names of commits and checkpoints that were cut short, the newest last.

    Only of a store that is a folder of this machine; of any other, nothing.
    """
    parts = urlsplit(uri)
    if parts.scheme not in {"", "file"}:
        return []  # an object store writes whole objects or none
    folder = Path(unquote(parts.path) if parts.scheme else uri)
    log, damaged = folder / "_delta_log", list[str]()
    # What can be said of a folder that cannot be read is what was found until then.
    with suppress(OSError):
        # A checkpoint stands for all before it, so that only the newest commits are ever read.
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
    # Parquet has its mark at both ends, and is written from the front: one that was cut has no end.
    with path.open("rb") as file:
        if file.read(len(_PARQUET)) != _PARQUET:
            return False
        file.seek(-len(_PARQUET), 2)
        return file.read() == _PARQUET
