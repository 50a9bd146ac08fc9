"""Information that writers add to the `commitInfo` of a Delta commit, in addition to its offsets.

Writers add two values as JSON: the hours for which the commit adds rows, and the time up to which
the table is complete after the commit. Only code that reads the table's history needs these values.

A table of sums, such as `usage_hourly`, is made from a source table. Two of its transaction
identifiers record the version of the source table that the sums include (`summed_up_to`), and the
time at which that version was made (`summed_time`). `hours_since` returns the hours for which later
commits have added rows.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import orjson
from arro3.core import Table
from deltalake import CommitProperties, DeltaTable, write_deltalake

HOURS: Final = "gpuledger.hours"
"""The hours for which the commit has rows, as hours since 1970. Commits without this value may have
rows of any hour."""
VALID_THROUGH: Final = "gpuledger.valid_through"
"""The marks of a commit. A mark is the time up to which the table is complete for one Kafka
partition, in microseconds since the epoch. A commit has a mark for each partition that the writer
knows, by the partition's number."""
ALL: Final = "all"
"""Key of the lowest mark of all partitions. A commit has this key only if it has the marks of all
partitions; readers ignore the commits before the newest such commit."""
PURGED_BEFORE: Final = "gpuledger|purged_before"
"""Transaction identifier for the day, as days since 1970, before which rows have been purged."""
MARKED_COMMITS: Final = 500
"""Number of commits that are searched for marks. The newest commit may have none: merging files,
purging days and adding columns make commits without marks."""
_ADDS_ROWS: Final = "WRITE"


def summed_up_to(source: str) -> str:
    """Return the name of the identifier for the summed-up version of the table `source`."""
    return f"gpuledger|{source}"


def summed_time(source: str) -> str:
    """Return the name of the identifier for the time (`made_ms`) of the summed-up version."""
    return f"{summed_up_to(source)}|time"


def latest_commits(table: DeltaTable, count: int) -> list[dict[str, Any]]:
    """Return the last `count` commits of a table, newest first, ending with the loaded version.

    deltalake also returns commits that were made after the table was loaded, and numbers all
    commits as if the loaded version were the last.
    """
    count = min(count, table.version() + 1)
    if count <= 0:
        return []
    found = table.history(count)
    return found[max(0, len(found) - count) :]


def made_ms(commit: Mapping[str, Any]) -> int:
    """Return the time of a commit, in milliseconds since the epoch; 0 if unknown.

    If a table is deleted and created again, the time distinguishes commits with the same number.
    """
    return int(commit.get("timestamp", 0))


def newest_ms(table: DeltaTable) -> int:
    """Return the time of a table's loaded version, in milliseconds since the epoch; 0 if unknown.

    A commit whose file is empty, as after a power failure, has no time.
    """
    return made_ms(next(iter(latest_commits(table, 1)), {}))


def hours_since(commits: Iterable[Mapping[str, Any]]) -> set[int] | None:
    """Return the hours for which the commits have added rows, as hours since 1970.

    Returns `None` if the hours of one commit are unknown.
    """
    touched = set[int]()
    for commit in commits:
        # Compactions, purges and new columns add no rows.
        if commit.get("operation") != _ADDS_ROWS:
            continue
        hours = hours_of(commit)
        if hours is None:
            return None
        touched |= hours
    return touched


def describe(
    *, hours: Iterable[int] | None = None, valid_through: Mapping[str, int] | None = None
) -> dict[str, str]:
    """Return the commit properties for these values; unknown values are left out."""
    # Encoded as texts, because deltalake writes only texts to `commitInfo`.
    properties: dict[str, str] = {}
    if hours is not None:
        properties[HOURS] = orjson.dumps(sorted(hours)).decode()
    if valid_through:
        properties[VALID_THROUGH] = orjson.dumps(
            valid_through, option=orjson.OPT_SORT_KEYS
        ).decode()
    return properties


def hours_of(commit: Mapping[str, Any]) -> set[int] | None:
    """Return the hours for which a commit has rows, as hours since 1970; `None` if unknown."""
    properties = commit.get(HOURS)
    return None if properties is None else set(orjson.loads(properties))


def complete_through_us(table: DeltaTable) -> dict[str, int]:
    """Return the time up to which each partition of a table's loaded version is complete.

    Times are in microseconds since the epoch.
    """
    return valid_through_us(latest_commits(table, MARKED_COMMITS))


def valid_through_us(history: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the time up to which each partition is complete, from the marks of the commits.

    `history` has the newest commit first. A partition that is complete up to a time stays complete,
    so each partition's latest mark counts. The newest commit with the marks of all partitions is
    the last one that is read.
    """
    found: dict[str, int] = {}
    for commit in history:
        marks = orjson.loads(commit.get(VALID_THROUGH, "{}"))
        found = latest_marks(found, marks)
        if ALL in marks:
            break
    return found


def marks_of_partitions(history: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the latest mark of each partition, as `valid_through_us`, without the key `ALL`."""
    marks = valid_through_us(history)
    marks.pop(ALL, None)
    return marks


def mark_complete(table: DeltaTable, until_us: int) -> None:
    """Make a commit without rows that marks all partitions as complete up to a time.

    Call this function only if nothing writes to the table any more. It does nothing if no partition
    has a mark, or if all partitions are already marked as complete up to this time.
    """
    marks = marks_of_partitions(latest_commits(table, MARKED_COMMITS))
    if all(mark_us >= until_us for mark_us in marks.values()):
        return
    properties = describe(hours=(), valid_through=dict.fromkeys(marks, until_us))
    write_deltalake(
        table,
        Table.from_batches([], schema=table.schema().to_arrow()),
        mode="append",
        commit_properties=CommitProperties(custom_metadata=properties),
    )


def latest_marks(some: Mapping[str, int], others: Mapping[str, int]) -> dict[str, int]:
    """Return the marks of all partitions in both mappings; the later one if a partition has two."""
    return {
        name: max(marks[name] for marks in (some, others) if name in marks)
        for name in sorted({*some, *others})
    }
