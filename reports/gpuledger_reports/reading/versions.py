"""What was said of nodes and namespaces, and which of it holds at a time: as a query finds it.

Pure. `gpuledger.store.views` has the same rule in SQL.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar


class NodeVersion(NamedTuple):
    """What was said of a node from a time on."""

    since_us: int
    deleted_us: int | None
    node_pool: str | None = None
    instance_type: str | None = None
    zone: str | None = None
    region: str | None = None
    capacity_type: str | None = None
    labels: str | None = None


class NamespaceVersion(NamedTuple):
    """What was said of a namespace from a time on."""

    since_us: int
    deleted_us: int | None
    labels: str | None = None
    annotations: str | None = None


V = TypeVar("V", NodeVersion, NamespaceVersion)


def effective_versions(versions: Iterable[V]) -> list[V]:
    """Return the versions that hold at some time, each with the time from which it does.

    `versions` has them by the times at which they came into force, and of one time the newest last,
    which alone holds. What was deleted is what it was before, as far as its deletion does not say
    it. Where it was made anew the new one holds from the deletion on: an hour in which it was made
    has usage of that one alone, although the deleted one was in force when the hour began.
    """
    found: list[V] = []
    for version in {version.since_us: version for version in versions}.values():
        before = found[-1] if found else None
        if before is None:
            found.append(version)
        elif before.deleted_us is None:
            is_deletion = version.deleted_us is not None
            found.append(_with_words_of(before, version) if is_deletion else version)
        elif version.deleted_us is None:
            # A deletion before which nothing is known keeps the time before it.
            if len(found) > 1:
                found.pop()
            found.append(version._replace(since_us=before.since_us))
    return found


def version_at(versions: Sequence[V], time_us: int) -> V:
    """Return the version that holds at a time; before the first one, that one.

    Whoever says what nodes are was late then, the node was not.
    """
    at = bisect_right(versions, time_us, key=lambda version: version.since_us)
    return versions[max(0, at - 1)]


def _with_words_of(before: V, deletion: V) -> V:
    words = zip(before, deletion, strict=True)
    return type(deletion)._make(old if new is None else new for old, new in words)
