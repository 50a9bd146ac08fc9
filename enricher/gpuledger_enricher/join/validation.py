"""What a well-formed record must still hold: it lies where it belongs, and its fields agree. Pure.

A record of a node lies in the node's partition under the node's key, a pod's in its node's under
its own. Whoever may write elsewhere could speak for a node whose records other workers read.

Types of a tick are checked by decoding; here stand the rules between fields. Nothing is repaired.
The rules on positions cost nothing where they hold: booking a tick that breaks one runs into it.
A GPU, an instance or a container that stands in a tick twice would be booked twice, and nobody can
tell which of the two is true: such a tick is refused whole, as any other that contradicts itself.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Final

from gpuledger.bus.protocol import Record
from gpuledger.errors import GpuledgerError
from gpuledger.records import GpuBooks, LateAdjustment, NodeSample
from gpuledger.topics import partition_of_node
from gpuledger_enricher.join.booking.books import book_tick
from gpuledger_enricher.join.booking.late_adjustments import adjust_ends
from gpuledger_enricher.join.booking.shares import RepeatedContainerError


class InvalidTickError(GpuledgerError):
    """A tick whose fields contradict one another; the message names field, value and rule."""


def book_valid_tick(sample: NodeSample) -> list[GpuBooks]:
    """Return the books of a tick; raises `InvalidTickError` where it cannot be booked."""
    if sample.interval_ns <= 0:
        raise InvalidTickError(f"field interval_ns: {sample.interval_ns} is no length of time")
    if len({reading.uuid for reading in sample.gpus}) < len(sample.gpus):
        raise InvalidTickError(_explain_repeated_gpu(sample))
    try:
        return book_tick(sample)
    except IndexError as error:
        raise InvalidTickError(_explain_position(sample)) from error
    except RepeatedContainerError as error:
        (position,) = error.args
        raise InvalidTickError(
            f"field containers[{position}]: the container stands there more than once"
        ) from error


def adjust_valid_ends(sample: NodeSample) -> list[LateAdjustment] | None:
    """Return the late adjustments of a tick; raises `InvalidTickError` if they are invalid."""
    try:
        return adjust_ends(sample)
    except IndexError as error:
        raise InvalidTickError(_explain_position(sample)) from error


def _explain_position(sample: NodeSample) -> str:
    tables = {"gpu": len(sample.gpus), "container": len(sample.containers)}
    lists = {"processes": sample.processes, "ended_processes": sample.ended_processes or ()}
    wrong = (
        f"field {listed}[{index}].{name}: {position} is no position in {name}s ({size})"
        for listed, processes in lists.items()
        for index, process in enumerate(processes)
        for name, size in tables.items()
        if (position := getattr(process, name)) is not None and position >= size
    )
    return next(wrong)


def _explain_repeated_gpu(sample: NodeSample) -> str:
    uuids = [reading.uuid for reading in sample.gpus]
    repeated = next(position for position, uuid in enumerate(uuids) if uuids.index(uuid) < position)
    return f"field gpus[{repeated}].uuid: {uuids[repeated]!r} stands there more than once"


# More than a worker has nodes; hashing a name in Python costs as much as a tenth of a tick.
_MAX_NODES: Final = 65_536
_MAX_PARTITIONS: Final = 4_096
"""Which of so many is a node's is looked for, where that is to be told."""

IsPlaced = Callable[[str, int], bool]
"""Whether the records of a node, given by its key, lie in a partition."""


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
