"""The publishing end of the Kafka bus: batches to partitions, acknowledged by all in-sync replicas.

A producer that failed is never used again: an idempotent one that lost a sequence number refuses
everything after it. The next publish opens a new one.
"""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from aiokafka import AIOKafkaProducer

from gpuledger.bus.kafka_batches import KnownPartitions, open_client, send_all
from gpuledger.bus.kafka_connection import KafkaConnection
from gpuledger.bus.kafka_fetch import named
from gpuledger.bus.kafka_internals import (
    abandon_transaction,
    begin_transaction,
    naming_what_failed,
    stop_producer,
)
from gpuledger.bus.kafka_positions import commit_metadata
from gpuledger.bus.limits import refuse_too_large
from gpuledger.bus.protocol import Message, TopicPartition
from gpuledger.errors import BusUnavailableError, GpuledgerError, TopicsError

FLUSH_SECONDS: Final = 2.0


class KafkaProducer:
    """Publishes batches; connects with the first one, and again after a failure."""

    def __init__(self, connection: KafkaConnection) -> None:
        self._connection = connection
        self._client: AIOKafkaProducer | None = None
        self._opening = asyncio.Lock()
        self._partitions = KnownPartitions(connection)
        self._retired: set[asyncio.Task[None]] = set()

    async def publish(self, topic: str, partition: int, messages: Sequence[Message]) -> int | None:
        """Publish the messages in their order; after an error, none, some or all were published.

        Raises `BusError` and `MessageTooLargeError`.
        """
        refuse_too_large(topic, messages)
        if not messages:
            return None
        client, at, has_begun = self._client, TopicPartition(topic, partition), False
        try:
            async with self._connection.asking(f"publishing to {topic}-{partition}"):
                client = await self._opened()
                await self._partitions.must_have(client, [at])
                has_begun = True
                sending = send_all(client, {at: messages})
                return (await self._partitions.send(client, [at], sending)).get(at)
        except GpuledgerError as error:
            # An absent topic was found before anything was sent: the client is as good as new.
            if has_begun or not isinstance(error, TopicsError):
                self._retire(client)
            raise

    async def close(self) -> None:
        """Flush what a cancelled publish left, and close."""
        client, self._client = self._client, None
        if client is not None:
            # Somebody may have given up waiting for it, which takes nothing back.
            await stop_producer(client, flush_seconds=FLUSH_SECONDS)
        await asyncio.gather(*self._retired)

    async def _opened(self) -> AIOKafkaProducer:
        async with self._opening:
            if self._client is None:
                self._client = await open_client(self._connection)
            return self._client

    def _retire(self, client: AIOKafkaProducer | None) -> None:
        """Close a client that failed, beside the work: its brokers may take long to answer."""
        # Two publishes may fail with the same client; it is closed once.
        if client is None or client is not self._client:
            return
        self._client = None
        self._partitions.forget()
        task = asyncio.create_task(stop_producer(client, flush_seconds=0))
        self._retired.add(task)
        task.add_done_callback(self._retired.discard)


TRANSACTION_SECONDS: Final = 15.0
"""After so long the brokers abort what a writer left open; until then its readers wait."""
COMMIT_SECONDS: Final = 12.0
"""How long a commit may take: less, so that what fails has not been aborted without our knowing."""

Batches = Mapping[TopicPartition, Sequence[Message]]
Offsets = Mapping[TopicPartition, int]


class KafkaTransactions:
    """The one writer under a transactional id, as long as nobody else opens it.

    aiokafka sends no generation of a group with a transaction's offsets, so the brokers cannot tell
    a member that its group gave up from one that it has: the transactional id tells them apart.
    """

    def __init__(self, connection: KafkaConnection, transactional_id: str) -> None:
        self._connection = connection
        self._id = transactional_id
        self._partitions = KnownPartitions(connection)
        self._client: AIOKafkaProducer | None = None
        self._over: GpuledgerError | None = None
        self._busy = asyncio.Lock()
        self._cut: asyncio.Timeout | None = None
        """Of the commit that is under way: `close` ends it by this."""

    async def open(self) -> None:
        """Connect and shut out who had the id; what that one left open is aborted first."""
        async with self._connection.asking(f"opening the transactional id {self._id!r}"):
            self._client = await open_client(
                self._connection,
                transactional_id=self._id,
                transaction_timeout_ms=int(TRANSACTION_SECONDS * 1000),
            )

    async def close(self) -> None:
        """End a commit that is under way, abort what is open as far as that can be, and close.

        Never both at once: a client that aborts under a commit is in a state that it does not know.
        A commit that the brokers were asked for already is theirs to end, not ours to abort.
        """
        client, self._client = self._client, None
        if client is None:
            return
        if self._cut is not None:
            self._cut.reschedule(asyncio.get_running_loop().time())
        async with self._busy:
            await abandon_transaction(client)
            await stop_producer(client, flush_seconds=0)

    async def commit(
        self, messages: Batches, *, offsets: Mapping[TopicPartition, int], group: str
    ) -> Offsets:
        """Publish and commit in one transaction.

        Raises `TopicsError` and `MessageTooLargeError` with nothing begun. After any other failure
        only closing is of use: nobody knows whether it was done.
        """
        for partition, batch in messages.items():
            refuse_too_large(partition.topic, batch)
        filled = {partition: batch for partition, batch in messages.items() if batch}
        if not filled and not offsets:
            return {}
        async with self._busy:
            # After a failure the brokers may have done it, or abort it later: nobody knows.
            if self._over is not None:
                raise self._over
            client = self._client
            if client is None:
                raise BusUnavailableError(f"the transactional id {self._id!r} is not open")
            try:
                # Without an end of its own: it is there for `close` to set one.
                async with asyncio.timeout(None) as self._cut:
                    return await self._transact(client, filled, offsets, group)
            except TopicsError:
                raise  # nothing was begun
            except TimeoutError as error:
                self._over = BusUnavailableError(
                    f"the transactional id {self._id!r} was closed while it was committed"
                )
                raise self._over from error
            except GpuledgerError as error:
                self._over = error
                raise
            except BaseException:
                self._over = BusUnavailableError(f"a commit under {self._id!r} was cut short")
                raise
            finally:
                self._cut = None

    async def _transact(
        self,
        client: AIOKafkaProducer,
        messages: Batches,
        offsets: Mapping[TopicPartition, int],
        group: str,
    ) -> Offsets:
        """Begin a transaction, fill and commit it; raises `TopicsError` before it begins."""
        # With a topic that is absent the transaction would never end.
        async with self._connection.asking("looking up topics", at_most_seconds=COMMIT_SECONDS):
            await self._partitions.must_have(client, list(messages))
        doing = f"committing a transaction of {self._id!r}"
        async with self._connection.asking(doing, at_most_seconds=COMMIT_SECONDS):
            await begin_transaction(client)
            topic_ids = self._connection.topic_ids.get(group, {})
            committed = {
                named(partition): (offset, commit_metadata(topic_ids, partition.topic))
                for partition, offset in offsets.items()
            }
            # Offsets go their own way, to the group's coordinator: beside the batches, not behind.
            beside = partial(client.send_offsets_to_transaction, committed, group)
            filling = send_all(client, messages, beside=beside if offsets else None)
            with naming_what_failed(client):
                try:
                    published = await self._partitions.send(client, list(messages), filling)
                except TopicsError as error:  # something was begun, which only closing ends
                    raise BusUnavailableError(str(error)) from error
                await client.commit_transaction()
        return published
