"""A component's view of a bus, which records the component's progress in each partition."""

from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any, cast

from gpuledger.bus.protocol import (
    Bus,
    Consumer,
    HistoryReader,
    Message,
    Polled,
    Producer,
    Subscription,
    TopicDescription,
    TopicPartition,
    Transactions,
)
from gpuledger.topics import Topics

Offsets = Mapping[TopicPartition, int]


class BusView:
    """A bus as one component uses it; `polled` and `committed` show the component's progress."""

    def __init__(self, bus: Bus) -> None:
        """Create a view of `bus`, without any progress yet."""
        self.published: Counter[str] = Counter()
        """For each topic, the number of messages that the component published. A message counts
        once, even if it was sent again because an acknowledgement was lost."""
        self.polled: dict[TopicPartition, int] = {}
        """For each partition, the offset after the last record polled; a seek sets it back."""
        self.committed: dict[TopicPartition, int] = {}
        """For each partition, the committed offset: the one after the last processed record."""
        self._bus = bus
        self._subscribed: frozenset[str] = frozenset()
        self._assigned: frozenset[TopicPartition] = frozenset()

    @property
    def topics(self) -> Topics:
        """The topics of the bus."""
        return self._bus.topics

    def has_all_partitions(self) -> bool:
        """Return whether the component's consumer has been assigned partitions of all its topics.

        It then has all partitions, because there is no other consumer in its group.
        """
        return bool(self._subscribed) and {at.topic for at in self._assigned} >= self._subscribed

    def count_behind(
        self, offsets: Mapping[TopicPartition, int], records: Iterable[tuple[TopicPartition, int]]
    ) -> int:
        """Return how many of these records the component has not reached yet, judging by `offsets`.

        `offsets` is `polled` or `committed`. Records of topics that the component does not read
        are not counted.
        """
        return sum(
            partition.topic in self._subscribed and offset >= offsets.get(partition, 0)
            for partition, offset in records
        )

    def count_until(
        self, ends: Mapping[TopicPartition, int], offsets: Mapping[TopicPartition, int]
    ) -> int:
        """Return how many records are between `offsets` and the ends of partitions.

        `offsets` is `polled` or `committed`. Topics that the component does not read do not count.
        """
        return sum(
            max(0, end - offsets.get(partition, 0))
            for partition, end in ends.items()
            if partition.topic in self._subscribed
        )

    @asynccontextmanager
    async def producer(self) -> AsyncIterator[Producer]:
        """Open a producer, and count the messages that it publishes."""
        async with self._bus.producer() as inner:
            yield _ViewedProducer(view=self, inner=inner)

    @asynccontextmanager
    async def transactions(self, transactional_id: str) -> AsyncIterator[Transactions]:
        """Open transactions, and record the offsets that they commit."""
        async with self._bus.transactions(transactional_id) as inner:
            yield _ViewedTransactions(view=self, inner=inner)

    def reader(self) -> AbstractAsyncContextManager[HistoryReader]:
        """Open a reader of whole topics."""
        return self._bus.reader()

    async def partitions(self, topic: str) -> int:
        """Return the number of partitions; raises `TopicsError` if the topic does not exist."""
        return await self._bus.partitions(topic)

    async def describe(self, topic: str) -> TopicDescription:
        """Return the description of a topic; raises `TopicsError` if it does not exist."""
        return await self._bus.describe(topic)

    async def topic_id(self, topic: str) -> str | None:
        """Return the current id of a topic; `None` if it is unknown."""
        return await self._bus.topic_id(topic)

    @asynccontextmanager
    async def consumer(self, subscription: Subscription) -> AsyncIterator[Consumer]:
        """Open a consumer and record its progress.

        The progress of a consumer of replayed events is not recorded.
        """
        if self.topics.replay.name in subscription.topics:
            async with self._bus.consumer(subscription) as inner:
                yield inner
            return
        self._subscribed = frozenset(subscription.topics)
        consumer = _ViewedConsumer(view=self, subscription=subscription)
        async with self._bus.consumer(consumer.subscription) as consumer.inner:
            yield cast("Consumer", consumer)

    def record_assigned(self, partitions: Iterable[TopicPartition]) -> None:
        """Record assigned partitions."""
        self._assigned |= frozenset(partitions)

    def record_revoked(self, partitions: Iterable[TopicPartition]) -> None:
        """Record revoked partitions."""
        self._assigned -= frozenset(partitions)


class _ViewedProducer:
    """A producer that reports acknowledged messages to the view."""

    def __init__(self, *, view: BusView, inner: Producer) -> None:
        self._view, self._inner = view, inner

    async def publish(self, topic: str, partition: int, messages: Sequence[Message]) -> int | None:
        """Publish, and count the messages."""
        end = await self._inner.publish(topic, partition, messages)
        self._view.published[topic] += len(messages)
        return end


class _ViewedTransactions:
    """Transactions that report their commits to the view."""

    def __init__(self, *, view: BusView, inner: Transactions) -> None:
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
        self._view.committed.update(offsets)
        return written


class _ViewedConsumer:
    """A consumer that reports its progress to the view, and otherwise acts as the inner one."""

    inner: Consumer

    def __init__(self, *, view: BusView, subscription: Subscription) -> None:
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
        self._view.record_assigned(partitions)

    async def _on_revoked(self, partitions: frozenset[TopicPartition]) -> None:
        self._view.record_revoked(partitions)
        await self._subscription.on_revoked(partitions)

    async def poll(self, *, timeout_seconds: float, max_records: int) -> Polled:
        """Return records, and record the offsets after them."""
        polled = await self.inner.poll(timeout_seconds=timeout_seconds, max_records=max_records)
        for partition, records in polled.items():
            self._view.polled[partition] = records[-1].offset + 1
        return polled

    async def commit(self, offsets: Offsets) -> None:
        """Commit, and record the offsets."""
        await self.inner.commit(offsets)
        self._view.committed.update(offsets)

    async def seek(self, partition: TopicPartition, offset: int) -> None:
        """Continue at this offset; later records are polled again."""
        await self.inner.seek(partition, offset)
        self._view.polled[partition] = offset
