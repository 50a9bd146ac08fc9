"""Information in a commit's `commitInfo`, in addition to the offsets at which the commit ends.

Writers add two values as JSON, for readers of the table's history: the hours for which a commit
adds rows, and the time up to which the table is complete after it. Reading rows does not need them.

A table of sums records in transaction identifiers which version of its source table it includes
(`summed_up_to`), and when that version was made (`summed_time`). `hours_since` returns the hours
that later commits have changed.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import orjson
from arro3.core import Table
from deltalake import CommitProperties, DeltaTable, write_deltalake

HOURS: Final = "gpuledger.hours"
"""Hours since 1970 for which the commit has rows; commits without it may have rows of any hour."""
VALID_THROUGH: Final = "gpuledger.valid_through"
"""The marks of a commit: for each Kafka partition that the writer knows, by its number, the time up
to which the table is complete, in microseconds since the epoch."""
ALL: Final = "all"
"""Key of the lowest mark of all partitions, next to the keys of the single partitions. Only commits
that have the marks of all partitions have this key; readers ignore the commits before the newest
such commit."""
PURGED_BEFORE: Final = "gpuledger|purged_before"
"""Transaction identifier for the day since 1970 before which a table's rows have been purged."""
MARKED_COMMITS: Final = 500
"""Number of commits that are searched for marks. The newest commit may have none: merging files,
purging days and adding columns make commits without marks."""
_ADDS_ROWS: Final = "WRITE"


def summed_up_to(source: str) -> str:
    """Return the transaction identifier for the version of a table that has been summed up."""
    return f"gpuledger|{source}"


def summed_time(source: str) -> str:
    """Return the transaction identifier for the time (`made_ms`) of the summed-up version."""
    return f"{summed_up_to(source)}|time"


def latest_commits(table: DeltaTable, count: int) -> list[dict[str, Any]]:
    """Return up to `count` commits up to the loaded version, newest first.

    deltalake also returns commits after the loaded version, but numbers all commits as if the
    loaded version were the last.
    """
    count = min(count, table.version() + 1)
    if count <= 0:
        return []
    found = table.history(count)
    return found[max(0, len(found) - count) :]


def made_ms(commit: Mapping[str, Any]) -> int:
    """Return the time of a commit, in milliseconds since the epoch; 0 if unknown.

    The time distinguishes commits with the same number.
    """
    return int(commit.get("timestamp", 0))


def hours_since(commits: Iterable[Mapping[str, Any]]) -> set[int] | None:
    """Return the hours since 1970 for which commits have rows; `None` if unknown for one commit."""
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
    """Return the hours since 1970 for which a commit has rows; `None` if unknown."""
    properties = commit.get(HOURS)
    return None if properties is None else set(orjson.loads(properties))


def complete_through_us(table: DeltaTable) -> dict[str, int]:
    """Return the time up to which each partition of a table's loaded version is complete.

    Times are in microseconds since the epoch.
    """
    return valid_through_us(latest_commits(table, MARKED_COMMITS))


def valid_through_us(history: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the time up to which each partition is complete, from the marks of the commits.

    `history` has the newest commit first. Completeness is never lost, so the latest time of each
    partition counts. Commits older than one with the marks of all partitions are ignored.
    """
    found: dict[str, int] = {}
    for commit in history:
        marks = orjson.loads(commit.get(VALID_THROUGH, "{}"))
        found = latest_marks(found, marks)
        if ALL in marks:
            break
    return found


def marks_of_partitions(history: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return `valid_through_us` without the key `ALL`."""
    marks = valid_through_us(history)
    marks.pop(ALL, None)
    return marks


def mark_complete(table: DeltaTable, until_us: int) -> None:
    """Make a commit without rows that marks a table as complete up to a time in all partitions.

    Call this only if nothing writes to the table any more. It does nothing if no partition has a
    mark.
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
    """Return the later of the two marks of each partition."""
    return {
        name: max(marks[name] for marks in (some, others) if name in marks)
        for name in sorted({*some, *others})
    }
