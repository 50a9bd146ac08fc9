"""What a commit says of itself in its `commitInfo`, beside the offsets that it ends with.

Writers put it there, in JSON; whoever reads the table's history finds it: which hours a commit
brought rows of, and up to when the table is complete with it. Nothing here is needed to read rows.

A table of sums says in transaction identifiers up to which version of the table below it goes
(`summed_up_to`), and when that version was made. Of what came since, `hours_since` tells.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import orjson
from arro3.core import Table
from deltalake import CommitProperties, DeltaTable, write_deltalake

HOURS: Final = "gpuledger.hours"
"""The hours of which the commit has rows, since 1970; commits without it may have rows of any."""
VALID_THROUGH: Final = "gpuledger.valid_through"
"""Up to when the table is complete, in microseconds since the epoch: of each of Kafka's partitions
that its writer knows of, by the partition's number."""
ALL: Final = "all"
"""Beside the partitions' marks: the least of them, of a commit that has those of all partitions.
Such a commit says all that is to be said; what older ones say does not count."""
PURGED_BEFORE: Final = "gpuledger|purged_before"
"""The transaction identifier of the day since 1970 before which a table has lost its rows."""
MARKED_COMMITS: Final = 500
"""Commits in which is looked for what they say of completeness. One of the newest has it of all
partitions that its writer knew; merged files, purged days and new columns have commits without."""
_ADDS_ROWS: Final = "WRITE"


def summed_up_to(source: str) -> str:
    """Return the transaction identifier of the version of a table that is summed up."""
    return f"gpuledger|{source}"


def summed_time(source: str) -> str:
    """Return the transaction identifier of when that version was made (`made_ms`)."""
    return f"{summed_up_to(source)}|time"


def latest_commits(table: DeltaTable, count: int) -> list[dict[str, Any]]:
    """Return so many commits up to the version that is loaded, the newest first.

    deltalake lists those that came since as well, and numbers all as if they had not.
    """
    count = min(count, table.version() + 1)
    if count <= 0:
        return []
    found = table.history(count)
    return found[max(0, len(found) - count) :]


def made_ms(commit: Mapping[str, Any]) -> int:
    """Return when a commit was made, by which it is known from another one of its number."""
    return int(commit.get("timestamp", 0))


def hours_since(commits: Iterable[Mapping[str, Any]]) -> set[int] | None:
    """Return the hours of which commits have rows; `None` where one of them does not say."""
    touched = set[int]()
    for commit in commits:
        # A compaction, a purge or a new column brings no rows.
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
    """Return what a commit's `commitInfo` has of this; nothing of what is not known."""
    # Texts: `commitInfo` may hold anything, but deltalake writes texts alone.
    properties: dict[str, str] = {}
    if hours is not None:
        properties[HOURS] = orjson.dumps(sorted(hours)).decode()
    if valid_through:
        properties[VALID_THROUGH] = orjson.dumps(
            valid_through, option=orjson.OPT_SORT_KEYS
        ).decode()
    return properties


def hours_of(commit: Mapping[str, Any]) -> set[int] | None:
    """Return the hours of which a commit has rows; `None` where it does not say."""
    properties = commit.get(HOURS)
    return None if properties is None else set(orjson.loads(properties))


def complete_through_us(table: DeltaTable) -> dict[str, int]:
    """Return up to when each partition is complete, as the table says that is loaded."""
    return valid_through_us(latest_commits(table, MARKED_COMMITS))


def valid_through_us(history: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return up to when each partition is complete, by a table's history, the newest commit first.

    What was complete stays so: of what several commits say of a partition the latest time counts,
    up to the first one that says it of all at once.
    """
    found: dict[str, int] = {}
    for commit in history:
        marks = orjson.loads(commit.get(VALID_THROUGH, "{}"))
        found = latest_marks(found, marks)
        if ALL in marks:
            break
    return found


def marks_of_partitions(history: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return what `valid_through_us` does, of partitions alone."""
    marks = valid_through_us(history)
    marks.pop(ALL, None)
    return marks


def mark_complete(table: DeltaTable, until_us: int) -> None:
    """Say in a commit without rows that a table is complete up to a time in all its partitions.

    For who knows that nobody writes to it any more; nothing where no partition has a mark.
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
    """Return of each partition the later of two marks."""
    return {
        name: max(marks[name] for marks in (some, others) if name in marks)
        for name in sorted({*some, *others})
    }
