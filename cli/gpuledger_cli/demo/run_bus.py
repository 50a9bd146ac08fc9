"""What has become of a run's records: how far each stage is with them, and what came of them.

Each stage has a view of its own. The last class reads the events for the run's totals and alerts.
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
    """One stage's view: how far it is with the records of each partition."""

    def __init__(self, bus: Bus) -> None:
        """Take the bus."""
        self.taken: dict[TopicPartition, int] = {}
        """For each partition the offset behind the last record that was polled and not set back."""
        self.delivered: dict[TopicPartition, int] = {}
        """For each partition the offset behind the last record that is done: what was committed."""
        self._bus = bus
        self._wanted: frozenset[str] = frozenset()
        self._held: frozenset[TopicPartition] = frozenset()

    @property
    def topics(self) -> Topics:
        """The topics of the bus."""
        return self._bus.topics

    def holds_all(self) -> bool:
        """Return whether the group has given partitions of all topics to this member.

        It is the only one.
        """
        return bool(self._wanted) and {at.topic for at in self._held} >= self._wanted

    def count_behind(
        self, offsets: Mapping[TopicPartition, int], records: Iterable[tuple[TopicPartition, int]]
    ) -> int:
        """Return how many of these records, of topics that the stage reads, are not before offsets.

        The offsets are `taken` or `delivered`.
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
        """Open transactions whose offsets are done once they are committed."""
        async with self._bus.transactions(transactional_id) as inner:
            yield _RunTransactions(view=self, inner=inner)

    def reader(self) -> AbstractAsyncContextManager[HistoryReader]:
        """Open a reader, of states, which are read whole."""
        return self._bus.reader()

    async def partitions(self, topic: str) -> int:
        """Return the number of partitions; `TopicsError` where the topic does not exist."""
        return await self._bus.partitions(topic)

    async def describe(self, topic: str) -> TopicDescription:
        """Return what is known of a topic now; `TopicsError` where it does not exist."""
        return await self._bus.describe(topic)

    @asynccontextmanager
    async def consumer(self, subscription: Subscription) -> AsyncIterator[Consumer]:
        """Open a consumer whose progress is recorded, but for one of replayed events."""
        if self.topics.replay.name in subscription.topics:
            async with self._bus.consumer(subscription) as inner:
                yield inner
            return
        self._wanted = frozenset(subscription.topics)
        consumer = _RunConsumer(view=self, subscription=subscription)
        async with self._bus.consumer(consumer.subscription) as consumer.inner:
            yield cast("Consumer", consumer)

    def hold(self, partitions: Iterable[TopicPartition]) -> None:
        """Record what was assigned."""
        self._held |= frozenset(partitions)

    def give_up(self, partitions: Iterable[TopicPartition]) -> None:
        """Record what was revoked."""
        self._held -= frozenset(partitions)


class _RunTransactions:
    """Transactions of which the view hears."""

    def __init__(self, *, view: RunBus, inner: Transactions) -> None:
        self._view, self._inner = view, inner

    async def commit(
        self,
        messages: Mapping[TopicPartition, Sequence[Message]],
        *,
        offsets: Offsets,
        group: str,
    ) -> Offsets | None:
        """Commit, and record that what is before the offsets is done."""
        written = await self._inner.commit(messages, offsets=offsets, group=group)
        self._view.delivered.update(offsets)
        return written


class _RunConsumer:
    """A consumer of which the view hears; all but what is said here is the inner one's."""

    inner: Consumer

    def __init__(self, *, view: RunBus, subscription: Subscription) -> None:
        self._view = view
        self._subscription = subscription
        self.subscription = replace(
            subscription, on_assigned=self._on_assigned, on_revoked=self._on_revoked
        )

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # a method of a consumer
        """Return what the inner consumer has by this name."""
        return getattr(self.inner, name)

    async def _on_assigned(self, partitions: frozenset[TopicPartition]) -> None:
        await self._subscription.on_assigned(partitions)
        self._view.hold(partitions)

    async def _on_revoked(self, partitions: frozenset[TopicPartition]) -> None:
        self._view.give_up(partitions)
        await self._subscription.on_revoked(partitions)

    async def poll(self, *, timeout_seconds: float, max_records: int) -> Polled:
        """Return records, and record that they are taken."""
        polled = await self.inner.poll(timeout_seconds=timeout_seconds, max_records=max_records)
        for partition, records in polled.items():
            self._view.taken[partition] = records[-1].offset + 1
        return polled

    async def commit(self, offsets: Offsets) -> None:
        """Commit, and record that what is before the offsets is done."""
        await self.inner.commit(offsets)
        self._view.delivered.update(offsets)

    async def seek(self, partition: TopicPartition, offset: int) -> None:
        """Read on from this offset: what was polled behind it is polled again."""
        await self.inner.seek(partition, offset)
        self._view.taken[partition] = offset


_MAX_NEWEST: Final = 10_000


def subscription(topics: Topics) -> Subscription:
    """Return the subscription of the reader."""
    read = (topics.events, topics.attributed_incidents, topics.dead_letters)
    group = topics.group("gpuledger-reader")
    return Subscription(group=group, topics=tuple(topic.name for topic in read))


class EventReader:
    """Follows the events of a run, each of them once, whatever becomes of its group."""

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
        """Where the records that were read last stand: what the sinks should have too."""

    async def follow(self) -> None:
        """Hand events to the tally, for ever; brokers and topics that are away are waited for."""
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
        """Return whether nothing is left to read now: an incident may come behind its event."""
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
                continue  # the sinks put it aside, and it comes back here as a dead letter
