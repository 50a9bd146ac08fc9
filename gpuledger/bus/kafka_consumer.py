"""The consumer of the Kafka bus: one member of a group, its polls and commits."""

import asyncio
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Final

import structlog
from aiokafka import AIOKafkaConsumer
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from aiokafka.errors import NoOffsetForPartitionError, OffsetOutOfRangeError

from gpuledger.bus.aiokafka_patches import consumers
from gpuledger.bus.aiokafka_patches.coordinators import look_up_at_each_broker
from gpuledger.bus.aiokafka_patches.requests import fetch_topic_ids, heed_refused_offsets
from gpuledger.bus.aiokafka_patches.unpacking import install_unpacking
from gpuledger.bus.gaps import Withheld
from gpuledger.bus.kafka_connection import KafkaConnection, count_partitions
from gpuledger.bus.kafka_fetch import Answers, Rebalances, fetch, named
from gpuledger.bus.kafka_positions import Positions
from gpuledger.bus.protocol import IsolationLevel, Polled, Subscription, TopicPartition
from gpuledger.errors import BusUnavailableError, NotAssignedError, RefusedError, TopicsError
from gpuledger.settings import KafkaSettings

_log = structlog.get_logger(__name__)

JOIN_GRACE_SECONDS: Final = 5.0
"""How much longer a member waits for its share than the group waits for the other members."""
GIVE_UP_SECONDS: Final = 4.0
"""Timeout of the commit on closing; records that it does not cover are read again."""
GATHER_SECONDS: Final = 0.05
"""How long a broker collects records for a fetch. Agents send batches of one tick; fetching each
batch as it arrives costs one and a half times as much."""
GATHER_BYTES: Final = 1_000_000
"""With this many bytes, a broker answers a fetch immediately."""
MAX_UNANSWERED_SECONDS: Final = 10.0
"""How long the group's coordinator may be unavailable before a poll fails, and how long the brokers
of the partitions before `is_answered` returns false."""


class KafkaConsumer:
    """Reads the partitions that its group assigned to it; connects with the first poll."""

    def __init__(
        self,
        *,
        connection: KafkaConnection,
        subscription: Subscription,
        max_unanswered_seconds: float = MAX_UNANSWERED_SECONDS,
    ) -> None:
        self._max_unanswered_seconds = max_unanswered_seconds
        self._connection = connection
        self._subscription = subscription
        self._rebalances = Rebalances(subscription, begin=self._begin)
        self._positions = Positions(connection=connection, subscription=subscription)
        is_committed = subscription.isolation_level is IsolationLevel.READ_COMMITTED
        self._withheld = Withheld(subscription=subscription) if is_committed else None
        self._answers = Answers()
        self._client: AIOKafkaConsumer | None = None
        self._opening = asyncio.Lock()
        self._answered_at = 0.0

    async def close(self) -> None:
        """Give up the partitions and leave the group; skip a commit that takes too long."""
        try:
            async with asyncio.timeout(GIVE_UP_SECONDS):
                await self._rebalances.give_up()
        except TimeoutError:
            _log.info("commit_skipped", group=self._subscription.group)
        finally:
            if self._withheld:
                self._withheld.observe({})
            # Unset first, so that a concurrent call does not use the client any more.
            client, self._client = self._client, None
            if client is not None:
                await consumers.stop_consumer(client)

    async def poll(self, *, timeout_seconds: float, max_records: int) -> Polled:
        """Return records, or nothing after `timeout_seconds`; take part in a rebalance if due."""
        # Lets other tasks run, which a busy consumer would otherwise prevent.
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
                    self._observe(client)
                    return records
        except NotAssignedError:
            return {}  # aiokafka started a rebalance first: the next poll takes part in it
        except (TopicsError, RefusedError):
            # A new client, because one that has joined never checks topics and permissions again.
            await self._retire(client)
            raise
        finally:
            consumers.mark_polled(client)

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Commit offsets of assigned partitions."""
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
        """Return the partition's committed offset, or `None` if nothing is committed.

        Raises `BusUnavailableError` if a pending transaction may change the offset and does not
        end.
        """
        client = await self._opened()
        doing, is_pending = self._doing("reading the committed offset"), False

        def note_pending() -> None:
            nonlocal is_pending
            is_pending = True

        try:
            async with self._connection.requesting(doing):
                return await self._positions.committed(client, partition, on_pending=note_pending)
        except BusUnavailableError as error:
            if not is_pending:
                raise
            raise BusUnavailableError(
                f"{doing}: a transaction that contains the offset of {partition.topic}-"
                f"{partition.partition} has not ended; if it does not end, find and abort it with"
                " Kafka's tools (kafka-transactions.sh find-hanging)"
            ) from error

    async def report_moved(self, partition: TopicPartition, *, read_before: int | None) -> bool:
        """Report a gap if another program moved the offset that `committed` returned last."""
        return await self._positions.report_moved(partition, read_before=read_before)

    async def report_recreated(
        self, partition: TopicPartition, *, topic_id: str, read_before: int
    ) -> None:
        """Report a gap: the component has read an earlier topic of the same name."""
        await self._positions.report_recreated(partition, read_before, topic_id)

    async def topic_id(self, topic: str) -> str | None:
        """Request the topic's id from the brokers; return `None` if the topic has no id.

        Raises `BusUnavailableError` if the topic does not exist.
        """
        client = await self._opened()
        async with self._connection.requesting(self._doing("looking up the topic id")):
            found = await fetch_topic_ids(consumers.inner_client(client), [topic])
        if found is None:
            return None
        if topic not in found:
            raise BusUnavailableError(f"there is no topic {topic} on {self._connection.servers}")
        return found[topic]

    def assignment(self) -> frozenset[TopicPartition]:
        """Return the partitions that are currently assigned."""
        return self._rebalances.held

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Make `poll` return no records of these partitions until they are resumed."""
        if self._client is not None:
            self._client.pause(*map(named, self._rebalances.held & set(partitions)))

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Make `poll` return records of these partitions again."""
        if self._client is not None:
            self._client.resume(*map(named, self._rebalances.held & set(partitions)))

    async def seek(self, partition: TopicPartition, offset: int) -> None:
        """Continue reading at this offset."""
        self._must_hold([partition])
        client = await self._opened()
        with self._connection.translating(self._doing("seeking")):
            if offset > 0:
                client.seek(named(partition), offset)
            else:
                consumers.reset_to_beginning(client, named(partition))

    async def position(self, partition: TopicPartition) -> int:
        """Return the offset of the next record to poll."""
        self._must_hold([partition])
        client = await self._opened()
        async with self._connection.requesting(self._doing("looking up the position")):
            position: int = await client.position(named(partition))
            return position

    async def end_offsets(
        self, partitions: Iterable[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        """Return, for each partition, the offset after the last record that can be read now."""
        wanted = [named(partition) for partition in partitions]
        client = await self._opened()
        async with self._connection.requesting(self._doing("looking up end offsets")):
            found = await client.end_offsets(wanted)
        return {TopicPartition(*partition): offset for partition, offset in found.items()}

    def at_end(self) -> frozenset[TopicPartition]:
        """Return the partitions whose position is at the end that a broker last reported."""
        client = self._client
        if client is None:
            return frozenset()
        offsets = consumers.observed_offsets(client, map(named, self._rebalances.held))
        return frozenset(
            TopicPartition(*partition)
            for partition, (position, stable, end) in offsets.items()
            if position >= (stable if self._withheld else end)
        )

    def withheld_seconds(self) -> float:
        """Return how long an open transaction has withheld records; 0 if none does."""
        return self._withheld.seconds() if self._withheld else 0.0

    def is_answered(self) -> bool:
        """Return whether brokers have recently answered for every partition that is read."""
        return (
            self._rebalances.has_joined and self._answers.seconds() < self._max_unanswered_seconds
        )

    def _observe(self, client: AIOKafkaConsumer) -> None:
        held = [*map(named, self._rebalances.held)]
        if self._withheld:
            self._withheld.observe(consumers.observed_offsets(client, held))
        # Without partitions, only the group's coordinator can answer.
        if held or consumers.has_coordinator(client):
            self._answers.observe(consumers.answer_times(client, held))

    async def _fetch(
        self, client: AIOKafkaConsumer, *, deadline: float, max_records: int
    ) -> Polled:
        """Return fetched records; return nothing if the position had to be set first."""
        try:
            return await fetch(client, self._rebalances, deadline=deadline, max_records=max_records)
        except OffsetOutOfRangeError as error:
            await self._positions.skip_to_available(client, error)
        except NoOffsetForPartitionError as error:
            # aiokafka raises this error while no start position is set; one may have been set
            # since.
            (partition,) = error.args
            if consumers.position_or_none(client, partition) is None:
                await self.seek(TopicPartition(*partition), 0)
        return {}

    async def _begin(self, partitions: frozenset[TopicPartition]) -> None:
        await self._positions.begin(await self._opened(), partitions)

    async def _living(self) -> AIOKafkaConsumer:
        """Return the client; replace it if its topics have changed or its tasks have ended."""
        client = self._client
        if client is not None and await self._positions.must_begin_again(
            client, self._rebalances.held
        ):
            # The client's metadata would describe the old topic for minutes. The stage gives up
            # its partitions as in a rebalance, so that it keeps no state of the old topic.
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
        """Close a client; the next call opens another one once all topics exist."""
        self._client = None
        await consumers.stop_consumer(client)
        await self._rebalances.end()

    async def _must_have_topics(self, client: AIOKafkaConsumer) -> None:
        """Raise `TopicsError` if a topic was deleted; aiokafka would only drop its partitions."""
        # `_open` has checked the topics; no further check is needed before the consumer has joined,
        # even if the group takes long to form.
        if not self._rebalances.has_joined:
            return
        inner, topics = consumers.inner_client(client), self._subscription.topics
        if all(inner.cluster.partitions_for_topic(topic) for topic in topics):
            return
        # The cached metadata may come from a broker that has just started: request it again.
        async with self._connection.requesting(self._doing("looking up topics")):
            await count_partitions(inner, topics, servers=self._connection.servers, rights="Read")
            await inner.force_metadata_update()

    async def _opened(self) -> AIOKafkaConsumer:
        async with self._opening:
            # Locked, because a concurrent poll and commit may both find no client.
            if self._client is None:
                self._client = await self._open()
                self._answered_at = asyncio.get_running_loop().time()
            return self._client

    async def _open(self) -> AIOKafkaConsumer:
        install_unpacking()
        own = group_arguments(self._subscription, self._connection.settings)
        client = AIOKafkaConsumer(**(self._connection.arguments | own))
        look_up_at_each_broker(consumers.inner_client(client))
        try:
            async with self._connection.requesting(self._doing("connecting")):
                await client.start()
                heed_refused_offsets(client)
                topics = list(self._subscription.topics)
                servers = self._connection.servers
                inner = consumers.inner_client(client)
                await count_partitions(inner, topics, servers=servers, rights="Read")
                # After `start`, which would otherwise wait for an assignment and other members.
                client.subscribe(topics, listener=self._rebalances)
        except BaseException:
            await consumers.stop_consumer(client)
            raise
        return client

    def _check_answered(self, client: AIOKafkaConsumer, records: Polled) -> None:
        now = asyncio.get_running_loop().time()
        if records or consumers.has_coordinator(client):
            self._answered_at = now
        elif now - self._answered_at > self._max_unanswered_seconds:
            raise BusUnavailableError(
                f"{self._doing('polling')}: {self._connection.servers} "
                f"has had no group coordinator for {now - self._answered_at:.0f} s"
                f"{self._connection.refused_within(now - self._answered_at)}"
            )

    def _must_hold(self, partitions: Iterable[TopicPartition]) -> None:
        for topic, number in set(partitions) - self._rebalances.held:
            raise NotAssignedError(
                f"{topic}-{number} is not assigned to this consumer "
                f"of the group {self._subscription.group!r}"
            )

    def _doing(self, what: str) -> str:
        return f"{what} in the group {self._subscription.group!r}"


@cache
def _assignor_of(stage: str) -> type[RangePartitionAssignor]:
    """Return a range assignor with the stage's name.

    A broker rejects a member that has no assignor in common with the group's other members, so
    members of another stage cannot join.
    """
    name = f"{RangePartitionAssignor.name}/{stage}" if stage else RangePartitionAssignor.name
    return type("StageAssignor", (RangePartitionAssignor,), {"name": name})


def group_arguments(subscription: Subscription, settings: KafkaSettings) -> dict[str, object]:
    """Return the aiokafka arguments of a group member, in addition to those of every client."""
    session_seconds = settings.session_timeout_seconds
    longest_seconds = max(settings.request_timeout_seconds, session_seconds + JOIN_GRACE_SECONDS)
    return {
        # A join request that times out leaves an orphaned member in the group.
        "request_timeout_ms": int(longest_seconds * 1000),
        "group_id": subscription.group,
        "group_instance_id": subscription.group_instance_id or settings.group_instance_id or None,
        # A member gets the same partition numbers of all topics, because it needs both the pods and
        # the ticks of a node.
        "partition_assignment_strategy": (_assignor_of(subscription.stage),),
        # Records removed before they were read raise an error, which becomes a gap, not a jump.
        "auto_offset_reset": "none",
        # Only the stage knows which records it has delivered.
        "enable_auto_commit": False,
        "fetch_max_wait_ms": int(GATHER_SECONDS * 1000),
        # Together with the wait above, this avoids fetching each one-tick batch separately.
        "fetch_min_bytes": GATHER_BYTES,
        "isolation_level": subscription.isolation_level.value,
        "session_timeout_ms": int(session_seconds * 1000),
        "heartbeat_interval_ms": int(settings.heartbeat_seconds * 1000),
        # How long the group waits for a member that is processing polled records.
        "rebalance_timeout_ms": int(session_seconds * 1000),
        "max_poll_interval_ms": int(settings.max_poll_interval_seconds * 1000),
    }
