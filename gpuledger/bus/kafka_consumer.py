"""The reading end of the Kafka bus: one member of a group, its polls and its commits."""

import asyncio
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Final

import structlog
from aiokafka import AIOKafkaConsumer
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from aiokafka.errors import NoOffsetForPartitionError, OffsetOutOfRangeError

from gpuledger.bus.aiokafka_patches import consumers
from gpuledger.bus.aiokafka_patches.requests import fetch_topic_ids, heed_refused_offsets
from gpuledger.bus.aiokafka_patches.unpacking import install_unpacking
from gpuledger.bus.gaps import Withheld
from gpuledger.bus.kafka_connection import KafkaConnection, count_partitions
from gpuledger.bus.kafka_fetch import Rebalances, fetch, named
from gpuledger.bus.kafka_positions import Positions
from gpuledger.bus.protocol import IsolationLevel, Polled, Subscription, TopicPartition
from gpuledger.errors import BusUnavailableError, NotAssignedError, RefusedError, TopicsError
from gpuledger.settings import KafkaSettings

_log = structlog.get_logger(__name__)

JOIN_GRACE_SECONDS: Final = 5.0
"""How much longer a member waits for its share than the group waits for the other members."""
GIVE_UP_SECONDS: Final = 4.0
"""How long a commit on closing may take; what it does not reach is read again."""
GATHER_SECONDS: Final = 0.05
"""How long a broker gathers what a poll gets. Agents send batches of one tick: to take each up as
it comes costs half as much again."""
GATHER_BYTES: Final = 1_000_000
"""With so much it does not wait."""
SILENCE_SECONDS: Final = 10.0
"""How long the group's coordinator may be away before a poll says so."""


class KafkaConsumer:
    """Reads the partitions that its group gave it; connects with the first poll."""

    def __init__(
        self,
        *,
        connection: KafkaConnection,
        subscription: Subscription,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        self._silence_seconds = silence_seconds
        self._connection = connection
        self._subscription = subscription
        self._rebalances = Rebalances(subscription, begin=self._begin)
        self._positions = Positions(connection=connection, subscription=subscription)
        is_committed = subscription.isolation_level is IsolationLevel.READ_COMMITTED
        self._withheld = Withheld(subscription=subscription) if is_committed else None
        self._client: AIOKafkaConsumer | None = None
        self._opening = asyncio.Lock()
        self._answered_at = 0.0

    async def close(self) -> None:
        """Give up the partitions and leave the group, within the time that a process has to end."""
        try:
            async with asyncio.timeout(GIVE_UP_SECONDS):
                await self._rebalances.give_up()
        except TimeoutError:
            _log.info("commit_skipped", group=self._subscription.group)
        finally:
            if self._withheld:
                self._withheld.observe({})
            # Taken out first, so that what is called meanwhile opens no request on it.
            client, self._client = self._client, None
            if client is not None:
                await consumers.stop_consumer(client)

    async def poll(self, *, timeout_seconds: float, max_records: int) -> Polled:
        """Wait for records; take part in a rebalance where one is due."""
        # A consumer that always finds records would keep every other task from running.
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        client = await self._living()
        try:
            while True:
                await self._rebalances.follow()
                await self._must_have_topics(client)
                with self._connection.translating(self._doing("polling")):
                    records = await self._fetch(client, deadline=deadline, max_records=max_records)
                    if not records:
                        consumers.raise_group_errors(client)
                if records or loop.time() >= deadline:
                    self._check_answered(client, records)
                    self._positions.note(records)
                    if self._withheld:
                        held = map(named, self._rebalances.held)
                        self._withheld.observe(consumers.observed_offsets(client, held))
                    return records
        except NotAssignedError:
            return {}  # aiokafka was faster with a rebalance: the next poll takes part in it
        except (TopicsError, RefusedError):
            # Neither the topics nor the rights are looked at again by a client that has joined.
            await self._retire(client)
            raise
        finally:
            consumers.mark_polled(client)

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Commit offsets of partitions that are held."""
        self._must_hold(offsets)
        client = await self._opened()
        async with self._connection.requesting(self._doing("committing")):
            metadata = self._positions.metadata
            await client.commit(
                {
                    named(partition): (offset, metadata(partition))
                    for partition, offset in offsets.items()
                }
            )

    async def committed(self, partition: TopicPartition) -> int | None:
        """Return the committed offset, or `None`."""
        client = await self._opened()
        async with self._connection.requesting(self._doing("reading the committed offset")):
            return await self._positions.committed(client, partition)

    async def topic_id(self, topic: str) -> str | None:
        """Return the topic's identity, asked of the brokers now."""
        client = await self._opened()
        async with self._connection.requesting(self._doing("looking up the topic's identity")):
            found = await fetch_topic_ids(consumers.inner_client(client), [topic])
        if found is None:
            return None
        if topic not in found:
            raise BusUnavailableError(f"there is no topic {topic} on {self._connection.servers}")
        return found[topic]

    def assignment(self) -> frozenset[TopicPartition]:
        """Return the partitions that are held now."""
        return self._rebalances.held

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Hand out no records of these partitions."""
        if self._client is not None:
            self._client.pause(*map(named, self._rebalances.held & set(partitions)))

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Hand out records of these partitions again."""
        if self._client is not None:
            self._client.resume(*map(named, self._rebalances.held & set(partitions)))

    async def seek(self, partition: TopicPartition, offset: int) -> None:
        """Read on from this offset."""
        self._must_hold([partition])
        client = await self._opened()
        with self._connection.translating(self._doing("seeking")):
            if offset > 0:
                client.seek(named(partition), offset)
            else:
                consumers.reset_to_beginning(client, named(partition))

    async def position(self, partition: TopicPartition) -> int:
        """Return the offset of the next record to be polled."""
        self._must_hold([partition])
        client = await self._opened()
        async with self._connection.requesting(self._doing("looking up the position")):
            position: int = await client.position(named(partition))
            return position

    async def end_offsets(
        self, partitions: Iterable[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        """Return the offsets that the next published records will get."""
        wanted = [named(partition) for partition in partitions]
        client = await self._opened()
        async with self._connection.requesting(self._doing("looking up end offsets")):
            found = await client.end_offsets(wanted)
        return {TopicPartition(*partition): offset for partition, offset in found.items()}

    def withheld_seconds(self) -> float:
        """Return for how long records have been withheld behind an open transaction."""
        return self._withheld.seconds() if self._withheld else 0.0

    async def _fetch(
        self, client: AIOKafkaConsumer, *, deadline: float, max_records: int
    ) -> Polled:
        """Return what is there; nothing where it had to be gone on behind a gap first."""
        try:
            return await fetch(client, self._rebalances, deadline=deadline, max_records=max_records)
        except OffsetOutOfRangeError as error:
            await self._positions.go_on_after(client, error)
        except NoOffsetForPartitionError as error:
            # It was said between the assignment and our own seek, which may have come since.
            (partition,) = error.args
            if consumers.position_or_none(client, partition) is None:
                await self.seek(TopicPartition(*partition), 0)
        return {}

    async def _begin(self, partitions: frozenset[TopicPartition]) -> None:
        await self._positions.begin(await self._opened(), partitions)

    async def _living(self) -> AIOKafkaConsumer:
        """Return the client; replace one that would never read what there is now."""
        client = self._client
        if client is not None and await self._positions.must_begin_again(
            client, self._rebalances.held
        ):
            # Its metadata would name the old topic for minutes. Whoever holds partitions gives
            # them up as in a rebalance, so that nothing of the old topic is left anywhere.
            self._positions.close()
            try:
                await self._rebalances.give_up()
            finally:
                await self._retire(client)
        if self._client is not None and consumers.is_dead(self._client):
            _log.warning("consumer_replaced", group=self._subscription.group)
            await self._retire(self._client)
        return await self._opened()

    async def _retire(self, client: AIOKafkaConsumer) -> None:
        """Close a client; the next call opens another one, once all topics are there."""
        self._client = None
        await consumers.stop_consumer(client)
        await self._rebalances.end()

    async def _must_have_topics(self, client: AIOKafkaConsumer) -> None:
        """Raise `TopicsError` where a topic was deleted: its partitions just go, with no error."""
        # Before that `_open` has looked, and a group that forms takes as long as it takes.
        if not self._rebalances.has_joined:
            return
        inner, topics = consumers.inner_client(client), self._subscription.topics
        if all(inner.cluster.partitions_for_topic(topic) for topic in topics):
            return
        # A broker that has just started may not know of it yet: all are asked.
        async with self._connection.requesting(self._doing("looking up topics")):
            await count_partitions(inner, topics, servers=self._connection.servers, rights="Read")
            await inner.force_metadata_update()

    async def _opened(self) -> AIOKafkaConsumer:
        async with self._opening:
            # One at a time: a poll and a commit may both find none.
            if self._client is None:
                self._client = await self._open()
                self._answered_at = asyncio.get_running_loop().time()
            return self._client

    async def _open(self) -> AIOKafkaConsumer:
        install_unpacking()
        own = group_arguments(self._subscription, self._connection.settings)
        client = AIOKafkaConsumer(**(self._connection.arguments | own))
        try:
            async with self._connection.requesting(self._doing("connecting")):
                await client.start()
                heed_refused_offsets(client)
                topics = list(self._subscription.topics)
                servers = self._connection.servers
                inner = consumers.inner_client(client)
                await count_partitions(inner, topics, servers=servers, rights="Read")
                # Not before `start`, which would wait for an assignment and so for other members.
                client.subscribe(topics, listener=self._rebalances)
        except BaseException:
            await consumers.stop_consumer(client)
            raise
        return client

    def _check_answered(self, client: AIOKafkaConsumer, records: Polled) -> None:
        now = asyncio.get_running_loop().time()
        if records or consumers.has_coordinator(client):
            self._answered_at = now
        elif now - self._answered_at > self._silence_seconds:
            raise BusUnavailableError(
                f"{self._doing('polling')}: no broker of {self._connection.servers} "
                f"has coordinated the group for {now - self._answered_at:.0f} s"
                f"{self._connection.refused_within(now - self._answered_at)}"
            )

    def _must_hold(self, partitions: Iterable[TopicPartition]) -> None:
        for topic, number in set(partitions) - self._rebalances.held:
            raise NotAssignedError(
                f"{topic}-{number} is not held by this consumer "
                f"of the group {self._subscription.group!r}"
            )

    def _doing(self, what: str) -> str:
        return f"{what} in the group {self._subscription.group!r}"


@cache
def _assignor_of(stage: str) -> type[RangePartitionAssignor]:
    """Return the range assignor under the stage's name.

    Brokers let nobody join a group who has no assignor in common with its members.
    """
    name = f"{RangePartitionAssignor.name}/{stage}" if stage else RangePartitionAssignor.name
    return type("StageAssignor", (RangePartitionAssignor,), {"name": name})


def group_arguments(subscription: Subscription, settings: KafkaSettings) -> dict[str, object]:
    """Return what aiokafka takes of a member of a group, beside what every client takes."""
    session_seconds = settings.session_timeout_seconds
    longest_seconds = max(settings.request_timeout_seconds, session_seconds + JOIN_GRACE_SECONDS)
    return {
        # A request to join that is given up leaves a member behind that nobody is.
        "request_timeout_ms": int(longest_seconds * 1000),
        "group_id": subscription.group,
        "group_instance_id": subscription.group_instance_id or settings.group_instance_id or None,
        # Equal numbers of all topics go to one member: a node's pods lie where its ticks do.
        "partition_assignment_strategy": (_assignor_of(subscription.stage),),
        # What was removed before it was read is an error, which becomes a gap: not a jump.
        "auto_offset_reset": "none",
        # What is committed is what was delivered, which the stage alone knows.
        "enable_auto_commit": False,
        "fetch_max_wait_ms": int(GATHER_SECONDS * 1000),
        # Together with the wait above: a batch of one tick is not fetched by itself.
        "fetch_min_bytes": GATHER_BYTES,
        "isolation_level": subscription.isolation_level.value,
        "session_timeout_ms": int(session_seconds * 1000),
        "heartbeat_interval_ms": int(settings.heartbeat_seconds * 1000),
        # How long the group waits for a member that works on what it polled.
        "rebalance_timeout_ms": int(session_seconds * 1000),
        "max_poll_interval_ms": int(settings.max_poll_interval_seconds * 1000),
    }
