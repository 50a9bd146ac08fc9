"""What a commit says of itself in its `commitInfo`, beside the offsets that it ends with.

Writers put it there, in JSON; whoever reads the table's history finds it: which hours a commit
brought rows of, and up to when the table is complete with it. Nothing here is needed to read rows.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import orjson

HOURS: Final = "gpuledger.hours"
"""The hours of which the commit has rows, since 1970; commits without it may have rows of any."""
VALID_THROUGH: Final = "gpuledger.valid_through"
"""Up to when the table is complete, in microseconds since the epoch: of each of Kafka's partitions
that its writer knows of, by the partition's number."""


def describe(
    *, hours: Iterable[int] | None = None, valid_through: Mapping[str, int] | None = None
) -> dict[str, str]:
    """Return what a commit's `commitInfo` has of this; nothing of what is not known."""
    # Texts: `commitInfo` may hold anything, but deltalake writes texts alone.
    told: dict[str, str] = {}
    if hours is not None:
        told[HOURS] = orjson.dumps(sorted(hours)).decode()
    if valid_through:
        told[VALID_THROUGH] = orjson.dumps(valid_through, option=orjson.OPT_SORT_KEYS).decode()
    return told


def hours_of(commit: Mapping[str, Any]) -> set[int] | None:
    """Return the hours of which a commit has rows; `None` where it does not say."""
    told = commit.get(HOURS)
    return None if told is None else set(orjson.loads(told))


def valid_through_us(history: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return up to when each partition is complete, by a table's history, the newest commit first.

    What was complete stays so: of what several commits say of a partition the latest time counts.
    """
    found: dict[str, int] = {}
    for commit in history:
        for partition, until_us in orjson.loads(commit.get(VALID_THROUGH, "{}")).items():
            found[partition] = max(until_us, found.get(partition, until_us))
    return found
