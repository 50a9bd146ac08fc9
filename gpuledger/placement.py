"""The placement of records: a node's records are in its partition, under its key. No I/O.

A pod's record is in its node's partition, but under the pod's key. Readers check this rule.
Otherwise, a client that may write to a topic could write records of a node to a partition that
another process reads, and both processes would count the node.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Final

from gpuledger.bus.protocol import Record
from gpuledger.dead_letter_queue import DeadLetterQueue
from gpuledger.topics import partition_of_node

# More nodes than a reader has. Cached, because hashing a name takes a tenth of a tick's time.
_MAX_NODES: Final = 65_536
_MAX_PARTITIONS: Final = 4_096
"""Number of partitions that are searched for the node's partition when a record is rejected."""

IsPlaced = Callable[[str, int], bool]
"""Takes a node's key and a partition; returns whether the node's records belong there."""


def placement_rule(*, partitions: int) -> IsPlaced:
    """Return the function that checks placement in topics with this number of partitions."""

    @lru_cache(maxsize=_MAX_NODES)
    def partition_of(node: str) -> int:
        return partition_of_node(node, partitions=partitions)

    return lambda node, partition: partition_of(node) == partition


def reject_misplaced(
    record: Record,
    *,
    node: str,
    key: str | None = None,
    is_placed: IsPlaced,
    dead_letters: DeadLetterQueue,
) -> bool:
    """Reject a record with a wrong key or in the wrong partition; return whether it was rejected.

    The key must be the node's key unless `key` is given. Only a foreign writer misplaces records.
    """
    key = key or node
    if record.key == key.encode() and is_placed(node, record.partition):
        return False
    detail = _explain_misplaced(record, node=node, key=key, is_placed=is_placed)
    dead_letters.reject(record, reason="misplaced", detail=detail)
    return True


def _explain_misplaced(record: Record, *, node: str, key: str, is_placed: IsPlaced) -> str:
    """Return a text with the record's node, its correct partition and key, and the actual ones."""
    home = next(
        (partition for partition in range(_MAX_PARTITIONS) if is_placed(node, partition)), "another"
    )
    found = "none" if record.key is None else repr(record.key.decode(errors="replace"))
    return (
        f"{record.topic}: a record of node {node} belongs in partition {home} under key {key!r};"
        f" it is in partition {record.partition} under key {found}"
    )
