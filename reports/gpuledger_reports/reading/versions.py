"""Versions of nodes and namespaces, and the version in force at a time.

Pure. `gpuledger.store.views` contains the same rules in SQL.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar


class NodeVersion(NamedTuple):
    """The facts about a node that hold from a given time on."""

    since_us: int
    deleted_us: int | None
    node_pool: str | None = None
    instance_type: str | None = None
    zone: str | None = None
    region: str | None = None
    capacity_type: str | None = None
    labels: str | None = None


class NamespaceVersion(NamedTuple):
    """The facts about a namespace that hold from a given time on."""

    since_us: int
    deleted_us: int | None
    labels: str | None = None
    annotations: str | None = None


V = TypeVar("V", NodeVersion, NamespaceVersion)


def effective_versions(versions: Iterable[V]) -> list[V]:
    """Return the versions that are in force at some time, each with the start of that time.

    `versions` must be ordered by the time at which they came into force. If several have the same
    time, the last one counts. A deletion keeps the earlier facts that it does not contain.

    If the object was recreated, its new version is in force from the deletion on. The reason is the
    hour in which the object was recreated: it contains usage of the new object only, although the
    deleted object still existed when the hour began.
    """
    found: list[V] = []
    for version in {version.since_us: version for version in versions}.values():
        before = found[-1] if found else None
        if before is None:
            found.append(version)
        elif before.deleted_us is None:
            is_deletion = version.deleted_us is not None
            found.append(_with_facts_of(before, version) if is_deletion else version)
        elif version.deleted_us is None:
            # If the deletion is the first version, it stays in force for the time before it.
            if len(found) > 1:
                found.pop()
            found.append(version._replace(since_us=before.since_us))
    return found


def version_at(versions: Sequence[V], time_us: int) -> V:
    """Return the version in force at a time; before the first version, the first one.

    The object may have existed, and may have been used, before its first record.
    """
    at = bisect_right(versions, time_us, key=lambda version: version.since_us)
    return versions[max(0, at - 1)]


def _with_facts_of(before: V, deletion: V) -> V:
    facts = zip(before, deletion, strict=True)
    return type(deletion)._make(old if new is None else new for old, new in facts)
