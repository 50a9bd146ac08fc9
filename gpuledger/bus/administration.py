"""Holds the topics on the brokers to the topic table: makes what is missing, says what differs.

Nothing that exists is changed: a partition count cannot be without moving records away from where
their readers look for them, and a configuration may differ on purpose. `KafkaAdmin` makes the
requests, each of them again where a broker is away.
"""

import asyncio
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Container,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final, Literal, TypeVar

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    KafkaError,
    TopicAlreadyExistsError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
    for_code,
)

from gpuledger.bus.kafka_connection import KafkaConnection
from gpuledger.errors import RefusedError, TopicsError
from gpuledger.settings import KafkaSettings
from gpuledger.topics import Topic, Topics

T = TypeVar("T")

PAUSE_SECONDS: Final = 0.1
_HIDDEN_ANSWERS: Final = 50
"""So many answers in a row in which a topic that has a configuration does not stand are believed;
a broker may not have heard yet of one that was just made."""
_NO_RIGHT: Final = frozenset(
    {TopicAuthorizationFailedError.errno, ClusterAuthorizationFailedError.errno}
)


@dataclass(frozen=True, kw_only=True)
class FoundTopic:
    """A topic as the brokers have it."""

    partitions: int
    """How many partitions."""
    replication_factor: int
    """How many replicas its first partition has."""
    config: Mapping[str, str]
    """Its configuration, defaults included."""


@dataclass(frozen=True, kw_only=True)
class WantedTopic:
    """A topic to be made."""

    name: str
    """The topic's name."""
    partitions: int
    """How many partitions."""
    replication_factor: int
    """How many replicas of each."""
    config: Mapping[str, str]
    """Configuration that is not the brokers' default."""


class KafkaAdmin:
    """Asks and changes topics; each call may be repeated, for one broker may be away."""

    def __init__(self, *, connection: KafkaConnection, client: AIOKafkaAdminClient) -> None:
        self._connection = connection
        self._client = client

    async def count_brokers(self) -> int:
        """Return the number of brokers that are there now."""
        cluster = await self._repeated("counting the brokers", self._client.describe_cluster)
        return len(cluster["brokers"])

    async def describe(self, topics: Sequence[str]) -> dict[str, FoundTopic]:
        """Return those of the topics that exist; `RefusedError` where a right is missing to tell.

        To a user without `Describe` a topic is as good as absent, but not to one who may read its
        configuration: so the two answers together say which right it is.
        """
        partitions = await self._partitions()
        # In this order: a topic that is made in between is in the second answer alone, and is
        # looked up again.
        configs = await self._configs(topics, listed=partitions)
        for _ in range(_HIDDEN_ANSWERS):
            if configs.keys() <= partitions.keys():
                break
            await asyncio.sleep(PAUSE_SECONDS)
            partitions = await self._partitions()
        if hidden := sorted(configs.keys() - partitions.keys()):
            raise self._refused("looking up topics", hidden, rights="Describe")
        return {
            topic: FoundTopic(
                partitions=len(partitions[topic]),
                replication_factor=len(partitions[topic][0]["replicas"]),
                config=config,
            )
            for topic, config in configs.items()
        }

    async def create(self, topics: Sequence[WantedTopic]) -> None:
        """Make topics and wait until they can be seen; `TopicsError` where one is refused."""
        made = [
            NewTopic(
                topic.name, topic.partitions, topic.replication_factor, None, dict(topic.config)
            )
            for topic in topics
        ]
        answer = await self._repeated("creating topics", lambda: self._client.create_topics(made))
        for name, code, *message in answer.topic_errors:
            # Kafka says "cluster" where the right is the one to make topics anywhere.
            if code in _NO_RIGHT:
                raise self._refused("creating topics", [name], rights="Create")
            # Somebody else made it in the meantime; the check afterwards says whether rightly.
            if code not in (0, TopicAlreadyExistsError.errno):
                raise TopicsError(f"{name} was not created: {message[0]}")
        names = [topic.name for topic in topics]
        # The controller has them; other brokers hear of them later, and say until then that they
        # do not exist.
        async with self._connection.requesting("waiting for the topics that were created"):
            while len(await self.describe(names)) < len(names):  # noqa: ASYNC110  # brokers send no event
                await asyncio.sleep(PAUSE_SECONDS)

    async def delete(self, names: Sequence[str]) -> None:
        """Delete topics, those that are there; `TopicsError` where one is refused."""
        answer = await self._repeated(
            "deleting topics", lambda: self._client.delete_topics(list(names))
        )
        for name, code in answer.topic_error_codes:
            if code in _NO_RIGHT:
                raise self._refused("deleting topics", [name], rights="Delete")
            if code not in (0, UnknownTopicOrPartitionError.errno):
                raise TopicsError(f"{name} was not deleted: {for_code(code).description}")

    async def _partitions(self) -> dict[str, Any]:
        described = await self._repeated("looking up topics", self._client.describe_topics)
        return {topic["topic"]: topic["partitions"] for topic in described if topic["partitions"]}

    async def _configs(
        self, topics: Sequence[str], *, listed: Container[str]
    ) -> dict[str, dict[str, str]]:
        """Return the configuration of those that exist; `RefusedError` where one may not be read.

        `listed` are those whose `Describe` the user has.
        """
        resources = [ConfigResource(ConfigResourceType.TOPIC, topic) for topic in topics]
        found = await self._repeated(
            "reading configurations", lambda: self._describe_configs(resources)
        )
        refused = [name for name in topics if name not in found]
        if refused:
            has_describe = all(name in listed for name in refused)
            rights = "DescribeConfigs" if has_describe else "Describe and DescribeConfigs"
            raise self._refused("reading configurations", refused, rights=rights)
        return {name: config for name, config in found.items() if config is not None}

    async def _describe_configs(
        self, resources: Sequence[ConfigResource]
    ) -> dict[str, dict[str, str] | None]:
        """Return each topic's configuration, `None` of an absent one; what is refused is left out.

        aiokafka hands each topic's error over as a number. Raises `KafkaError` for the others.
        """
        found: dict[str, dict[str, str] | None] = {}
        answers = await self._client.describe_configs(list(resources)) if resources else ()
        for code, message, _, name, entries in chain.from_iterable(
            answer.resources for answer in answers
        ):
            if code == UnknownTopicOrPartitionError.errno:
                found[name] = None
            elif code == 0:
                found[name] = {entry[0]: entry[1] for entry in entries}
            elif code != TopicAuthorizationFailedError.errno:
                raise for_code(code)(message)
        return found

    def _refused(self, doing: str, topics: Iterable[str], *, rights: str) -> RefusedError:
        return RefusedError(
            f"{doing}: {self._connection.servers} does not allow this user {', '.join(topics)};"
            f" grant it {rights} on these topics"
        )

    async def _repeated(self, doing: str, request: Callable[[], Awaitable[T]]) -> T:
        # Not a `RetryingCaller`: a command of a few seconds, within the connection's deadline, that
        # has no check, and asks brokers that choose a controller or come to know a topic.
        async with self._connection.requesting(doing):
            while True:
                try:
                    return await request()
                except KafkaError as error:
                    # One broker of several may be away, or not yet know who leads.
                    if not error.retriable:
                        raise
                await asyncio.sleep(PAUSE_SECONDS)


@asynccontextmanager
async def open_admin(connection: KafkaConnection) -> AsyncIterator[KafkaAdmin]:
    """Open an administration client; `BusUnavailableError` where no broker answers."""
    arguments: dict[str, Any] = connection.arguments
    client = AIOKafkaAdminClient(**arguments)
    try:
        async with connection.requesting("connecting"):
            await client.start()
        yield KafkaAdmin(connection=connection, client=client)
    finally:
        await client.close()


MAX_REPLICAS: Final = 3

Status = Literal["ok", "created", "missing", "partitions differ", "config differs"]


@dataclass(frozen=True, kw_only=True)
class TopicLine:
    """What was found of one topic."""

    topic: str
    """The topic's name."""
    status: Status
    """`ok`, `created`, or what is wrong."""
    wanted: str = ""
    """What the topic table wants, where the broker has something else."""
    found: str = ""
    """What the broker has instead."""


async def create_topics(
    settings: KafkaSettings,
    topics: Iterable[Topic] | None = None,
    *,
    partitions: int | None = None,
    replication_factor: int | None = None,
) -> list[TopicLine]:
    """Make the topics that are missing, with as many replicas as there are brokers, at most 3.

    Of the topic table those that are placed by node get `partitions`, or where absent as many as
    the ticks' topic has. Raises `TopicsError`, and makes nothing, where a topic has
    another number of partitions.
    """
    async with open_admin(KafkaConnection(settings)) as admin:
        try:
            table = await _table(admin, settings, topics, partitions=partitions)
            before = await _check(admin, table)
        except RefusedError as error:
            # Whether it has that right only making a topic would tell.
            raise RefusedError(
                f"{error}, and Create, by which those are made that are missing"
            ) from error
        # Before anything is made: half a table would be harder to take back.
        refuse_other_partitions(before)
        missing = {line.topic for line in before if line.status == "missing"}
        if not missing:
            return before
        replicas = replication_factor or min(MAX_REPLICAS, await admin.count_brokers())
        await admin.create(
            [
                WantedTopic(
                    name=topic.name,
                    partitions=topic.partitions,
                    replication_factor=replicas,
                    config=topic.config(replication_factor=replicas),
                )
                for topic in table
                if topic.name in missing
            ]
        )
        after = await _check(admin, table)
        refuse_other_partitions(after)
        return [
            TopicLine(topic=line.topic, status="created")
            if line.topic in missing and line.status == "ok"
            else line
            for line in after
        ]


async def check_topics(
    settings: KafkaSettings,
    topics: Iterable[Topic] | None = None,
    *,
    partitions: int | None = None,
) -> list[TopicLine]:
    """Compare each topic with the topic table, and change nothing.

    Those that are placed by node must have `partitions`, or where absent as many as the ticks' has.
    """
    async with open_admin(KafkaConnection(settings)) as admin:
        table = await _table(admin, settings, topics, partitions=partitions)
        return await _check(admin, table)


async def delete_topics(settings: KafkaSettings) -> None:
    """Delete the topics of an installation, with all that they hold."""
    async with open_admin(KafkaConnection(settings)) as admin:
        await admin.delete([topic.name for topic in Topics(settings.topic_prefix)])


def refuse_other_partitions(lines: Iterable[TopicLine]) -> None:
    """Raise `TopicsError` where a topic has another number of partitions than it must have."""
    other = [line for line in lines if line.status == "partitions differ"]
    if other:
        found = "; ".join(f"{line.topic} has {line.found}, wanted {line.wanted}" for line in other)
        raise TopicsError(
            f"{found}. The number of partitions is never changed in place, because a node's records"
            f" must stay where its readers look for them. Stop all producers and consumers, delete "
            f"the topic with Kafka's own tools (its records are lost), and create it again"
        )


def compare(topic: Topic, found: FoundTopic | None) -> TopicLine:
    """Compare a topic with what the brokers have, on as many replicas as it has there."""
    if found is None:
        return TopicLine(
            topic=topic.name, status="missing", wanted=f"partitions={topic.partitions}"
        )
    if found.partitions != topic.partitions:
        return TopicLine(
            topic=topic.name,
            status="partitions differ",
            wanted=f"partitions={topic.partitions}",
            found=f"partitions={found.partitions}",
        )
    # With as many replicas as it has, not as it would get: brokers may have come since.
    wanted = topic.config(replication_factor=found.replication_factor)
    other = [key for key, value in wanted.items() if found.config.get(key) != value]
    if not other:
        return TopicLine(topic=topic.name, status="ok")
    return TopicLine(
        topic=topic.name,
        status="config differs",
        wanted=", ".join(f"{key}={wanted[key]}" for key in other),
        found=", ".join(f"{key}={found.config.get(key, '(unset)')}" for key in other),
    )


async def _table(
    admin: KafkaAdmin,
    settings: KafkaSettings,
    topics: Iterable[Topic] | None,
    *,
    partitions: int | None,
) -> list[Topic]:
    """Return the topics that are wanted: these, or the table with a number of partitions."""
    if topics is not None:
        return list(topics)
    table = Topics(settings.topic_prefix)
    if partitions is None:
        # What somebody chose: the ticks' topic is the one that is made first.
        found = await admin.describe([table.samples.name])
        partitions = next((topic.partitions for topic in found.values()), None)
    return with_partitions(table, partitions)


def with_partitions(table: Iterable[Topic], partitions: int | None) -> list[Topic]:
    """Return the topics, those placed by node with so many partitions; `None` changes nothing."""
    return [
        replace(topic, partitions=partitions) if partitions and topic.is_placed_by_node else topic
        for topic in table
    ]


async def _check(admin: KafkaAdmin, topics: Sequence[Topic]) -> list[TopicLine]:
    found = await admin.describe([topic.name for topic in topics])
    return [compare(topic, found.get(topic.name)) for topic in topics]
