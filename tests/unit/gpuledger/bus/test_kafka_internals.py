"""Resources that aiokafka leaves open are closed."""

import asyncio
import gc
import struct
from typing import Any

import pytest
from aiokafka.producer.message_accumulator import BatchBuilder, MessageAccumulator
from aiokafka.structs import TopicPartition

from gpuledger.bus.aiokafka_patches.producers import send_batch
from gpuledger.bus.kafka_connection import KafkaConnection
from gpuledger.errors import BusUnavailableError
from gpuledger.settings import KafkaSettings


class Leaderless:
    """A cluster whose partitions have no leader, as while a topic is being recreated."""

    def leader_for_partition(self, _: TopicPartition) -> None:
        """Return no leader."""


class QueueingClient:
    """The queue of a client whose batches expire at once."""

    def __init__(self) -> None:
        self._message_accumulator = MessageAccumulator(Leaderless(), 1000, 0, batch_ttl=-1)

    async def send_batch(self, batch: BatchBuilder, topic: str, *, partition: int) -> object:
        at = TopicPartition(topic, partition)
        return await self._message_accumulator.add_batch(batch, at, 1)

    def fail_what_is_out_of_date(self) -> None:
        self._message_accumulator.drain_by_nodes(ignore_nodes=())

    def batch(self) -> BatchBuilder:
        made = self._message_accumulator.create_builder()
        made.append(timestamp=0, key=b"k", value=b"v")
        return made


async def test_a_batch_that_fails_after_its_sender_was_cancelled_logs_nothing() -> None:
    """The sender was cancelled at its own deadline and has already reported that."""
    unseen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, message: unseen.append(message))
    client = QueueingClient()

    sent = await send_batch(client, client.batch(), "rows", 3)
    sent.cancel()
    await asyncio.wait({sent})
    client.fail_what_is_out_of_date()
    await asyncio.sleep(0)
    del client, sent
    gc.collect()

    assert unseen == []


class SlowBroker:
    """Accepts connections and returns its API versions, but is too slow for any other request."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = struct.unpack(">i", await reader.readexactly(4))[0]
        request = await reader.readexactly(size)
        no_error_and_metadata_version_0 = struct.pack(">hihhh", 0, 1, 3, 0, 0)
        answer = request[4:8] + no_error_and_metadata_version_0
        writer.write(struct.pack(">i", len(answer)) + answer)
        await reader.read()
        writer.close()
        self.left.set()


async def test_a_connection_to_a_broker_that_is_too_slow_is_closed_without_a_log_line() -> None:
    unseen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, message: unseen.append(message))
    broker = SlowBroker()
    async with await asyncio.start_server(broker.answer, "127.0.0.1", 0) as server:
        servers = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        settings = KafkaSettings(bootstrap_servers=servers, request_timeout_seconds=0.5)
        with pytest.raises(BusUnavailableError):
            await KafkaConnection(settings).describe("rows")
        gc.collect()
        await broker.left.wait()

    assert unseen == []
