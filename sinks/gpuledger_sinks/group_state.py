"""What the sinks of one group know of each node, in a compacted topic of their own: how it is read.

A record lies in the partition of the node's events, under `<group>/<cluster>/<node>`; the newest of
a key counts, and one without a value says that there is nothing any more. Its timestamp is when the
sink wrote it, by the sink's clock: a node's may be wrong by days, and brokers take nothing that is
far ahead of theirs.
"""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from gpuledger.bus.protocol import HistoryReader, TopicPartition
from gpuledger.clock import NS_PER_MS
from gpuledger.codec import decoder_of
from gpuledger.errors import UndecodableError
from gpuledger.keys import group_key
from gpuledger.records.base import BaseRecord

StateT = TypeVar("StateT", bound=BaseRecord)


class GroupStates(NamedTuple, Generic[StateT]):
    """What was read of the nodes of a partition, by their keys."""

    states: dict[str, StateT]
    """The newest of each node."""
    outdated: list[str]
    """The nodes of which nothing was written for so long that they count no more."""


async def read_states(
    reader: HistoryReader,
    at: TopicPartition,
    record: type[StateT],
    *,
    group: str,
    kept_ns: int,
    skip: Callable[[str, UndecodableError], None],
) -> GroupStates[StateT]:
    """Return the records of a partition that are this group's.

    What was written `kept_ns` before the newest of them is outdated. `skip` is told the key of a
    record that cannot be read, and why. Raises BusError.
    """
    decode = decoder_of(at.topic, record).decode
    own = group_key(group, "")
    found: dict[str, StateT] = {}
    written_ms: dict[str, int] = {}
    span = (await reader.spans(at.topic)).get(at)
    if span is None or span.first >= span.end:
        return GroupStates(found, [])
    async for records in reader.read(at, span):
        for read in records:
            key = (read.key or b"").decode(errors="replace")
            node = key.removeprefix(own)
            # A node's key has one slash: with more it is of a group whose name begins alike.
            if node == key or node.count("/") != 1:
                continue
            # A tombstone that was not compacted away yet.
            if read.value is None:
                found.pop(node, None)
                continue
            try:
                found[node] = decode(read.value)
            except UndecodableError as error:
                # An older one is of an offset behind which nothing is read again.
                found.pop(node, None)
                skip(key, error)
                continue
            written_ms[node] = read.timestamp_ms
    newest_ms = max((written_ms[node] for node in found), default=0)
    outdated = [node for node in found if newest_ms - written_ms[node] > kept_ns // NS_PER_MS]
    return GroupStates(
        {node: state for node, state in found.items() if node not in outdated}, outdated
    )
