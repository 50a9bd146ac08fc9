"""From the queue to the broker, in order, again and again until the broker has acknowledged.

Here lives the loop that publishes. A tick is taken out of the queue once and kept in hand until
both of its topics are acknowledged, so nothing is lost and nothing overtakes.
"""

import asyncio
from collections.abc import Sequence
from itertools import chain
from typing import Final

import structlog

from agent.metrics import (
    INCIDENTS_PUBLISHED,
    INVENTORIES_PUBLISHED,
    MESSAGES_TOO_LARGE,
    PROCESS_RECORDS_PUBLISHED,
    PUBLISH_FAILURES,
    TICKS_PUBLISHED,
)
from agent.publishing.parcels import Parcel
from agent.publishing.queue import TickQueue
from gpuledger.bus.limits import MAX_MESSAGE_BYTES
from gpuledger.bus.protocol import Bus, Message, Producer
from gpuledger.errors import BusUnavailableError, TopicsError
from gpuledger.service import Backoff, Check
from gpuledger.topics import INCIDENTS, INVENTORY, PROCESSES, SAMPLES, partition_of_node

_BATCH_TICKS: Final = 60
_CLOSING_SECONDS: Final = 2.0
_PUBLISHED: Final = {
    SAMPLES.name: TICKS_PUBLISHED,
    PROCESSES.name: PROCESS_RECORDS_PUBLISHED,
    INCIDENTS.name: INCIDENTS_PUBLISHED,
    INVENTORY.name: INVENTORIES_PUBLISHED,
}
_log = structlog.get_logger(__name__)


class Publisher:
    """Publishes one node's ticks."""

    def __init__(
        self, *, node: str, bus: Bus, queue: TickQueue, check: Check, backoff: Backoff
    ) -> None:
        self._node = node
        self._bus = bus
        self._queue = queue
        self._check = check
        self._backoff = backoff
        self._hand: dict[str, list[Message]] = {}
        self._emptied = asyncio.Event()

    @property
    def left(self) -> int:
        """How many ticks are not acknowledged yet."""
        return len(self._queue) + len(self._hand.get(SAMPLES.name, ()))

    @property
    def is_done(self) -> bool:
        """Whether everything that was queued is acknowledged."""
        return not (self._queue or self._hand)

    async def drained(self) -> None:
        """Wait until everything that was queued is acknowledged."""
        while not self.is_done:
            self._emptied.clear()
            await self._emptied.wait()

    async def run(self) -> None:
        """Publish for ever; a broker that does not answer is asked again, with a back-off."""
        while True:
            try:
                async with self._bus.producer() as producer:
                    await self._publish_from(producer)
            except (BusUnavailableError, TopicsError) as error:
                # A missing topic is no reason to stop sampling: it may be made in a moment.
                PUBLISH_FAILURES.inc()
                self._check.failed(str(error))
                wait_seconds = self._backoff.next_seconds()
                _log.warning(
                    "bus_unavailable",
                    detail=str(error),
                    queued=len(self._queue),
                    again=wait_seconds,
                )
                await asyncio.sleep(wait_seconds)

    async def _publish_from(self, producer: Producer) -> None:
        # All topics that are placed by node have the same number of partitions.
        partitions = await self._bus.partitions(SAMPLES.name)
        partition = partition_of_node(self._node, partitions=partitions)
        self._check.ok()
        while True:
            if not self._hand:
                self._hand = _by_topic(await self._queue.take(at_most=_BATCH_TICKS))
            for topic in tuple(self._hand):
                await producer.publish(topic, partition, self._hand[topic])
                _PUBLISHED[topic].inc(len(self._hand.pop(topic)))
            self._backoff.reset()
            self._check.ok()
            self._emptied.set()


def _by_topic(parcels: Sequence[Parcel]) -> dict[str, list[Message]]:
    """Sort messages by topic, each topic's in their order."""
    sorted_: dict[str, list[Message]] = {}
    for topic, message in chain.from_iterable(parcels):
        sorted_.setdefault(topic, []).append(message)
    lawful = {topic: _of_lawful_size(messages) for topic, messages in sorted_.items()}
    return {topic: messages for topic, messages in lawful.items() if messages}


def _of_lawful_size(messages: Sequence[Message]) -> list[Message]:
    """Leave out what no broker takes: it would be refused for ever, and all that is behind it."""
    lawful = [
        message
        for message in messages
        if len(message.key or b"") + len(message.value or b"") <= MAX_MESSAGE_BYTES
    ]
    if refused := len(messages) - len(lawful):
        MESSAGES_TOO_LARGE.inc(refused)
        _log.error("message_too_large", count=refused, most_bytes=MAX_MESSAGE_BYTES)
    return lawful


async def flush(publisher: Publisher, publishing: "asyncio.Task[None]", *, seconds: float) -> None:
    """Give the publisher `seconds` to send what is left, then end it; what remains is logged."""
    draining = asyncio.create_task(publisher.drained())
    both = {draining, publishing}
    await asyncio.wait(both, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in both:
        task.cancel()
    await asyncio.wait(both, timeout=_CLOSING_SECONDS)
    if not publisher.is_done:
        _log.warning("stopped_with_unpublished_ticks", queued=publisher.left)
