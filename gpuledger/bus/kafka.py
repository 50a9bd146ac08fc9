"""The bus on Apache Kafka, through aiokafka: batches, zstd, idempotence, static membership."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gpuledger.bus.kafka_connection import KafkaConnection
from gpuledger.bus.kafka_producer import KafkaProducer, KafkaTransactions
from gpuledger.bus.protocol import (
    Consumer,
    HistoryReader,
    Producer,
    Subscription,
    TopicDescription,
    Transactions,
)
from gpuledger.runtime import Readiness
from gpuledger.settings import KafkaSettings
from gpuledger.topics import Topics


class KafkaBus:
    """Opens producers and consumers; nothing is asked of the brokers before the first use."""

    def __init__(self, settings: KafkaSettings, *, readiness: Readiness | None = None) -> None:
        """Take the settings, and where to report that changed credentials cannot be used.

        Raises `SettingsError` where there is such a place and they cannot be used now.
        """
        self.topics = Topics(settings.topic_prefix)
        self._connection = KafkaConnection(settings, readiness=readiness)

    async def partitions(self, topic: str) -> int:
        """Return the number of partitions; `TopicsError` where the topic does not exist."""
        return (await self.describe(topic)).partitions

    async def describe(self, topic: str) -> TopicDescription:
        """Return what the brokers say of a topic now; `TopicsError` where it does not exist."""
        return await self._connection.describe(topic)

    @asynccontextmanager
    async def producer(self) -> AsyncIterator[Producer]:
        """Open a producer; it connects with the first batch."""
        # Nothing is asked yet: a deployable starts, and reports, while its brokers are away.
        producer = KafkaProducer(self._connection)
        try:
            yield producer
        finally:
            await producer.close()

    @asynccontextmanager
    async def transactions(self, transactional_id: str) -> AsyncIterator[Transactions]:
        """Open transactions under an id; entering connects, and shuts out who had the id."""
        transactions = KafkaTransactions(self._connection, transactional_id)
        try:
            # Within `try`: an opening that is cut short has taken the id already.
            await transactions.open()
            yield transactions
        finally:
            await transactions.close()

    @asynccontextmanager
    async def consumer(self, subscription: Subscription) -> AsyncIterator[Consumer]:
        """Open a consumer; it connects and joins its group with the first poll."""
        from gpuledger.bus.kafka_consumer import KafkaConsumer  # noqa: PLC0415  # an agent reads nothing

        consumer = KafkaConsumer(connection=self._connection, subscription=subscription)
        try:
            yield consumer
        finally:
            await consumer.close()

    @asynccontextmanager
    async def reader(self) -> AsyncIterator[HistoryReader]:
        """Open a reader of what is kept; it connects with the first question."""
        from gpuledger.bus.kafka_reader import KafkaReader  # noqa: PLC0415  # as above

        reader = KafkaReader(self._connection)
        try:
            yield reader
        finally:
            await reader.close()
