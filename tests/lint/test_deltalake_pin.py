"""The reason for deltalake's upper bound: releases that fail this test must not be allowed."""

from pathlib import Path

import pytest
from arro3.core import Array, DataType, Field, Schema, Table
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError

SCHEMA = Schema([Field("row", DataType.int64())])


def test_the_locked_deltalake_rejects_a_compaction_that_starts_from_a_stale_snapshot(
    tmp_path: Path,
) -> None:
    for row in range(3):
        rows = Table.from_arrays([Array([row], DataType.int64())], schema=SCHEMA)
        write_deltalake(tmp_path, rows, mode="append")
    first, second = DeltaTable(tmp_path), DeltaTable(tmp_path)
    first.optimize.compact()

    with pytest.raises(CommitFailedError):
        second.optimize.compact()

    assert DeltaTable(tmp_path).count() == 3
