"""What publishing clients of Kafka share: how they are opened, and messages packed in batches."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Final

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError
from aiokafka.producer.message_accumulator import BatchBuilder

from gpuledger.bus.kafka_connection import ABSENT_ANSWERS, KafkaConnection, count_partitions
from gpuledger.bus.kafka_internals import pack_at_least_cost, send_batch, stop_producer
from gpuledger.bus.limits import MAX_BATCH_BYTES, MAX_BATCH_RECORDS
from gpuledger.bus.protocol import Message, TopicPartition
from gpuledger.errors import RefusedError, TopicsError
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

    async def send(
        self,
        client: AIOKafkaProducer,
        partitions: Sequence[TopicPartition],
        sending: Coroutine[Any, Any, Mapping[TopicPartition, int]],
    ) -> Mapping[TopicPartition, int]:
        """Send to these partitions, and return what `sending` does.

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
