"""The producers of the Kafka bus: batches, acknowledged by all in-sync replicas.

A failed client is never reused, because an idempotent producer that lost a sequence number rejects
everything after it. The next publish opens a new client. The functions shared by both kinds of
producer come first: opening a client, and packing messages into batches.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError
from aiokafka.producer.message_accumulator import BatchBuilder

from gpuledger.bus.aiokafka_patches.coordinators import look_up_at_each_broker
from gpuledger.bus.aiokafka_patches.packing import pack_at_least_cost
from gpuledger.bus.aiokafka_patches.producers import (
    abandon_transaction,
    begin_transaction,
    naming_what_failed,
    send_batch,
    stop_producer,
)
from gpuledger.bus.kafka_connection import ABSENT_ANSWERS, KafkaConnection, count_partitions
from gpuledger.bus.kafka_fetch import named
from gpuledger.bus.kafka_positions import CommitMetadata
from gpuledger.bus.limits import MAX_BATCH_BYTES, MAX_BATCH_RECORDS, refuse_too_large
from gpuledger.bus.protocol import Message, TopicPartition
from gpuledger.errors import BusUnavailableError, GpuledgerError, RefusedError, TopicsError
from gpuledger.runtime.tasks import run_tasks

_CHECK_SECONDS: Final = 2.0
"""Interval at which topics are looked up while sent messages are not acknowledged."""


async def open_client(connection: KafkaConnection, **others: Any) -> AIOKafkaProducer:  # noqa: ANN401  # aiokafka's own keywords
    """Open an idempotent client; if it cannot connect, stop it again."""
    pack_at_least_cost()
    client = AIOKafkaProducer(
        **connection.arguments,
        enable_idempotence=True,
        acks="all",
        compression_type="zstd",
        max_batch_size=MAX_BATCH_BYTES,
        **others,
    )
    look_up_at_each_broker(client.client)
    try:
        await client.start()
    except BaseException:
        await stop_producer(client, flush_seconds=0)
        raise
    return client


class KnownPartitions:
    """The partition counts of topics, cached.

    A missing topic is detected immediately; aiokafka would only report a timeout.
    """

    def __init__(self, connection: KafkaConnection) -> None:
        self._servers = connection.servers
        self._counts: dict[str, int] = {}

    async def must_have(
        self, client: AIOKafkaProducer, partitions: Sequence[TopicPartition]
    ) -> None:
        """Raise `TopicsError` if a topic or partition does not exist.

        Raises `RefusedError` if the user may not see it.
        """
        if unknown := {at.topic for at in partitions} - self._counts.keys():
            self._counts |= await count_partitions(
                client.client, unknown, servers=self._servers, rights="Write"
            )
        for topic, partition in partitions:
            if not 0 <= partition < self._counts[topic]:
                raise TopicsError(
                    f"there is no partition {partition} of {topic} on {self._servers}: "
                    f"it has {self._counts[topic]}"
                )

    async def watch(
        self,
        client: AIOKafkaProducer,
        partitions: Sequence[TopicPartition],
        sending: Coroutine[Any, Any, Mapping[TopicPartition, int]],
    ) -> Mapping[TopicPartition, int]:
        """Return the result of `sending`; meanwhile check that the partitions still exist.

        Raises `TopicsError` if a topic is deleted in the meantime, and `RefusedError` if the user
        may no longer see it. Without this check, aiokafka would retry without limit, and the caller
        would only receive a timeout.
        """
        absent_checks = 0
        async with run_tasks(sending) as (task,):
            while True:
                await asyncio.wait({task}, timeout=_CHECK_SECONDS)
                if task.done():
                    return task.result()
                absence = await self._absence(client, partitions)
                absent_checks = absent_checks + 1 if absence else 0
                if absence and absent_checks >= ABSENT_ANSWERS:
                    raise absence

    async def _absence(
        self, client: AIOKafkaProducer, partitions: Sequence[TopicPartition]
    ) -> TopicsError | RefusedError | None:
        """Look up the topics again; return the error if one is missing or hidden.

        Returns `None` if all partitions exist or the brokers do not answer.
        """
        self.forget()
        try:
            await self.must_have(client, partitions)
        except (TopicsError, RefusedError) as error:
            return error
        except (KafkaError, OSError):
            pass  # during an outage, the result of sending is enough
        return None

    def forget(self) -> None:
        """Forget the counts, because the brokers or topics may have changed."""
        self._counts.clear()


async def send_all(
    client: AIOKafkaProducer,
    messages: Mapping[TopicPartition, Sequence[Message]],
    *,
    beside: Callable[[], Coroutine[Any, Any, object]] | None = None,
) -> Mapping[TopicPartition, int]:
    """Send messages in batches and run `beside` concurrently; wait until all are done.

    Returns the offset after each partition's last message, if the broker reported it.
    """
    waiting: list[asyncio.Future[Any]] = []
    last: dict[TopicPartition, tuple[asyncio.Future[Any], int]] = {}
    try:
        for partition, of_partition in messages.items():
            for batch in pack(client, of_partition):
                waiting.append(await send_batch(client, batch, *partition))
                last[partition] = waiting[-1], batch.record_count()
        if beside is not None:
            waiting.append(asyncio.ensure_future(beside()))
        await asyncio.gather(*waiting)
    finally:
        for future in waiting:
            future.cancel()
    # A duplicate batch is acknowledged with the offset -1.
    return {
        partition: sent.result().offset + count
        for partition, (sent, count) in last.items()
        if sent.result().offset >= 0
    }


def pack(client: AIOKafkaProducer, messages: Sequence[Message]) -> Iterator[BatchBuilder]:
    """Yield the messages in as few batches as possible."""
    batch = client.create_batch()
    for number, (key, value, timestamp_ms) in enumerate(messages):
        if number and number % MAX_BATCH_RECORDS == 0:
            batch.close()
        if batch.append(timestamp=timestamp_ms, key=key, value=value) is None:
            yield batch
            batch = client.create_batch()
            batch.append(timestamp=timestamp_ms, key=key, value=value)
    # Closed, so that aiokafka adds no other messages while the batch waits.
    batch.close()
    yield batch


FLUSH_SECONDS: Final = 2.0


class KafkaProducer:
    """Publishes batches; connects with the first batch, and again after a failure."""

    def __init__(self, connection: KafkaConnection) -> None:
        self._connection = connection
        self._client: AIOKafkaProducer | None = None
        self._opening = asyncio.Lock()
        self._is_closed = False
        self._partitions = KnownPartitions(connection)
        self._retired: set[asyncio.Task[None]] = set()

    @property
    def client(self) -> AIOKafkaProducer | None:
        """The connected client; `None` before the first batch and after a failure."""
        return self._client

    async def publish(self, topic: str, partition: int, messages: Sequence[Message]) -> int | None:
        """Publish the messages in order and return the offset after the last one, if known.

        Raises `MessageTooLargeError` before anything is published if a message is larger than
        `MAX_MESSAGE_BYTES`. If the brokers reject a batch or do not acknowledge it in time, raises
        a `BusError`; none, some or all messages may then have been published.
        """
        refuse_too_large(topic, messages)
        if not messages:
            return None
        client, at, has_begun = self._client, TopicPartition(topic, partition), False
        try:
            async with self._connection.requesting(f"publishing to {topic}-{partition}"):
                client = await self._opened()
                await self._partitions.must_have(client, [at])
                has_begun = True
                sending = send_all(client, {at: messages})
                return (await self._partitions.watch(client, [at], sending)).get(at)
        except GpuledgerError as error:
            # A missing topic was found before anything was sent: the client can be reused.
            if has_begun or not isinstance(error, TopicsError):
                self._retire(client)
            raise

    async def close(self) -> None:
        """Send the messages of cancelled `publish` calls, and close; later calls fail."""
        self._is_closed = True
        client, self._client = self._client, None
        if client is not None:
            # A cancelled publish does not withdraw its messages.
            await stop_producer(client, flush_seconds=FLUSH_SECONDS)
        await asyncio.gather(*self._retired)

    async def _opened(self) -> AIOKafkaProducer:
        async with self._opening:
            self._must_be_open()
            if self._client is None:
                self._client = await open_client(self._connection)
                try:
                    self._must_be_open()
                except BusUnavailableError:
                    # Closed during the opening: `close` did not see this client.
                    self._retire(self._client)
                    raise
            return self._client

    def _must_be_open(self) -> None:
        """Raise `BusUnavailableError` if the producer is closed."""
        if self._is_closed:
            raise BusUnavailableError("the producer is closed")

    def _retire(self, client: AIOKafkaProducer | None) -> None:
        """Close a failed client in the background, because its brokers may be slow to answer."""
        # Two publishes may fail with the same client; it is closed only once.
        if client is None or client is not self._client:
            return
        self._client = None
        self._partitions.forget()
        task = asyncio.create_task(stop_producer(client, flush_seconds=0))
        self._retired.add(task)
        task.add_done_callback(self._retired.discard)


TRANSACTION_SECONDS: Final = 15.0
"""After this time the brokers abort an abandoned transaction; until then its readers wait."""
COMMIT_SECONDS: Final = 12.0
"""Timeout of a commit; shorter than `TRANSACTION_SECONDS`, so that the brokers have not aborted
the transaction before we give it up."""

Batches = Mapping[TopicPartition, Sequence[Message]]
Offsets = Mapping[TopicPartition, int]


class KafkaTransactions:
    """The only writer with a transactional id, until another writer opens it.

    aiokafka does not send the group's generation with a transaction's offsets, so the brokers
    cannot detect commits by a former member. The transactional id fences such a member instead.
    """

    def __init__(self, connection: KafkaConnection, transactional_id: str) -> None:
        self._connection = connection
        self._id = transactional_id
        self._partitions = KnownPartitions(connection)
        self._client: AIOKafkaProducer | None = None
        self._over: GpuledgerError | None = None
        self._busy = asyncio.Lock()
        self._cut: asyncio.Timeout | None = None
        """The timeout of the commit in progress; `close` sets it to end the commit."""

    async def open(self) -> None:
        """Connect and fence the previous writer, whose open transaction is aborted first."""
        async with self._connection.requesting(f"opening the transactional id {self._id!r}"):
            self._client = await open_client(
                self._connection,
                transactional_id=self._id,
                transaction_timeout_ms=int(TRANSACTION_SECONDS * 1000),
            )

    async def close(self) -> None:
        """Cancel a commit in progress, abort the open transaction if possible, and close.

        Aborting waits for the cancelled commit, because aborting during a commit puts the client
        into an undefined state. If the commit was already requested, the brokers finish it.
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
        """Publish messages and commit the group's offsets in one transaction.

        Returns the offset after each partition's last message. Before the transaction begins,
        raises `TopicsError`, or `MessageTooLargeError` if a message is larger than
        `MAX_MESSAGE_BYTES`. After any other error, the transaction's outcome is unknown, and the
        writer can only be closed.
        """
        for partition, batch in messages.items():
            refuse_too_large(partition.topic, batch)
        filled = {partition: batch for partition, batch in messages.items() if batch}
        if not filled and not offsets:
            return {}
        async with self._busy:
            # After a failure, the brokers may have committed the transaction or abort it later.
            if self._over is not None:
                raise self._over
            client = self._client
            if client is None:
                raise BusUnavailableError(f"the transactional id {self._id!r} is not open")
            try:
                # No deadline yet; `close` may set one.
                async with asyncio.timeout(None) as self._cut:
                    return await self._transact(client, filled, offsets, group)
            except TopicsError:
                raise  # the transaction was not begun
            except TimeoutError as error:
                self._over = BusUnavailableError(
                    f"the transactional id {self._id!r} was closed during a commit"
                )
                raise self._over from error
            except GpuledgerError as error:
                self._over = error
                raise
            except BaseException:
                self._over = BusUnavailableError(f"a commit of {self._id!r} was cancelled")
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
        """Begin, fill and commit a transaction; raise `TopicsError` before it begins."""
        # Checked first, because a transaction with a missing topic would never end.
        async with self._connection.requesting("looking up topics", at_most_seconds=COMMIT_SECONDS):
            await self._partitions.must_have(client, list(messages))
        doing = f"committing a transaction of {self._id!r}"
        async with self._connection.requesting(doing, at_most_seconds=COMMIT_SECONDS):
            await begin_transaction(client)
            ids = self._connection.topic_ids.get(group, {})
            counts = self._connection.partition_counts.get(group, {})
            committed = {
                named(at): (offset, CommitMetadata(ids.get(at.topic), counts.get(at.topic)).text)
                for at, offset in offsets.items()
            }
            # Offsets go to the group's coordinator, so they are sent concurrently with the batches.
            beside = partial(client.send_offsets_to_transaction, committed, group)
            filling = send_all(client, messages, beside=beside if offsets else None)
            with naming_what_failed(client):
                try:
                    published = await self._partitions.watch(client, list(messages), filling)
                except TopicsError as error:  # the transaction has begun; only closing ends it
                    raise BusUnavailableError(str(error)) from error
                await client.commit_transaction()
        return published
