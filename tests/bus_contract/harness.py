"""The harness of the laws that every bus keeps; the laws are in the other modules of this package.

The test module of each bus inherits the classes of laws and defines a `harness` fixture: the bus,
with topics and a group that only this test uses.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Protocol

from gpuledger.bus.protocol import Message, Subscription, TopicPartition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractAsyncContextManager

    from gpuledger.bus.protocol import Bus, Consumer, PartitionsCallback, Record

PARTITIONS = 4
DEADLINE_SECONDS = 120.0
IDLE_SECONDS = 0.05


class Harness(Protocol):
    """A bus with topics that only this test uses."""

    bus: Bus
    readings: str
    """A topic with 4 partitions."""
    pods: str
    """Another topic with 4 partitions."""
    states: str
    """A compacted topic with 1 partition."""
    group: str

    async def compact(self, *, last: Message) -> None:
        """Publish one more message to `states`; wait until everything before it is compacted."""

    async def remove_before(self, partition: TopicPartition, offset: int) -> None:
        """Remove the records before an offset, as retention does."""

    def open_transaction(self, partition: TopicPartition) -> AbstractAsyncContextManager[None]:
        """Keep another producer's transaction, with a record in it, open on a partition.

        Does nothing on a bus that never has open transactions.
        """

    async def move_offset(self, partition: TopicPartition, offset: int) -> None:
        """Commit an offset of the group, which has no members, as another program does."""

    async def add_partitions(self, topic: str, total: int) -> None:
        """Raise a topic's number of partitions."""

    async def recreate(self, topic: str) -> None:
        """Delete a topic with 4 partitions and create it again."""


def message(text: str, *, key: str = "node-a", at_ms: int = 1_790_000_000_000) -> Message:
    return Message(key=key.encode(), value=text.encode(), timestamp_ms=at_ms)


def messages(*texts: str) -> list[Message]:
    return [message(text) for text in texts]


def texts(records: Iterable[Record]) -> list[str]:
    return [(record.value or b"(tombstone)").decode() for record in records]


def reading(harness: Harness, **settings: object) -> Subscription:
    requested = {"group": harness.group, "topics": [harness.readings], **settings}
    return Subscription(**requested)  # type: ignore[arg-type]  # the keywords of a Subscription


def incompressible(size_bytes: int, *, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size_bytes)  # noqa: S311  # repeatable, and not a secret


async def poll_once(consumer: Consumer, *, max_records: int = 1000) -> list[Record]:
    polled = await consumer.poll(timeout_seconds=IDLE_SECONDS, max_records=max_records)
    return [record for records in polled.values() for record in records]


async def poll_until(
    is_enough: Callable[[list[Record]], bool], *consumers: Consumer, max_records: int = 1000
) -> list[Record]:
    """Poll all consumers in turn, as separate processes would, until `is_enough` returns true."""
    found: list[Record] = []
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not is_enough(found):
            polls = (poll_once(consumer, max_records=max_records) for consumer in consumers)
            for records in await asyncio.gather(*polls):
                found += records
    return found


async def read(count: int, *consumers: Consumer) -> list[Record]:
    return await poll_until(lambda found: len(found) >= count, *consumers)


async def settle(*consumers: Consumer, topics: int = 1) -> list[Record]:
    """Poll until the consumers together have all partitions; return the records that arrived."""

    def is_settled(_: list[Record]) -> bool:
        held = [consumer.assignment() for consumer in consumers]
        return all(held) and sum(map(len, held)) == topics * PARTITIONS

    return await poll_until(is_settled, *consumers)


def noting(notes: list[str], what: str) -> PartitionsCallback:
    async def note(partitions: frozenset[TopicPartition]) -> None:
        notes.append(f"{what} {len(partitions)}")

    return note
