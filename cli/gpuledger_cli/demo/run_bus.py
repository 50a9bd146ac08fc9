"""Follows a run's records: each stage's progress, and the events for totals and alerts.

Each stage has its own view of the bus. `EventReader` reads the events.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any, Final, cast

from gpuledger.bus.protocol import (
    Bus,
    Consumer,
    HistoryReader,
    Message,
    Polled,
    Producer,
    Record,
    Subscription,
    TopicDescription,
    TopicPartition,
    Transactions,
)
from gpuledger.codec import Decoder
from gpuledger.errors import BusError, NotAssignedError, UndecodableError
from gpuledger.records import AttributedIncident, GpuEvent
from gpuledger.runtime import Backoff
from gpuledger.topics import Topics
from gpuledger_cli.demo.totals import RunAlerts, Tally

Offsets = Mapping[TopicPartition, int]


class RunBus:
    """A stage's view of the bus, which records its progress in each partition."""

    def __init__(self, bus: Bus) -> None:
        """Create a view of `bus`, without any progress yet."""
        self.taken: dict[TopicPartition, int] = {}
        """For each partition, the offset after the last record polled; a seek sets it back."""
        self.delivered: dict[TopicPartition, int] = {}
        """For each partition, the committed offset: the one after the last processed record."""
        self._bus = bus
        self._wanted: frozenset[str] = frozenset()
        self._held: frozenset[TopicPartition] = frozenset()

    @property
    def topics(self) -> Topics:
        """The topics of the bus."""
        return self._bus.topics

    def holds_all(self) -> bool:
        """Return whether the stage's consumer has partitions of all its topics.

        There is no other consumer in its group.
        """
        return bool(self._wanted) and {at.topic for at in self._held} >= self._wanted

    def count_behind(
        self, offsets: Mapping[TopicPartition, int], records: Iterable[tuple[TopicPartition, int]]
    ) -> int:
        """Return how many of these records the stage still has to reach, judging by `offsets`.

        `offsets` is `taken` or `delivered`. Records of topics that the stage does not read are not
        counted.
        """
        return sum(
            partition.topic in self._wanted and offset >= offsets.get(partition, 0)
            for partition, offset in records
        )

    def producer(self) -> AbstractAsyncContextManager[Producer]:
        """Open a producer."""
        return self._bus.producer()

    @asynccontextmanager
    async def transactions(self, transactional_id: str) -> AsyncIterator[Transactions]:
        """Open transactions, and record the offsets that they commit."""
        async with self._bus.transactions(transactional_id) as inner:
            yield _RunTransactions(view=self, inner=inner)

    def reader(self) -> AbstractAsyncContextManager[HistoryReader]:
        """Open a reader of whole topics."""
        return self._bus.reader()

    async def partitions(self, topic: str) -> int:
        """Return the number of partitions; raises `TopicsError` if the topic does not exist."""
        return await self._bus.partitions(topic)

    async def describe(self, topic: str) -> TopicDescription:
        """Return the description of a topic; raises `TopicsError` if it does not exist."""
        return await self._bus.describe(topic)

    @asynccontextmanager
    async def consumer(self, subscription: Subscription) -> AsyncIterator[Consumer]:
        """Open a consumer and record its progress.

        The progress of a consumer of replayed events is not recorded.
        """
        if self.topics.replay.name in subscription.topics:
            async with self._bus.consumer(subscription) as inner:
                yield inner
            return
        self._wanted = frozenset(subscription.topics)
        consumer = _RunConsumer(view=self, subscription=subscription)
        async with self._bus.consumer(consumer.subscription) as consumer.inner:
            yield cast("Consumer", consumer)

    def hold(self, partitions: Iterable[TopicPartition]) -> None:
        """Record assigned partitions."""
        self._held |= frozenset(partitions)

    def give_up(self, partitions: Iterable[TopicPartition]) -> None:
        """Record revoked partitions."""
        self._held -= frozenset(partitions)


class _RunTransactions:
    """Transactions that report their commits to the view."""

    def __init__(self, *, view: RunBus, inner: Transactions) -> None:
        self._view, self._inner = view, inner

    async def commit(
        self,
        messages: Mapping[TopicPartition, Sequence[Message]],
        *,
        offsets: Offsets,
        group: str,
    ) -> Offsets | None:
        """Commit, and record the offsets."""
        written = await self._inner.commit(messages, offsets=offsets, group=group)
        self._view.delivered.update(offsets)
        return written


class _RunConsumer:
    """A consumer that reports its progress to the view, and otherwise acts as the inner one."""

    inner: Consumer

    def __init__(self, *, view: RunBus, subscription: Subscription) -> None:
        self._view = view
        self._subscription = subscription
        self.subscription = replace(
            subscription, on_assigned=self._on_assigned, on_revoked=self._on_revoked
        )

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # a method of a consumer
        """Return the inner consumer's attribute of this name."""
        return getattr(self.inner, name)

    async def _on_assigned(self, partitions: frozenset[TopicPartition]) -> None:
        await self._subscription.on_assigned(partitions)
        self._view.hold(partitions)

    async def _on_revoked(self, partitions: frozenset[TopicPartition]) -> None:
        self._view.give_up(partitions)
        await self._subscription.on_revoked(partitions)

    async def poll(self, *, timeout_seconds: float, max_records: int) -> Polled:
        """Return records, and record the offsets after them."""
        polled = await self.inner.poll(timeout_seconds=timeout_seconds, max_records=max_records)
        for partition, records in polled.items():
            self._view.taken[partition] = records[-1].offset + 1
        return polled

    async def commit(self, offsets: Offsets) -> None:
        """Commit, and record the offsets."""
        await self.inner.commit(offsets)
        self._view.delivered.update(offsets)

    async def seek(self, partition: TopicPartition, offset: int) -> None:
        """Continue at this offset; later records are polled again."""
        await self.inner.seek(partition, offset)
        self._view.taken[partition] = offset


_MAX_NEWEST: Final = 10_000


def subscription(topics: Topics) -> Subscription:
    """Return the subscription of the reader."""
    read = (topics.events, topics.attributed_incidents, topics.dead_letters)
    group = topics.group("gpuledger-reader")
    return Subscription(group=group, topics=tuple(topic.name for topic in read))


class EventReader:
    """Follows the events of a run, and counts each once even if its group rebalances."""

    def __init__(
        self,
        *,
        consumer: Consumer,
        tally: Tally,
        alerts: RunAlerts,
        topics: Topics,
    ) -> None:
        self._topics = topics
        self._event_decoder = Decoder(topic=topics.events.name, record=GpuEvent)
        self._incident_decoder = Decoder(
            topic=topics.attributed_incidents.name, record=AttributedIncident
        )
        self._consumer = consumer
        self._tally = tally
        self._alerts = alerts
        self._next: dict[TopicPartition, int] = {}
        self.dead_letters = 0
        self.newest: deque[tuple[TopicPartition, int]] = deque(maxlen=_MAX_NEWEST)
        """Positions of the last records read, which the sinks should have delivered too."""

    async def follow(self) -> None:
        """Pass events to the tally until cancelled; wait for unavailable brokers and topics."""
        backoff = Backoff(first_seconds=0.2, max_seconds=5.0)
        while True:
            try:
                batch = await self._consumer.poll(timeout_seconds=0.5, max_records=500)
            except BusError:
                await asyncio.sleep(backoff.next_seconds())
                continue
            backoff.reset()
            for partition, records in batch.items():
                first = self._next.get(partition, 0)
                new = [record for record in records if record.offset >= first]
                self._next[partition] = max(first, records[-1].offset + 1)
                self.newest.extend((partition, record.offset) for record in new)
                self._take(new)

    async def has_read_all(self) -> bool:
        """Return whether all records in the topics are read, including late incidents."""
        try:
            ends = await self._consumer.end_offsets(self._consumer.assignment())
            at = {partition: await self._consumer.position(partition) for partition in ends}
        except NotAssignedError:
            return False
        return all(at[partition] >= end for partition, end in ends.items())

    def _take(self, records: Sequence[Record]) -> None:
        for record in records:
            if record.topic == self._topics.dead_letters.name:
                self.dead_letters += 1
                continue
            try:
                if record.topic == self._topics.events.name:
                    event = self._event_decoder.decode(record.value)
                    self._tally.add(event)
                    self._alerts.add(event)
                else:
                    attributed = self._incident_decoder.decode(record.value)
                    self._tally.gpu_tracker.add_incident(attributed)
                    self._alerts.add_incident(attributed)
            except UndecodableError:
                continue  # the sinks reject it, and it arrives here as a dead letter
