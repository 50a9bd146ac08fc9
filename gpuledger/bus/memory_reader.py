"""Reads partitions kept in memory again, outside any group."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Final

from gpuledger.bus.log_reader import Span
from gpuledger.bus.memory_log import PartitionLog
from gpuledger.bus.protocol import Record, TopicPartition
from gpuledger.errors import TopicsError

MAX_RECORDS: Final = 500


class MemoryReader:
    """Reads any partition of any topic; what is not kept any more is left out."""

    def __init__(self, *, logs: Mapping[TopicPartition, PartitionLog]) -> None:
        self._logs = logs

    async def spans(self, topic: str) -> Mapping[TopicPartition, Span]:
        """Return what is kept of each partition; `TopicsError` where the topic does not exist."""
        found = {
            place: Span(log.first_offset, log.end_offset)
            for place, log in self._logs.items()
            if place.topic == topic
        }
        if not found:
            raise TopicsError(f"there is no topic {topic!r} on this bus")
        return found

    async def offsets_at(
        self, places: Iterable[TopicPartition], timestamp_ms: int
    ) -> Mapping[TopicPartition, int]:
        """Return, for each partition, the offset before which every record is older than that."""
        return {place: self._logs[place].offset_at(timestamp_ms) for place in places}

    async def read(
        self, place: TopicPartition, span: Span
    ) -> AsyncGenerator[Sequence[Record], None]:
        """Yield the records of a span in their order, some at a time."""
        position = span.first
        while records := self._logs[place].read(position, max_records=MAX_RECORDS):
            wanted = [record for record in records if record.offset < span.end]
            if not wanted:
                return
            # A reader that always finds records would keep every other task from running.
            await asyncio.sleep(0)
            yield wanted
            position = records[-1].offset + 1
