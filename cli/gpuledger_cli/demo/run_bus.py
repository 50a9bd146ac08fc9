"""A run's own view of the bus: nothing from before it, and what has become of what came since.

Each stage has a view of its own. Topics on a broker may hold records of earlier runs, which a new
table, or a group without commits, would be given from the first one on. The last class reads what
came of the run, for its totals and alerts.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from typing import Final

from gpuledger.bus.protocol import (
    Consumer,
    History,
    HistoryReader,
    Message,
    Producer,
    Record,
    Subscription,
    TopicPartition,
    Transactions,
    WholeBus,
    is_other_topic,
)
from gpuledger.codec import Decoder
from gpuledger.errors import BusError, NotAssignedError, UndecodableError
from gpuledger.keys import node_key
from gpuledger.records import AttributedIncident, GpuEvent
from gpuledger.runtime import Backoff
from gpuledger.topics import Topics
from gpuledger_cli.demo.totals import RunAlerts, Tally

Offsets = Mapping[TopicPartition, int]


async def find_beginning(bus: History) -> dict[TopicPartition, int]:
    """Return where a run that begins now begins: the ends of the topics that it will write to."""
    topics = bus.topics
    # The other topics hold states, which are read whole.
    of_a_run = (
        topics.samples,
        topics.processes,
        topics.incidents,
        topics.events,
        topics.attributed_incidents,
        topics.dead_letters,
    )
    async with bus.reader() as reader:
        return {
            partition: span.end
            for topic in of_a_run
            for partition, span in (await reader.spans(topic.name)).items()
        }


class RunBus:
    """One stage's view: records since the beginning, and how far the stage is with them."""

    def __init__(self, bus: WholeBus, *, beginning: Offsets, once: bool = False) -> None:
        """Take the bus; with `once` no record is given twice, whatever becomes of the group."""
        self.taken: dict[TopicPartition, int] = {}
        """For each partition the offset behind the last record that was polled and not set back."""
        self.delivered: dict[TopicPartition, int] = {}
        """For each partition the offset behind the last record that is done: what was committed."""
        self._bus = bus
        self._once = once
        self._first = dict(beginning)
        self._topic_ids: dict[str, str | None] = {}
        self._held: frozenset[TopicPartition] = frozenset()
        self._wanted: frozenset[TopicPartition] = frozenset()

    @property
    def topics(self) -> Topics:
        """The topics of the bus."""
        return self._bus.topics

    def holds_all(self) -> bool:
        """Return whether the group has given all partitions to this one member."""
        return bool(self._wanted) and self._held >= self._wanted

    def count_behind(
        self, offsets: Mapping[TopicPartition, int], records: Iterable[tuple[TopicPartition, int]]
    ) -> int:
        """Return how many of these records, of topics that the stage reads, are not before offsets.

        The offsets are `taken` or `delivered`.
        """
        return sum(
            partition in self._wanted and offset >= offsets.get(partition, 0)
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

    @asynccontextmanager
    async def consumer(self, subscription: Subscription) -> AsyncIterator[Consumer]:
        """Open a consumer that gives records of the run alone."""
        self._wanted = frozenset(at for at in self._first if at.topic in subscription.topics)
        consumer = _RunConsumer(view=self, subscription=subscription)
        async with self._bus.consumer(consumer.subscription) as consumer.inner:
            yield consumer

    def first(self, partition: TopicPartition) -> int:
        """Return the offset before which nothing of a partition is given."""
        return self._first.get(partition, 0)

    def take(self, partition: TopicPartition, records: Sequence[Record]) -> Sequence[Record]:
        """Return what is to be given of polled records, and record that it was."""
        first = self.first(partition)
        kept = records
        if records and records[0].offset < first:
            kept = [record for record in records if record.offset >= first]
        if kept:
            self.taken[partition] = kept[-1].offset + 1
            if self._once:
                self._first[partition] = kept[-1].offset + 1
        return kept

    def hold(self, partitions: Iterable[TopicPartition]) -> None:
        """Record what was assigned."""
        self._held |= frozenset(partitions)

    def give_up(self, partitions: Iterable[TopicPartition]) -> None:
        """Record what was revoked."""
        self._held -= frozenset(partitions)

    def learn(self, topic: str, topic_id: str | None) -> None:
        """Record a topic's identity; of one that was made anew, every record is the run's."""
        if is_other_topic(self._topic_ids.get(topic), topic_id):
            for offsets in (self._first, self.taken, self.delivered):
                offsets.update({at: 0 for at in offsets if at.topic == topic})
        self._topic_ids[topic] = topic_id


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

    async def _on_assigned(self, partitions: frozenset[TopicPartition]) -> None:
        # Before anybody is told: what a topic that was made anew holds is all the run's.
        for topic in sorted({partition.topic for partition in partitions}):
            self._view.learn(topic, await self.inner.topic_id(topic))
        await self._subscription.on_assigned(partitions)
        self._view.hold(partitions)

    async def _on_revoked(self, partitions: frozenset[TopicPartition]) -> None:
        self._view.give_up(partitions)
        await self._subscription.on_revoked(partitions)

    async def poll(
        self, *, timeout_seconds: float, max_records: int
    ) -> Mapping[TopicPartition, Sequence[Record]]:
        """Return records of the run; go on to it where the group was before it."""
        batch = await self.inner.poll(timeout_seconds=timeout_seconds, max_records=max_records)
        for partition, records in batch.items():
            first = self._view.first(partition)
            # Many batches before the run's beginning: leap over them rather than poll each.
            if records and records[-1].offset + 1 < first:
                with suppress(NotAssignedError):
                    await self.inner.seek(partition, first)
        given = {
            partition: self._view.take(partition, records) for partition, records in batch.items()
        }
        return {partition: records for partition, records in given.items() if records}

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Commit, and record that what is before the offsets is done."""
        await self.inner.commit(offsets)
        self._view.delivered.update(offsets)

    async def committed(self, partition: TopicPartition) -> int | None:
        """Return the committed offset."""
        return await self.inner.committed(partition)

    async def topic_id(self, topic: str) -> str | None:
        """Return the topic's identity."""
        return await self.inner.topic_id(topic)

    def assignment(self) -> frozenset[TopicPartition]:
        """Return the partitions that are held now."""
        return self.inner.assignment()

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Hand out no records of these partitions."""
        self.inner.pause(partitions)

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Hand out records of these partitions again."""
        self.inner.resume(partitions)

    async def seek(self, partition: TopicPartition, offset: int) -> None:
        """Read on from this offset, or from where the run began."""
        first = max(offset, self._view.first(partition))
        await self.inner.seek(partition, first)
        self._view.taken[partition] = first  # what was polled behind it is polled again

    async def position(self, partition: TopicPartition) -> int:
        """Return the offset of the next record to be polled."""
        return await self.inner.position(partition)

    async def end_offsets(
        self, partitions: Iterable[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        """Return the offsets behind the last records."""
        return await self.inner.end_offsets(partitions)

    def withheld_seconds(self) -> float:
        """Return for how long records have been withheld."""
        return self.inner.withheld_seconds()


PREFIX: Final = "gpuledger-demo-"
_OF_A_DEPLOYMENT: Final = "gpuledger-"


def own_group(group: str) -> str:
    """Return the name of the demo's group that does the work of a deployment's group.

    Its groups are its own, so that no deployment loses a partition to it; so are the join's
    transactional ids, which begin with its group.
    """
    return PREFIX + group.removeprefix(_OF_A_DEPLOYMENT)


def is_own(group: str) -> bool:
    """Return whether a group is a demo's."""
    return group.startswith(PREFIX)


_MAX_NEWEST: Final = 10_000


def subscription(topics: Topics) -> Subscription:
    """Return the subscription of the reader."""
    read = (topics.events, topics.attributed_incidents, topics.dead_letters)
    group = topics.group(own_group("gpuledger-reader"))
    return Subscription(group=group, topics=tuple(topic.name for topic in read))


class EventReader:
    """Follows the events of a run; its consumer gives each of them once."""

    def __init__(
        self,
        *,
        consumer: Consumer,
        tally: Tally,
        alerts: RunAlerts,
        beginning: Offsets,
        nodes: set[str],
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
        self._nodes = nodes
        self._begun = {at: end for at, end in beginning.items() if at.topic == topics.samples.name}
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
                self.newest.extend((partition, record.offset) for record in records)
                self._take(records)

    async def count_ticks(self) -> int:
        """Return how many ticks have been published since the run began."""
        ends = await self._consumer.end_offsets(self._begun)
        return sum(end - self._begun[partition] for partition, end in ends.items())

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
                # Others may write to the same topics: only this run's nodes count.
                if record.topic == self._topics.events.name:
                    event = self._event_decoder.decode(record.value)
                    if node_key(event) in self._nodes:
                        self._tally.add(event)
                        self._alerts.add(event)
                else:
                    attributed = self._incident_decoder.decode(record.value)
                    if node_key(attributed.incident) in self._nodes:
                        self._tally.presence.add_incident(attributed)
                        self._alerts.add_incident(attributed)
            except UndecodableError:
                continue  # the sinks put it aside, and it comes back here as a dead letter
