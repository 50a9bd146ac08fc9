"""What the sinks of one group know of each node, in a compacted topic of their own: how it is read.

A record lies in the partition of the node's events, under `<group>/<cluster>/<node>`; the newest of
a key counts, and one without a value says that there is nothing any more.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

from gpuledger.bus.protocol import HistoryReader, TopicPartition
from gpuledger.codec import decoder_of
from gpuledger.errors import UndecodableError
from gpuledger.keys import group_key


class StateRecord(Protocol):
    """What is known of a node."""

    @property
    def time_ns(self) -> int:
        """Time of the last tick that it counts, nanoseconds since the epoch."""


StateT = TypeVar("StateT", bound=StateRecord)


async def read_states(
    reader: HistoryReader,
    at: TopicPartition,
    record: type[StateT],
    *,
    group: str,
    skip: Callable[[str, UndecodableError], None],
) -> dict[str, StateT]:
    """Return the newest record of each node of a partition that is this group's, by its key.

    `skip` is told the key of a record that cannot be read, and why. Raises BusError.
    """
    decode = decoder_of(at.topic, record).decode
    own = group_key(group, "")
    found: dict[str, StateT] = {}
    span = (await reader.spans(at.topic)).get(at)
    if span is None or span.first >= span.end:
        return found
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
                skip(key, error)
    return found


def take_outdated(found: dict[str, StateT], *, kept_ns: int) -> list[str]:
    """Take out the nodes that are further behind the newest than that; return their keys."""
    newest_ns = max((state.time_ns for state in found.values()), default=0)
    outdated = [node for node, state in found.items() if newest_ns - state.time_ns > kept_ns]
    for node in outdated:
        del found[node]
    return outdated
