"""Whether a record lies where its own node, or podwatch for that node, would have written it.

A record of a node lies in the node's partition under the node's name, a pod's in its node's under
its UID. Whoever may write elsewhere could speak for a node whose records other workers read.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Final

from gpuledger.bus.protocol import Record
from gpuledger.topics import partition_of_node

# More than a worker has nodes; hashing a name in Python costs as much as a tenth of a tick.
_MAX_NODES: Final = 65_536
_MAX_PARTITIONS: Final = 4_096
"""Which of so many is a node's is looked for, where that is to be told."""

IsPlaced = Callable[[str, int], bool]
"""Whether the records of a node lie in a partition."""


def placement_rule(*, partitions: int) -> IsPlaced:
    """Return the rule of topics with so many partitions."""

    @lru_cache(maxsize=_MAX_NODES)
    def partition_of(node: str) -> int:
        return partition_of_node(node, partitions=partitions)

    return lambda node, partition: partition_of(node) == partition


def explain_misplaced(record: Record, *, node: str, key: str, is_placed: IsPlaced) -> str:
    """Return whose record it is, where it belongs, and where it lies."""
    home = next(
        (partition for partition in range(_MAX_PARTITIONS) if is_placed(node, partition)), "another"
    )
    found = "none" if record.key is None else repr(record.key.decode(errors="replace"))
    return (
        f"{record.topic}: a record of node {node} belongs in partition {home} under key {key!r};"
        f" it lies in partition {record.partition} under key {found}"
    )
