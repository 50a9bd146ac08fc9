"""The topic with the counters of each node: read when a partition is taken over, then written.

The topic `counters.v1` has one record for each consumer group and node, under the key
`<group>/<cluster>/<node>`. The record is in the partition with the same number as the partition of
the node's events. One transaction writes the changed counters and the group's offsets. Counters of
use are written after the receiver has answered; counters of incidents are written before they are
sent. A sink that resumes from this state therefore counts each tick and each incident once. Opening
a partition's transactions fences its previous owner. If two sinks consider themselves the owner,
only one of them can commit.

A record's timestamp is the time at which the sink wrote it, because brokers would reject a node's
time that is days ahead.
"""

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Final

import structlog
from msgspec.structs import replace

from gpuledger.bus.limits import MAX_MESSAGE_BYTES, size_bytes
from gpuledger.bus.protocol import Bus, HistoryReader, Message, Record, TopicPartition
from gpuledger.bus.transactional_writers import TransactionalWriters
from gpuledger.clock import NS_PER_DAY, NS_PER_MS, Clock
from gpuledger.codec import Decoder, decoder_of, encode
from gpuledger.errors import UndecodableError
from gpuledger.keys import group_key, node_key
from gpuledger.records import NodeCounters
from gpuledger.runtime.logs import Repeats
from gpuledger_sinks.remote_write.node_intervals import NodeIntervals

_KEPT_NS: Final = 2 * NS_PER_DAY
"""A record is deleted if it was written this long before the newest record of its partition."""
_FINISH_SECONDS: Final = 2.5
"""Time for a commit under way to finish when its partition is revoked."""
_log = structlog.get_logger(__name__)
_repeats: Final = Repeats()


class CounterState:
    """The counters that the state topic has for one consumer group."""

    def __init__(
        self, *, bus: Bus, group: str, writers: TransactionalWriters, clock: Clock
    ) -> None:
        self._bus, self._group, self._writers, self._clock = bus, group, writers, clock
        self._topic = bus.topics.counters
        self._outdated: dict[int, list[str]] = {}

    async def take_over(self, numbers: Iterable[int]) -> Mapping[int, Mapping[str, NodeCounters]]:
        """Fence the previous owners of these partitions; return their counters by node key.

        Raises `BusError`, after which the partitions must be taken over again.
        """
        wanted = list(numbers)
        await self._writers.open(wanted)
        async with self._bus.reader() as reader:
            return {number: await self._read(reader, number) for number in wanted}

    def __contains__(self, number: int) -> bool:
        """Return whether the partition is open, so that commits are possible."""
        return number in self._writers

    async def commit(
        self,
        number: int,
        changed: Iterable[NodeIntervals],
        *,
        offsets: Mapping[TopicPartition, int],
    ) -> None:
        """Write the counters of nodes and the offsets in one transaction.

        All partitions in `offsets` have the number `number`. Raises `BusError` or `FencedError`,
        after which the partition must be taken over again.
        """
        written_ms = self._clock.time_ns() // NS_PER_MS
        gone = (
            Message(key=key.encode(), value=None, timestamp_ms=written_ms)
            for key in self._outdated.pop(number, ())
        )
        # The last message per key wins, so the state of a node that has come back is not deleted.
        next_offset = offsets.get(TopicPartition(self._bus.topics.events.name, number))
        messages_of_nodes = (self._message(node, next_offset=next_offset) for node in changed)
        of_keys = {message.key: message for message in (*gone, *messages_of_nodes)}
        target = TopicPartition(self._topic.name, number)
        messages = {target: list(of_keys.values())} if of_keys else {}
        await self._writers.commit(number, messages, offsets=offsets)

    async def close(self, numbers: Iterable[int]) -> None:
        """Release partitions after a running commit has finished."""
        await self._writers.close(numbers)

    async def _read(self, reader: HistoryReader, number: int) -> dict[str, NodeCounters]:
        """Return this group's newest counters of each node of the partition.

        Counters older than `_KEPT_NS` are left out, and the next commit deletes them.
        """
        at = TopicPartition(self._topic.name, number)
        found: dict[str, NodeCounters] = {}
        written_ms: dict[str, int] = {}
        span = (await reader.spans(at.topic)).get(at)
        if span is not None and span.first < span.end:
            async for records in reader.read(at, span):
                for record in records:
                    if (node := self._node_of(record)) is None:
                        continue
                    if (counted := _decode(record)) is not None:
                        found[node], written_ms[node] = counted, record.timestamp_ms
                    else:
                        # An older record of the node is useless, because the events after its
                        # offset are not read again.
                        found.pop(node, None)
        newest_ms = max((written_ms[node] for node in found), default=0)
        gone = [node for node in found if newest_ms - written_ms[node] > _KEPT_NS // NS_PER_MS]
        self._outdated[number] = [group_key(self._group, node) for node in gone]
        return {node: counted for node, counted in found.items() if node not in gone}

    def _node_of(self, record: Record) -> str | None:
        """Return the key of a record's node, or `None` if the record belongs to another group."""
        key = (record.key or b"").decode(errors="replace")
        node = key.removeprefix(group_key(self._group, ""))
        # A node's key has one slash. More slashes mean a group whose name begins with this name.
        return None if node == key or node.count("/") != 1 else node

    def _message(self, node: NodeIntervals, *, next_offset: int | None) -> Message:
        while True:
            counted = replace(node.take_record(self._group), next_offset=next_offset)
            message = Message(
                key=group_key(self._group, node_key(counted)).encode(),
                value=encode(counted),
                timestamp_ms=self._clock.time_ns() // NS_PER_MS,
            )
            # Names may be long, and a record that is too large would abort every commit. The loop
            # ends, because a record without waiting use and series is much smaller than the limit.
            if size_bytes(message.key, message.value) <= MAX_MESSAGE_BYTES // 2:
                return message
            node.shrink()


def _decode(record: Record) -> NodeCounters | None:
    """Return a record's counters; `None` for a tombstone or an unreadable record."""
    if record.value is None:
        return None
    decoder: Decoder[NodeCounters] = decoder_of(record.topic, NodeCounters)
    try:
        return decoder.decode(record.value)
    except UndecodableError as error:
        # The node's counters restart, which readers see as a reset.
        if count := _repeats.count("counters"):
            key = (record.key or b"").decode(errors="replace")
            _log.warning("counters_skipped", key=key, count=count, error=str(error))
        return None


@asynccontextmanager
async def open_counter_state(*, bus: Bus, group: str, clock: Clock) -> AsyncIterator[CounterState]:
    """Open the state of a consumer group; leaving the context releases its partitions."""
    async with TransactionalWriters(
        bus=bus, group=group, finish_seconds=_FINISH_SECONDS
    ) as writers:
        yield CounterState(bus=bus, group=group, writers=writers, clock=clock)
