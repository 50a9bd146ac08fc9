"""The publishing end of the Kafka bus: batches to partitions, acknowledged by all in-sync replicas.

A producer that failed is never used again: an idempotent one that lost a sequence number refuses
everything after it. The next publish opens a new one.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

from aiokafka import AIOKafkaProducer

from gpuledger.bus.kafka_batches import KnownPartitions, open_client, send_all
from gpuledger.bus.kafka_connection import KafkaConnection
from gpuledger.bus.kafka_internals import stop_producer
from gpuledger.bus.limits import refuse_too_large
from gpuledger.bus.protocol import Message, TopicPartition
from gpuledger.errors import GpuledgerError, TopicsError

FLUSH_SECONDS: Final = 2.0


class KafkaProducer:
    """Publishes batches; connects with the first one, and again after a failure."""

    def __init__(self, connection: KafkaConnection) -> None:
        self._connection = connection
        self._client: AIOKafkaProducer | None = None
        self._opening = asyncio.Lock()
        self._partitions = KnownPartitions(connection)
        self._retired: set[asyncio.Task[None]] = set()

    async def publish(self, topic: str, partition: int, messages: Sequence[Message]) -> None:
        """Publish the messages in their order; after an error, none, some or all were published.

        Raises `BusError` and `MessageTooLargeError`.
        """
        refuse_too_large(topic, messages)
        if not messages:
            return
        client, place, has_begun = self._client, TopicPartition(topic, partition), False
        try:
            async with self._connection.asking(f"publishing to {topic}-{partition}"):
                client = await self._opened()
                await self._partitions.must_have(client, [place])
                has_begun = True
                sending = send_all(client, {place: messages})
                await self._partitions.send(client, [place], sending)
        except GpuledgerError as error:
            if has_begun or not isinstance(error, TopicsError):
                self._retire(client)
            raise

    async def close(self) -> None:
        """Flush what a cancelled publish left, and close."""
        client, self._client = self._client, None
        if client is not None:
            await stop_producer(client, flush_seconds=FLUSH_SECONDS)
        await asyncio.gather(*self._retired)

    async def _opened(self) -> AIOKafkaProducer:
        async with self._opening:
            if self._client is None:
                self._client = await open_client(self._connection)
            return self._client

    def _retire(self, client: AIOKafkaProducer | None) -> None:
        """Close a client that failed, beside the work: its brokers may take long to answer."""
        if client is None or client is not self._client:
            return
        self._client = None
        self._partitions.forget()
        task = asyncio.create_task(stop_producer(client, flush_seconds=0))
        self._retired.add(task)
        task.add_done_callback(self._retired.discard)
