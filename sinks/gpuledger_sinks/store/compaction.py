"""Merges the small files of a day into few; does not change rows.

Compaction is disabled if deltalake would let two processes compact the same files
(`is_compaction_safe`). Some released versions do, which would duplicate every row.
"""

import tempfile
from collections import Counter
from collections.abc import Sequence
from typing import Final

import structlog
from arro3.core import Array, DataType, Field, Schema, Table
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError

from gpuledger.settings.secret import shown_url
from gpuledger.store.schema import PARTITION_COLUMN, TableSchema
from gpuledger_sinks.errors import ReceiverUnavailableError
from gpuledger_sinks.store.damage import storage_errors
from gpuledger_sinks.store.table import StreamTable

_SMALL_BYTES: Final = 32 * 2**20
_MIN_FILES: Final = 8
"""Number of small files of a day, or of a table without days, at which they are merged."""
_SCRATCH: Final = ("/dev/shm", None)  # noqa: S108  # a unique directory is made in it
"""Directories for a temporary table; `None` is the system's temporary directory. Memory is tried
first: it may be a container's only writable directory, and a killed process leaves nothing on disk.
"""
_log = structlog.get_logger(__name__)


def is_compaction_safe(folders: Sequence[str | None] = _SCRATCH) -> bool:
    """Return whether deltalake refuses the second of two compactions of the same files.

    Tries it in the first of these directories that is writable; `None` is the system's temporary
    directory. Returns false if none is writable, because the answer is unknown.
    """
    for folder in folders:
        try:
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                return _is_refused_twice(scratch)
        except OSError as error:
            _log.info("compaction_untried", directory=folder, error=str(error))
    return False


def _is_refused_twice(folder: str) -> bool:
    schema = Schema([Field("number", DataType.int64(), nullable=False)])
    for number in range(4):
        column = Array([number], type=DataType.int64())
        write_deltalake(folder, Table.from_arrays([column], schema=schema), mode="append")
    # Both load the same files, so the second does not notice the compaction by the first.
    first, second = DeltaTable(folder), DeltaTable(folder)
    first.optimize.compact()
    try:
        second.optimize.compact()
    except CommitFailedError:
        return True
    counts = DeltaTable(folder).get_add_actions(flatten=True)["num_records"].to_pylist()
    return bool(sum(counts) == 4)  # noqa: PLR2004  # the rows written above


def small_files(table: StreamTable, schema: TableSchema) -> dict[str | None, int]:
    """Return the number of small files for each day that has many small files.

    For a table without days, the only key is `None`. Raises ReceiverUnavailableError if the storage
    does not answer.
    """
    with storage_errors(table.uri):
        actions = table.open().get_add_actions(flatten=True)
    sizes = actions["size_bytes"].to_pylist()
    days = (
        [str(day) for day in actions[f"partition.{PARTITION_COLUMN}"].to_pylist()]
        if schema.partition_by
        else [None] * len(sizes)
    )
    counts = Counter(day for day, size in zip(days, sizes, strict=True) if size < _SMALL_BYTES)
    return {day: count for day, count in counts.items() if count >= _MIN_FILES}


def compact(table: StreamTable, day: str | None) -> int:
    """Merge the small files of a day; return how many were removed.

    Returns 0 if another process changed the same files first. The table is loaded again, because
    another process may already have merged files of an older version. Raises
    ReceiverUnavailableError if the storage fails.
    """
    with storage_errors(table.uri):
        opened = table.open()
        try:
            merged = opened.optimize.compact(
                partition_filters=None if day is None else [(PARTITION_COLUMN, "=", day)],
                writer_properties=table.writer,
            )
        except CommitFailedError as error:
            _log.info("compaction_withdrawn", url=shown_url(table.uri), error=str(error))
            return 0
        except DeltaError as error:
            raise ReceiverUnavailableError(f"store {table.uri}: {error}") from error
    return int(merged["numFilesRemoved"])
