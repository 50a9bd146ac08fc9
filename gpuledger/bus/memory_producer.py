"""The publishing end of the bus in memory."""

import asyncio
from collections.abc import Mapping, Sequence

from gpuledger.bus.limits import refuse_too_large
from gpuledger.bus.memory_log import PartitionLog
from gpuledger.bus.protocol import Message, TopicPartition
from gpuledger.errors import TopicsError


class MemoryProducer:
    """Appends batches to partitions, each batch whole or not at all."""

    def __init__(self, *, logs: Mapping[TopicPartition, PartitionLog]) -> None:
        self._logs = logs

    async def publish(self, topic: str, partition: int, messages: Sequence[Message]) -> None:
        """Publish the messages; `TopicsError` where the topic or the partition does not exist."""
        check_batch(self._logs, TopicPartition(topic, partition), messages).append(messages)
        # A publisher that never waits would keep every consumer from running.
        await asyncio.sleep(0)


def check_batch(
    logs: Mapping[TopicPartition, PartitionLog], place: TopicPartition, messages: Sequence[Message]
) -> PartitionLog:
    """Return the log that takes the messages; `TopicsError` or `MessageTooLargeError` if none."""
    log = logs.get(place)
    if log is None:
        raise TopicsError(
            f"there is no partition {place.partition} of a topic {place.topic!r} on this bus"
        )
    refuse_too_large(place.topic, messages)
    if log.compacted and any(message.key is None for message in messages):
        raise TopicsError(f"{place.topic} is compacted: each message on it needs a key")
    return log
