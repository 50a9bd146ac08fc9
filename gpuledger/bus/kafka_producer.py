"""The publishing end of the Kafka bus: batches to partitions, acknowledged by all in-sync replicas.

A producer that failed is never used again: an idempotent one that lost a sequence number refuses
everything after it. The next publish opens a new one. What both kinds of producer share comes
first: how a client is opened, and how messages are packed in batches.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError
from aiokafka.producer.message_accumulator import BatchBuilder

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
from gpuledger.bus.kafka_positions import commit_metadata
from gpuledger.bus.limits import MAX_BATCH_BYTES, MAX_BATCH_RECORDS, refuse_too_large
from gpuledger.bus.protocol import Message, TopicPartition
from gpuledger.errors import BusUnavailableError, GpuledgerError, RefusedError, TopicsError
from gpuledger.runtime.tasks import run_tasks

_CHECK_SECONDS: Final = 2.0
"""How often it is asked whether topics are still there, while what was sent is not acknowledged."""


async def open_client(connection: KafkaConnection, **others: Any) -> AIOKafkaProducer:  # noqa: ANN401  # aiokafka's own keywords
    """Open an idempotent client; where it cannot connect, nothing of it is left."""
    pack_at_least_cost()
    client = AIOKafkaProducer(
        **connection.arguments,
        enable_idempotence=True,
        acks="all",
        compression_type="zstd",
        max_batch_size=MAX_BATCH_BYTES,
        **others,
    )
    try:
        await client.start()
    except BaseException:
        await stop_producer(client, flush_seconds=0)
        raise
    return client


class KnownPartitions:
    """How many partitions topics have, asked once: an absent one is only told after a time-out."""

    def __init__(self, connection: KafkaConnection) -> None:
        self._servers = connection.servers
        self._counts: dict[str, int] = {}

    async def must_have(
        self, client: AIOKafkaProducer, partitions: Sequence[TopicPartition]
    ) -> None:
        """Raise `TopicsError` where a topic or a partition does not exist, or `RefusedError`."""
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
        """Return what `sending` does, and look meanwhile whether these partitions are still there.

        Raises `TopicsError` where one is deleted meanwhile, and `RefusedError` where it may not be
        seen any more.

        aiokafka tries again for ever, so that the brokers would be blamed for not answering.
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
        """Ask again; return what is missing, and nothing where the brokers do not answer."""
        self.forget()
        try:
            await self.must_have(client, partitions)
        except (TopicsError, RefusedError) as error:
            return error
        except (KafkaError, OSError):
            pass  # what is sent fails with that, or does not
        return None

    def forget(self) -> None:
        """Forget the counts: the brokers may be others, or the topics."""
        self._counts.clear()


async def send_all(
    client: AIOKafkaProducer,
    messages: Mapping[TopicPartition, Sequence[Message]],
    *,
    beside: Callable[[], Coroutine[Any, Any, object]] | None = None,
) -> Mapping[TopicPartition, int]:
    """Send messages in batches, and what is to be done beside; wait until all of it is done.

    Returns for each partition the offset behind its last message, where the broker told it.
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
    # A batch that came twice is acknowledged without its offset, which is -1 then.
    return {
        partition: sent.result().offset + count
        for partition, (sent, count) in last.items()
        if sent.result().offset >= 0
    }


def pack(client: AIOKafkaProducer, messages: Sequence[Message]) -> Iterator[BatchBuilder]:
    """Put the messages into as few batches as hold them."""
    batch = client.create_batch()
    for number, (key, value, timestamp_ms) in enumerate(messages):
        if number and number % MAX_BATCH_RECORDS == 0:
            batch.close()
        if batch.append(timestamp=timestamp_ms, key=key, value=value) is None:
            yield batch
            batch = client.create_batch()
            batch.append(timestamp=timestamp_ms, key=key, value=value)
    # Closed, so that nothing is added to it while it waits.
    batch.close()
    yield batch


FLUSH_SECONDS: Final = 2.0


class KafkaProducer:
    """Publishes batches; connects with the first one, and again after a failure."""

    def __init__(self, connection: KafkaConnection) -> None:
        self._connection = connection
        self._client: AIOKafkaProducer | None = None
        self._opening = asyncio.Lock()
        self._is_closed = False
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
            async with self._connection.requesting(f"publishing to {topic}-{partition}"):
                client = await self._opened()
                await self._partitions.must_have(client, [at])
                has_begun = True
                sending = send_all(client, {at: messages})
                return (await self._partitions.watch(client, [at], sending)).get(at)
        except GpuledgerError as error:
            # An absent topic was found before anything was sent: the client is as good as new.
            if has_begun or not isinstance(error, TopicsError):
                self._retire(client)
            raise

    async def close(self) -> None:
        """Flush what a cancelled publish left, and close; what is published later is refused."""
        self._is_closed = True
        client, self._client = self._client, None
        if client is not None:
            # Somebody may have given up waiting for it, which takes nothing back.
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
                    # Nobody else would end it.
                    self._retire(self._client)
                    raise
            return self._client

    def _must_be_open(self) -> None:
        """Raise `BusUnavailableError` where it is closed."""
        if self._is_closed:
            raise BusUnavailableError("the producer is closed")

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
        async with self._connection.requesting(f"opening the transactional id {self._id!r}"):
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
        async with self._connection.requesting("looking up topics", at_most_seconds=COMMIT_SECONDS):
            await self._partitions.must_have(client, list(messages))
        doing = f"committing a transaction of {self._id!r}"
        async with self._connection.requesting(doing, at_most_seconds=COMMIT_SECONDS):
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
                    published = await self._partitions.watch(client, list(messages), filling)
                except TopicsError as error:  # something was begun, which only closing ends
                    raise BusUnavailableError(str(error)) from error
                await client.commit_transaction()
        return published
