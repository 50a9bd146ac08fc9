"""Reads events like any consumer of committed records, and records the age of each.

The age is the time by this machine's clock from the tick's time, which is the event's timestamp, to
when the reader has the event.
"""

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition

from tests.default_topics import EVENTS

_POLL_MS: Final = 200
_MAX_RECORDS: Final = 500


class EventsReader:
    """A consumer of all events that are committed from now on."""

    def __init__(self, consumer: AIOKafkaConsumer) -> None:
        self._consumer = consumer

    async def read(self) -> list[tuple[int, float]]:
        """Return each available event: its tick's time in milliseconds, its age in seconds."""
        polled: Mapping[TopicPartition, Sequence[ConsumerRecord]] = await self._consumer.getmany(
            timeout_ms=_POLL_MS, max_records=_MAX_RECORDS
        )
        now = time.time()
        return [
            (record.timestamp, now - record.timestamp / 1e3)
            for records in polled.values()
            for record in records
        ]


@asynccontextmanager
async def open_events_reader(servers: str) -> AsyncIterator[EventsReader]:
    """Yield a reader that is in no group."""
    consumer = AIOKafkaConsumer(
        bootstrap_servers=servers, isolation_level="read_committed", enable_auto_commit=False
    )
    await consumer.start()
    try:
        places = [TopicPartition(EVENTS.name, number) for number in range(EVENTS.partitions)]
        consumer.assign(places)
        await consumer.seek_to_end(*places)
        yield EventsReader(consumer)
    finally:
        await consumer.stop()
