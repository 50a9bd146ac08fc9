"""Agents that publish ticks at a steady rate, in a separate process: one tick per batch.

Each node ticks once per second. Batches are packed ahead of time, because thousands of nodes would
share this work in reality, and use a few connections. A tick's time is when it is due, so sending
it late counts as latency in all measurements.
"""

import asyncio
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Final, NamedTuple

from aiokafka import AIOKafkaProducer
from aiokafka.producer.message_accumulator import BatchBuilder

from benchmarks.join_load import partition_of
from benchmarks.ticks import Fleet, TickTemplate
from gpuledger.clock import NS_PER_MS, NS_PER_SECOND
from gpuledger.keys import key_in
from gpuledger.records.base import DEFAULT_CLUSTER
from tests.default_topics import SAMPLES

_CONNECTIONS: Final = 4
_POLL_SECONDS: Final = 0.005
_TRIAL: Final = 500
_SAFETY: Final = 1.5
_MAX_BATCH_BYTES: Final = 1_000_000


class Offer(NamedTuple):
    """The load on the agents."""

    rate: int
    """Ticks per second; also the number of nodes."""
    seconds: int
    """Duration."""


class _Packed(NamedTuple):
    due_ns: int
    connection: int
    partition: int
    batch: BatchBuilder


class Agents:
    """A handle on the process of the agents."""

    def __init__(self, *, pid: int, connection: Connection) -> None:
        self.pid = pid
        self._connection = connection

    def offer(self, offer: Offer) -> int:
        """Start the load; return when the first tick is due, in nanoseconds since the epoch."""
        self._connection.send(offer)
        started_ns: int = self._connection.recv()
        return started_ns

    def wait(self) -> None:
        """Wait until all ticks of the load are acknowledged."""
        self._connection.recv()


@contextmanager
def start_agents(servers: str, *, nodes: int) -> Iterator[Agents]:
    """Yield agents for at most this many nodes."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(servers, nodes, theirs), daemon=True)
    process.start()
    try:
        ours.recv()
        yield Agents(pid=process.pid or 0, connection=ours)
    finally:
        process.terminate()
        process.join()


def _serve(servers: str, nodes: int, connection: Connection) -> None:
    fleet = Fleet(nodes=nodes)
    templates = [fleet.template(node) for node in range(nodes)]
    connection.send(None)
    while True:
        asyncio.run(_offer(servers, templates, connection.recv(), connection))


async def _offer(
    servers: str, templates: Sequence[TickTemplate], offer: Offer, connection: Connection
) -> None:
    async with AsyncExitStack() as stack:
        producers = [await _open_producer(stack, servers) for _ in range(_CONNECTIONS)]
        pack = _Packing(producers[0], templates, offer)
        began = time.monotonic()
        pack.pack(started_ns=time.time_ns(), count=_TRIAL)
        each_seconds = (time.monotonic() - began) / _TRIAL * _SAFETY
        ready_seconds = 1 + each_seconds * offer.rate * offer.seconds
        started_ns = round(time.time() + ready_seconds) * NS_PER_SECOND
        packed = pack.pack(started_ns=started_ns, count=offer.rate * offer.seconds)
        connection.send(started_ns)
        await _send(producers, packed)
    connection.send(None)


async def _open_producer(stack: AsyncExitStack, servers: str) -> AIOKafkaProducer:
    producer = AIOKafkaProducer(
        bootstrap_servers=servers,
        acks="all",
        compression_type="zstd",
        max_batch_size=_MAX_BATCH_BYTES,
    )
    await producer.start()
    stack.push_async_callback(producer.stop)
    return producer


class _Packing:
    def __init__(
        self, producer: AIOKafkaProducer, templates: Sequence[TickTemplate], offer: Offer
    ) -> None:
        self._producer = producer
        self._templates = templates
        self._offer = offer

    def pack(self, *, started_ns: int, count: int) -> list[_Packed]:
        """Return the first ticks, this many, in the order in which they are due."""
        return [self._one(number, started_ns) for number in range(count)]

    def _one(self, number: int, started_ns: int) -> _Packed:
        node = number % self._offer.rate
        template = self._templates[node]
        due_ns = started_ns + number * NS_PER_SECOND // self._offer.rate
        value = template.at(seq=due_ns // NS_PER_MS, time_ns=due_ns)
        batch = self._producer.create_batch()
        batch.append(
            key=key_in(DEFAULT_CLUSTER, template.node).encode(),
            value=value,
            timestamp=due_ns // NS_PER_MS,
        )
        batch._build()  # noqa: SLF001  # packed now, and not again when it is sent
        return _Packed(due_ns, node % _CONNECTIONS, partition_of(node), batch)


async def _send(producers: Sequence[AIOKafkaProducer], packed: Sequence[_Packed]) -> None:
    """Send each batch when it is due; return when all are acknowledged."""
    acknowledged = []
    for one in packed:
        while one.due_ns > time.time_ns():  # noqa: ASYNC110 - time has no event
            await asyncio.sleep(_POLL_SECONDS)
        producer = producers[one.connection]
        acknowledged.append(
            await producer.send_batch(one.batch, SAMPLES.name, partition=one.partition)
        )
    await asyncio.gather(*acknowledged)
