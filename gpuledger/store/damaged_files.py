"""Finds the damaged files of a table in a local directory, for the operator who repairs it.

A full disk or a power failure can cut short the newest file of a table, and a restored copy can
lack files. deltalake's errors do not name these files, and it does not look at files with rows
before they are queried. An object store writes whole objects or nothing, so it is not searched.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from deltalake import DeltaTable

ANNOUNCEMENT: Final = "gpuledger.offsets"
"""The key in `commitInfo` whose value is the commit's offset of each stream, as JSON."""
LOG: Final = "_delta_log"
LAST_CHECKPOINT: Final = "_last_checkpoint"
_DIGITS: Final = 20
_VERSION: Final = "[0-9]" * _DIGITS
_NEWEST_COMMITS: Final = 100
_PARQUET: Final = b"PAR1"


def local_folder(uri: str) -> Path | None:
    """Return the directory of a store or table on this machine; `None` for an object store."""
    parts = urlsplit(uri)
    if parts.scheme not in {"", "file"}:
        return None
    return Path(unquote(parts.path) if parts.scheme else uri)


def announced_offsets(commit_info: Mapping[str, Any]) -> dict[str, int]:
    """Return the offsets that a commit announces, by stream; empty if it announces none."""
    announced: dict[str, int] = json.loads(commit_info.get(ANNOUNCEMENT, "{}"))
    return announced


def damaged_log_files(uri: str) -> list[str]:
    """Return the names of damaged and missing commits and checkpoints, the newest last."""
    if (folder := local_folder(uri)) is None:
        return []
    log, damaged = folder / LOG, list[str]()
    # If the directory cannot be read, only the files found so far are returned.
    with suppress(OSError):
        # A checkpoint replaces all earlier commits, so deltalake reads only the newest commits.
        commits = sorted(log.glob(f"{_VERSION}*.json"))[-_NEWEST_COMMITS:]
        damaged += [commit.name for commit in commits if not _is_whole_commit(commit)]
        checkpoints = list(log.glob(f"{_VERSION}.checkpoint*.parquet"))
        damaged += [each.name for each in checkpoints if not _is_whole_parquet(each)]
        damaged += _missing(map(_version, commits), checkpoints=map(_version, checkpoints))
        if not checkpoints and (log / LAST_CHECKPOINT).exists():
            damaged.append(f"the checkpoint of {LAST_CHECKPOINT} (missing)")
    return sorted(damaged)


def lacks_log(uri: str) -> bool:
    """Return whether a directory has files with rows but no log, so that it is not a table."""
    folder = local_folder(uri)
    if folder is None or any((folder / LOG).glob("*.json")):
        return False
    return next(folder.rglob("*.parquet"), None) is not None


def damaged_row_files(table: DeltaTable) -> Iterator[str]:
    """Yield the paths of a table's current files that are missing or have another size."""
    if (folder := local_folder(table.table_uri)) is None:
        return
    actions = table.get_add_actions(flatten=True)
    files = zip(actions["path"].to_pylist(), actions["size_bytes"].to_pylist(), strict=True)
    for path, size_bytes in files:
        file = folder / unquote(path)
        try:
            found_bytes = file.stat().st_size
        except FileNotFoundError:
            yield f"{unquote(path)} is missing"
        else:
            if found_bytes != size_bytes:
                yield f"{unquote(path)} has {found_bytes} of {size_bytes} bytes"


def _missing(versions: Iterable[int], *, checkpoints: Iterable[int]) -> Iterator[str]:
    """Yield the names of missing commits before the newest commit and after the checkpoints."""
    found = set(versions)
    begin = max(max(checkpoints, default=-1) + 1, min(found, default=0))
    for version in range(begin, max(found, default=0)):
        if version not in found:
            yield f"{version:020}.json (missing)"


def _version(file: Path) -> int:
    return int(file.name[:_DIGITS])


def _is_whole_commit(path: Path) -> bool:
    try:
        actions = [json.loads(line) for line in path.read_bytes().splitlines()]
    except ValueError:
        return False
    if not all(isinstance(action, dict) for action in actions):
        return False
    announced: set[str] = set()
    for action in actions:
        announced |= announced_offsets(action.get("commitInfo", {})).keys()
    return announced <= {action["txn"]["appId"] for action in actions if "txn" in action}


def _is_whole_parquet(path: Path) -> bool:
    # A Parquet file has a marker at both ends; a file that was cut short lacks the last one.
    with path.open("rb") as file:
        if file.read(len(_PARQUET)) != _PARQUET:
            return False
        file.seek(-len(_PARQUET), 2)
        return file.read() == _PARQUET
