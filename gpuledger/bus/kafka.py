"""The bus on Apache Kafka, through aiokafka: batches, zstd, idempotence, static membership.

And `KafkaReader`, which reads partitions again by their offsets: no group, no commit, transactions
only once whole. Following a topic as a member of a group is `kafka_consumer`'s business.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

from aiokafka import AIOKafkaConsumer

from gpuledger.bus.aiokafka_patches import consumers
from gpuledger.bus.aiokafka_patches.requests import fetch_topic_ids
from gpuledger.bus.kafka_connection import KafkaConnection, count_partitions
from gpuledger.bus.kafka_fetch import named
from gpuledger.bus.kafka_producer import KafkaProducer, KafkaTransactions
from gpuledger.bus.protocol import (
    Consumer,
    HistoryReader,
    Producer,
    Record,
    Span,
    Subscription,
    TopicDescription,
    TopicPartition,
    Transactions,
)
from gpuledger.errors import BusUnavailableError
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
        reader = KafkaReader(self._connection)
        try:
            yield reader
        finally:
            await reader.close()


MAX_RECORDS: Final = 500
_POLL_MS: Final = 500
_FETCH_WAIT_MS: Final = 20


class KafkaReader:
    """Reads any partition of any topic, one at a time; connects with the first question."""

    def __init__(self, connection: KafkaConnection) -> None:
        self._connection = connection
        self._client: AIOKafkaConsumer | None = None

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await consumers.stop_consumer(client)

    async def spans(self, topic: str) -> Mapping[TopicPartition, Span]:
        """Return what is kept of each partition; `TopicsError` where the topic does not exist."""
        client = await self._opened()
        inner, servers = consumers.inner_client(client), self._connection.servers
        async with self._connection.requesting(f"looking up the offsets of {topic}"):
            count = (await count_partitions(inner, [topic], servers=servers, rights="Read"))[topic]
            partitions = [TopicPartition(topic, number) for number in range(count)]
            first = await client.beginning_offsets([named(partition) for partition in partitions])
            end = await client.end_offsets([named(partition) for partition in partitions])
        return {
            partition: Span(first[named(partition)], end[named(partition)])
            for partition in partitions
        }

    async def topic_id(self, topic: str) -> str | None:
        """Return the topic's identity, asked of the brokers now."""
        client = await self._opened()
        async with self._connection.requesting(f"looking up the identity of {topic}"):
            found = await fetch_topic_ids(consumers.inner_client(client), [topic])
        return (found or {}).get(topic)

    async def offsets_at(
        self, partitions: Iterable[TopicPartition], timestamp_ms: int
    ) -> Mapping[TopicPartition, int]:
        """Return, for each partition, the offset before which every record is older than that."""
        wanted = {named(partition): timestamp_ms for partition in partitions}
        client = await self._opened()
        async with self._connection.requesting("looking up offsets by time"):
            found = await client.offsets_for_times(wanted)
            absent = [partition for partition in wanted if found.get(partition) is None]
            ends = await client.end_offsets(absent) if absent else {}
        return {
            TopicPartition(*partition): ends[partition]
            if partition in ends
            else found[partition].offset
            for partition in wanted
        }

    async def read(
        self, partition: TopicPartition, span: Span
    ) -> AsyncGenerator[Sequence[Record], None]:
        """Yield the records of a span in their order, some at a time.

        Raises `BusUnavailableError` where nothing came for `request_timeout_seconds`, or where the
        broker removed the records in the meantime.
        """
        client, its_name = await self._opened(), named(partition)
        client.assign([its_name])
        client.seek(its_name, span.first)
        now_seconds = asyncio.get_running_loop().time
        position, answered_at = span.first, now_seconds()
        while position < span.end:
            with self._connection.translating(f"reading {partition.topic}-{partition.partition}"):
                found = await client.getmany(its_name, timeout_ms=_POLL_MS, max_records=MAX_RECORDS)
            records: Sequence[Record] = found.get(its_name, ())
            # The position passes over markers and what compaction removed, which a count of records
            # would not.
            before, position = position, await client.position(its_name)
            # A batch that cannot be unpacked may reach beyond the span: it counts where it begins.
            if wanted := [record for record in records if record.first_offset < span.end]:
                yield wanted
            # Not by records: a span may end in markers of transactions, which are none.
            if position > before:
                answered_at = now_seconds()
            silent_seconds = now_seconds() - answered_at
            if silent_seconds > self._connection.settings.request_timeout_seconds:
                raise BusUnavailableError(
                    f"reading {partition.topic}-{partition.partition}: {self._connection.servers}"
                    f" gave nothing for {silent_seconds:.0f} s at offset {position}, before"
                    f" {span.end}"
                )

    async def _opened(self) -> AIOKafkaConsumer:
        if self._client is None:
            from gpuledger.bus.aiokafka_patches.unpacking import install_unpacking  # noqa: PLC0415  # as above

            install_unpacking()
            client = AIOKafkaConsumer(
                **self._connection.arguments,
                group_id=None,
                enable_auto_commit=False,
                # What is removed while it is read is an error, not a jump.
                auto_offset_reset="none",
                # What is read is there: who goes on to the next partition waits for no more of it.
                fetch_max_wait_ms=_FETCH_WAIT_MS,
                isolation_level="read_committed",
            )
            try:
                async with self._connection.requesting("connecting"):
                    await client.start()
            except BaseException:
                await consumers.stop_consumer(client)
                raise
            self._client = client
        return self._client
