"""The last word of a demo to its store: nothing comes any more, so it is complete to its end.

The join says how far a time is complete as ticks go on; of the last seconds of a run nobody says
it, and a bill of the store would end before them.
"""

from pathlib import Path
from typing import Final

from arro3.core import Table
from deltalake import CommitProperties, DeltaTable, write_deltalake

from gpuledger.store.commits import describe, latest_commits, marks_of_partitions
from gpuledger.store.schema import table_uri
from gpuledger.store.usage_schema import USAGE
from reports.usage_sums import UsageReader

_COMMITS: Final = 500
"""Commits in which is looked: of each partition one of the newest has it."""


def write_last_marks(store: Path) -> None:
    """Say that a store to which nobody writes any more is complete to the end of its usage."""
    table = DeltaTable(table_uri(str(store), USAGE.name))
    marks = marks_of_partitions(latest_commits(table, _COMMITS))
    until_us = UsageReader(str(store), is_finished=True).usage_end_us
    if all(mark >= until_us for mark in marks.values()):
        return
    told = describe(hours=(), valid_through=dict.fromkeys(marks, until_us))
    write_deltalake(
        table,
        Table.from_batches([], schema=USAGE.arrow),
        mode="append",
        commit_properties=CommitProperties(custom_metadata=told),
    )
