"""What publishing clients of Kafka share: how they are opened, and messages packed in batches."""

from collections.abc import Iterator, Sequence
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.producer.message_accumulator import BatchBuilder

from gpuledger.bus.kafka_connection import KafkaConnection, count_partitions
from gpuledger.bus.kafka_internals import pack_at_least_cost, stop_producer
from gpuledger.bus.limits import MAX_BATCH_BYTES
from gpuledger.bus.protocol import Message, TopicPartition
from gpuledger.errors import TopicsError


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

    async def must_have(self, client: AIOKafkaProducer, places: Sequence[TopicPartition]) -> None:
        """Raise `TopicsError` where a topic or a partition does not exist."""
        if unknown := {place.topic for place in places} - self._counts.keys():
            self._counts |= await count_partitions(client.client, unknown, servers=self._servers)
        for topic, partition in places:
            if not 0 <= partition < self._counts[topic]:
                raise TopicsError(
                    f"there is no partition {partition} of {topic} on {self._servers}: "
                    f"it has {self._counts[topic]}"
                )

    def forget(self) -> None:
        """Ask again, for the brokers may be others."""
        self._counts.clear()


def pack(client: AIOKafkaProducer, messages: Sequence[Message]) -> Iterator[BatchBuilder]:
    """Put the messages into as few batches as hold them."""
    batch = client.create_batch()
    for key, value, timestamp_ms in messages:
        if batch.append(timestamp=timestamp_ms, key=key, value=value) is None:
            yield batch
            batch = client.create_batch()
            batch.append(timestamp=timestamp_ms, key=key, value=value)
    # Closed, so that nothing is added to it while it waits.
    batch.close()
    yield batch
