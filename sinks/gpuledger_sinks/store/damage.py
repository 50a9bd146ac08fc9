"""Explains deltalake's errors in one line for the operator, and detects damaged tables.

A table whose newest commit or checkpoint was cut short (full disk, power failure) can be neither
read nor written until that file is removed; see "Repair a table" in docs/guides/store.md. The error
of deltalake does not name the file; `gpuledger.store.damaged_files` finds it in a local directory.

deltalake accepts a commit that was cut off right after a line. Such a commit contains rows without
their offsets, so the rows would be appended again. The offsets are in the last lines of a commit.
Each commit therefore also announces them in `commitInfo`, its first line, and these announcements
are compared with the table's offsets.
"""

import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final

from deltalake.exceptions import DeltaError

from gpuledger.store.damaged_files import (
    ANNOUNCEMENT,
    announced_offsets,
    damaged_log_files,
    local_folder,
)
from gpuledger.store.query import REPAIR, is_damage, unfold
from gpuledger_sinks.errors import DiskFullError, ReceiverUnavailableError

_NO_CREDENTIALS: Final = "loading credentials"
_GIVE_CREDENTIALS: Final = (
    "set the credentials of the object store in store.storage_options, in the environment"
    " (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) or by the machine's role"
)
_NO_SPACE: Final = os.strerror(errno.ENOSPC)
_SHOWN_CHARACTERS: Final = 600
ANNOUNCED_COMMITS: Final = 10
"""Number of newest commits whose announcements are checked; each is a file to read."""


def explain(error: Exception, uri: str) -> str:
    """Describe an error and its causes in one line, with the action for known errors."""
    first = first_line_of(error)
    if is_damage(first):
        return f"{_damaged(uri)}; error of deltalake: {first[:300]}"
    shown = unfold(error)[:_SHOWN_CHARACTERS]
    return f"{shown}; {_GIVE_CREDENTIALS}" if _NO_CREDENTIALS in shown else shown


@contextmanager
def storage_errors(uri: str) -> Iterator[None]:
    """Convert deltalake's errors about storage or a damaged table to ReceiverUnavailableError.

    Use it around every call that queries a table, because even looking up a version number may read
    the log. Also use it around every call that builds columns: a panic in Rust, there or in a
    write, is not an `Exception`, so an `except Exception` would not catch it.
    """
    try:
        yield
    except (DeltaError, OSError) as error:
        cause = explain(error, uri)
        if _NO_SPACE in cause:
            raise DiskFullError(f"store {uri}: {cause}") from error
        # If a full disk prevents the creation of a table, deltalake only reports that the table has
        # no log.
        if is_disk_full(uri):
            raise DiskFullError(f"store {uri}: {_NO_SPACE}: {cause}") from error
        raise ReceiverUnavailableError(f"store {uri}: {cause}") from error
    except BaseException as error:
        if type(error) is Exception:  # DataFusion's errors do not have their own class
            cause = unfold(error)[:_SHOWN_CHARACTERS]
            message = f"store {uri}: cannot read its rows: {cause}; {REPAIR}"
            raise ReceiverUnavailableError(message) from error
        if not is_panic(error):
            raise
        message = f"store {uri}: the writer failed: {first_line_of(error)[:300]}"
        raise ReceiverUnavailableError(message) from error


def announce(offsets: Mapping[str, int]) -> dict[str, str]:
    """Return the entry of `commitInfo` that announces the offsets of a commit by stream."""
    return {ANNOUNCEMENT: json.dumps(dict(sorted(offsets.items())))}


def is_complete(
    history: Iterable[Mapping[str, Any]], offset_of: Callable[[str], int | None]
) -> bool:
    """Return whether the table has the offsets that the commits of its history announce.

    Offsets only grow, so a higher offset from a later commit is sufficient. A commit without an
    announcement, such as a compaction, counts as complete.
    """
    for commit in history:
        for stream, offset in announced_offsets(commit).items():
            stored = offset_of(stream)
            if stored is None or stored < offset:
                return False
    return True


def explain_incomplete(uri: str) -> str:
    """Return the error message for a table for which `is_complete` is false."""
    return f"{_damaged(uri)}; its last lines, the offsets of its rows, are missing"


def _damaged(uri: str) -> str:
    files = ", ".join(damaged_log_files(uri)) or "one of the newest files of _delta_log"
    return f"its log is damaged ({files}); {REPAIR}"


def is_panic(error: BaseException) -> bool:
    """Return whether an error is a panic in Rust; each Rust library has its own exception class."""
    return type(error).__name__ == "PanicException"


def first_line_of(error: BaseException) -> str:
    """Return the first line of an error, without the backtrace from Rust that follows."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def is_disk_full(uri: str) -> bool:
    """Return whether the file system of a local store has no space or no inode left."""
    if (folder := local_folder(uri)) is None:
        return False
    with suppress(OSError):
        # Use `f_bavail`, because `f_bfree` would include the space reserved for root. File systems
        # without a fixed number of blocks or inodes report a total of 0.
        disk = os.statvfs(next(each for each in (folder, *folder.parents) if each.exists()))
        has_blocks = disk.f_blocks == 0 or disk.f_bavail > 0
        return not (has_blocks and (disk.f_files == 0 or disk.f_favail > 0))
    return False
