"""The bus on Apache Kafka through aiokafka: batches, zstd, idempotence, static membership.

Also contains `KafkaReader`, which rereads committed records by offset without a group or commits.
`kafka_consumer` follows topics as a member of a group.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

from aiokafka import AIOKafkaConsumer

from gpuledger.bus.aiokafka_patches import consumers
from gpuledger.bus.aiokafka_patches.requests import connected_node, fetch_topic_ids
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
    """Opens producers and consumers; sends no request to the brokers before their first use."""

    def __init__(self, settings: KafkaSettings, *, readiness: Readiness | None = None) -> None:
        """Take the settings; `readiness` receives checks for unusable credentials.

        With `readiness`, raises `SettingsError` if the credentials are unusable now.
        """
        self.topics = Topics(settings.topic_prefix)
        self._connection = KafkaConnection(settings, readiness=readiness)
        self._producers: set[KafkaProducer] = set()

    async def partitions(self, topic: str) -> int:
        """Return the number of partitions; raise `TopicsError` if the topic does not exist."""
        return (await self.describe(topic)).partitions

    async def describe(self, topic: str) -> TopicDescription:
        """Return the topic's current description; raise `TopicsError` if it does not exist."""
        return await self._connection.describe(topic)

    async def topic_id(self, topic: str) -> str | None:
        """Request the topic's current id over the connection of an open producer.

        Returns `None` if no producer is connected, or if the topic does not exist or has no id.
        """
        inner = next((one.client.client for one in self._producers if one.client), None)
        node = inner and connected_node(inner)
        if node is None:
            return None
        async with self._connection.requesting(f"looking up the id of topic {topic}"):
            found = await fetch_topic_ids(inner, [topic], node=node)
        return (found or {}).get(topic)

    @asynccontextmanager
    async def producer(self) -> AsyncIterator[Producer]:
        """Open a producer; it connects with the first batch."""
        # Not connected yet, so that a component can start and report while brokers are down.
        producer = KafkaProducer(self._connection)
        self._producers.add(producer)
        try:
            yield producer
        finally:
            self._producers.discard(producer)
            await producer.close()

    @asynccontextmanager
    async def transactions(self, transactional_id: str) -> AsyncIterator[Transactions]:
        """Open a writer with this id: entering connects, and fences the id's previous writer."""
        transactions = KafkaTransactions(self._connection, transactional_id)
        try:
            # Within `try`: a cancelled opening may already have taken the id.
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
        """Open a reader; it connects with the first request."""
        reader = KafkaReader(self._connection)
        try:
            yield reader
        finally:
            await reader.close()


MAX_RECORDS: Final = 500
_POLL_MS: Final = 500
_FETCH_WAIT_MS: Final = 20


class KafkaReader:
    """Reads any topic's partitions, one partition at a time; connects with the first request."""

    def __init__(self, connection: KafkaConnection) -> None:
        self._connection = connection
        self._client: AIOKafkaConsumer | None = None

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await consumers.stop_consumer(client)

    async def spans(self, topic: str) -> Mapping[TopicPartition, Span]:
        """Return the available offsets of each partition.

        Raises `TopicsError` if the topic does not exist.
        """
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
        """Request the topic's id; return `None` if the topic has no id or does not exist."""
        client = await self._opened()
        async with self._connection.requesting(f"looking up the id of topic {topic}"):
            found = await fetch_topic_ids(consumers.inner_client(client), [topic])
        return (found or {}).get(topic)

    async def offsets_at(
        self, partitions: Iterable[TopicPartition], timestamp_ms: int
    ) -> Mapping[TopicPartition, int]:
        """Return the offset of each partition's first record at or after `timestamp_ms`.

        If all records of a partition are older, its end offset is returned.
        """
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
        """Yield the records of a span in order, at most `MAX_RECORDS` at a time.

        Raises `BusUnavailableError` if no progress is made for `request_timeout_seconds`, or if the
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
            # Unlike a count of records, the position skips transaction markers and compacted
            # offsets.
            before, position = position, await client.position(its_name)
            # An unreadable batch that begins in the span is yielded, even if it ends beyond it.
            if wanted := [record for record in records if record.first_offset < span.end]:
                yield wanted
            # The position shows progress; a span may end in transaction markers, without records.
            if position > before:
                answered_at = now_seconds()
            silent_seconds = now_seconds() - answered_at
            if silent_seconds > self._connection.settings.request_timeout_seconds:
                raise BusUnavailableError(
                    f"reading {partition.topic}-{partition.partition}: {self._connection.servers}"
                    f" returned no data for {silent_seconds:.0f} s at offset {position}, before"
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
                # Raise an error, instead of jumping, if records are removed while they are read.
                auto_offset_reset="none",
                # All wanted records exist, so waiting longer for more data is useless.
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
