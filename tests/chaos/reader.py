"""The reader of events: what a consumer with `isolation.level=read_committed` sees.

It is in no group and keeps its own position, so an event that it reads twice is on the topic twice.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from tests.default_topics import EVENTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiokafka import ConsumerRecord

    from tests.chaos.tally import Tally

_POLL_MS: Final = 500
_MAX_RECORDS: Final = 400
_AGAIN_SECONDS: Final = 1.0
_END_SECONDS: Final = 5.0


class _Event(msgspec.Struct, frozen=True, gc=False):
    """The id of an event."""

    node: str
    boot_id: str
    seq: int


_decode: Final = msgspec.json.Decoder(_Event).decode


class EventsReader:
    """Reads all events from the beginning into a tally."""

    def __init__(self, *, bootstrap_servers: str, tally: Tally) -> None:
        self._servers = bootstrap_servers
        self._tally = tally
        self._positions = {
            TopicPartition(EVENTS.name, number): 0 for number in range(EVENTS.partitions)
        }
        self._consumer: AIOKafkaConsumer | None = None

    async def run(self) -> None:
        """Read until cancelled; replace the client if it fails."""
        while True:
            with suppress(KafkaError, OSError):
                await self._read()
            await asyncio.sleep(_AGAIN_SECONDS)

    async def is_at_end(self) -> bool:
        """Return whether there is nothing more to read for now; false while the broker is away."""
        if self._consumer is None:
            return False
        try:
            async with asyncio.timeout(_END_SECONDS):
                ends = await self._consumer.end_offsets(list(self._positions))
                return all(
                    [await self._position(partition) >= end for partition, end in ends.items()]
                )
        except (KafkaError, OSError, TimeoutError):
            return False

    async def _position(self, partition: TopicPartition) -> int:
        # Transaction markers have offsets too, but are not records.
        position: int = await self._consumer.position(partition) if self._consumer else 0
        return position

    async def _read(self) -> None:
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self._servers,
            isolation_level="read_committed",
            enable_auto_commit=False,
            auto_offset_reset="none",
        )
        try:
            await consumer.start()
            consumer.assign(list(self._positions))
            for partition, offset in self._positions.items():
                consumer.seek(partition, offset)
            self._consumer = consumer
            while True:
                self._take(await consumer.getmany(timeout_ms=_POLL_MS, max_records=_MAX_RECORDS))
        finally:
            self._consumer = None
            await consumer.stop()

    def _take(self, polled: Mapping[TopicPartition, Sequence[ConsumerRecord]]) -> None:
        for partition, records in polled.items():
            for record in records:
                event = _decode(record.value)
                self._tally.observe(event.node, event.boot_id, event.seq)
            if records:
                self._positions[partition] = records[-1].offset + 1
