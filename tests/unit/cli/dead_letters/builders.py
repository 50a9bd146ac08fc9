"""A bus in memory with dead letters on it."""

from typing import Any

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Bus, Record
from gpuledger.clock import NS_PER_MS
from gpuledger.codec import encode
from gpuledger.dead_letter_queue import DeadLetterQueue
from gpuledger.keys import node_key
from gpuledger.records import GpuEvent, NodeSample
from gpuledger.topics import partition_of_node
from gpuledger_cli.dead_letters.dead_letter_log import (
    DeadLetterFilter,
    DeadLetterLog,
    StoredDeadLetter,
)
from gpuledger_sinks.registry import REMOTE_WRITE
from tests.default_topics import DEAD_LETTERS, EVENTS, SAMPLES
from tests.unit.sinks.builders import PARTITIONS, START_NS

JOIN = "gpuledger-join"


def record_of(
    value: GpuEvent | NodeSample | bytes | None, *, offset: int = 0, partitions: int = PARTITIONS
) -> Record:
    """Return the record of an event or a tick in its partition; bytes are in that of no node."""
    if value is None or isinstance(value, bytes):
        return Record(EVENTS.name, 0, offset, 0, b"default/odd", value)
    topic = EVENTS if isinstance(value, GpuEvent) else SAMPLES
    key = node_key(value)
    partition = partition_of_node(key, partitions=partitions)
    time_ms = value.time_ns // NS_PER_MS
    return Record(topic.name, partition, offset, time_ms, key.encode(), encode(value))


async def reject(
    on: Bus,
    *records: Record,
    consumer: str = REMOTE_WRITE.group,
    reason: str = "rejected",
    detail: str = "why",
    time_ns: int = START_NS,
) -> None:
    """Reject records as a component does."""
    async with on.producer() as producer:
        queue = DeadLetterQueue(
            consumer=consumer,
            producer=producer,
            topic=DEAD_LETTERS,
            partitions=DEAD_LETTERS.partitions,
            time_ns=lambda: time_ns,
        )
        for record in records:
            queue.reject(record, reason=reason, detail=detail)
        await queue.flush()


async def found_dead_letters(on: MemoryBus, **wanted: Any) -> list[StoredDeadLetter]:  # noqa: ANN401  # a filter's
    """Return the dead letters that match a filter."""
    async with on.reader() as reader:
        log = await DeadLetterLog.open(reader, DEAD_LETTERS.name, DeadLetterFilter(**wanted))
        return [dead_letter async for dead_letter in log.dead_letters(lambda _count: None)]


async def found_offsets(on: MemoryBus, **wanted: Any) -> list[int]:  # noqa: ANN401  # as above
    """Return the positions of the dead letters that match a filter."""
    return [dead_letter.position.offset for dead_letter in await found_dead_letters(on, **wanted)]
