"""Compares the brokers' topics with the topic table: creates missing ones, reports differences.

Existing topics are never changed. With another partition count, a node's new records would go to
another partition than its earlier ones, and a different configuration may be intended. `KafkaAdmin`
sends the requests and repeats them while a broker is unavailable.
"""

import asyncio
from collections import Counter
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
from gpuledger.bus.kafka_positions import CommitMetadata
from gpuledger.errors import RefusedError, TopicsError
from gpuledger.rights import KAFKA_USERS
from gpuledger.settings import KafkaSettings
from gpuledger.topics import Topic, Topics

T = TypeVar("T")

PAUSE_SECONDS: Final = 0.1
_HIDDEN_ANSWERS: Final = 50
"""A topic counts as hidden if it has a configuration but is missing from this many consecutive
listings. A single listing may lack a topic that was just created."""
_JOIN_GROUP: Final = next(each.group for each in KAFKA_USERS if each.name == "join")
"""The default consumer group of the join; its commits show the number of partitions in use."""
_GROUP_SECONDS: Final = 5.0
"""Timeout of the request for a group's offsets. A new Kafka cluster has no coordinator yet."""
_NO_RIGHT: Final = frozenset(
    {TopicAuthorizationFailedError.errno, ClusterAuthorizationFailedError.errno}
)


@dataclass(frozen=True, kw_only=True)
class FoundTopic:
    """A topic as it exists on the brokers."""

    partitions: int
    """Number of partitions."""
    replication_factor: int
    """Number of replicas of the first partition."""
    config: Mapping[str, str]
    """The topic's configuration, including defaults."""


@dataclass(frozen=True, kw_only=True)
class WantedTopic:
    """A topic to create."""

    name: str
    """The topic's name."""
    partitions: int
    """Number of partitions."""
    replication_factor: int
    """Number of replicas of each partition."""
    config: Mapping[str, str]
    """Configuration that differs from the brokers' defaults."""


class KafkaAdmin:
    """Describes, creates and deletes topics; repeats requests while a broker is unavailable."""

    def __init__(self, *, connection: KafkaConnection, client: AIOKafkaAdminClient) -> None:
        self._connection = connection
        self.client = client
        """aiokafka's client, for requests that only `inspection` makes."""

    async def count_brokers(self) -> int:
        """Return the number of available brokers."""
        cluster = await self.repeated("counting the brokers", self.client.describe_cluster)
        return len(cluster["brokers"])

    async def describe(self, topics: Sequence[str]) -> dict[str, FoundTopic]:
        """Return the existing topics by name; raise `RefusedError` if the user may not see one.

        If the user lacks `Describe`, the brokers hide a topic as if it were absent. If the user has
        `DescribeConfigs`, they still return the topic's configuration. Comparing both answers shows
        the missing permission.
        """
        partitions = await self._partitions()
        # Configurations are read after the partitions. A topic that is created in between has a
        # configuration but no partitions, and is looked up again.
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
        """Create topics and wait until they are visible.

        Raises `TopicsError` if the brokers reject a topic, and `RefusedError` if the user lacks
        `Create`.
        """
        made = [
            NewTopic(
                topic.name, topic.partitions, topic.replication_factor, None, dict(topic.config)
            )
            for topic in topics
        ]
        answer = await self.repeated("creating topics", lambda: self.client.create_topics(made))
        for name, code, *message in answer.topic_errors:
            # Kafka reports a cluster authorization error if the user may not create topics at all.
            if code in _NO_RIGHT:
                raise self._refused("creating topics", [name], rights="Create")
            # Another client may have created the topic in the meantime; `create_topics` then
            # compares that topic with the topic table.
            if code not in (0, TopicAlreadyExistsError.errno):
                raise TopicsError(f"{name} was not created: {message[0]}")
        names = [topic.name for topic in topics]
        # At first only the controller knows new topics; until the other brokers learn of them,
        # these brokers report that the topics do not exist.
        async with self._connection.requesting("waiting for the topics that were created"):
            while len(await self.describe(names)) < len(names):  # noqa: ASYNC110  # brokers send no event
                await asyncio.sleep(PAUSE_SECONDS)

    async def delete(self, names: Sequence[str]) -> None:
        """Delete the topics that exist.

        Raises `TopicsError` if the brokers reject a deletion, and `RefusedError` if the user lacks
        `Delete`.
        """
        answer = await self.repeated(
            "deleting topics", lambda: self.client.delete_topics(list(names))
        )
        for name, code in answer.topic_error_codes:
            if code in _NO_RIGHT:
                raise self._refused("deleting topics", [name], rights="Delete")
            if code not in (0, UnknownTopicOrPartitionError.errno):
                raise TopicsError(f"{name} was not deleted: {for_code(code).description}")

    async def partitions_read(self, topic: str, *, group: str) -> int | None:
        """Return the number of partitions that a topic had when a consumer group committed offsets.

        If the commits have different numbers, the smallest counts. Returns `None` if the group has
        not read the topic, or if its commits cannot be requested, for example because the user may
        not describe the group.
        """
        topic_id = (await self._connection.describe(topic)).topic_id
        try:
            async with asyncio.timeout(_GROUP_SECONDS):
                commits = await self.client.list_consumer_group_offsets(group)
        except (KafkaError, OSError, TimeoutError):
            return None
        found = (
            CommitMetadata.parse(commit.metadata or "")
            for at, commit in commits.items()
            if at.topic == topic
        )
        counts = (each.partitions for each in found if topic_id and each.topic_id == topic_id)
        return min((count for count in counts if count is not None), default=None)

    async def _partitions(self) -> dict[str, Any]:
        described = await self.repeated("looking up topics", self.client.describe_topics)
        return {topic["topic"]: topic["partitions"] for topic in described if topic["partitions"]}

    async def _configs(
        self, topics: Sequence[str], *, listed: Container[str]
    ) -> dict[str, dict[str, str]]:
        """Return the configuration of each existing topic.

        `listed` are the topics that the user may describe. Raises `RefusedError` if the user may
        not read a configuration.
        """
        resources = [ConfigResource(ConfigResourceType.TOPIC, topic) for topic in topics]
        found = await self.repeated(
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
        """Return each topic's configuration, `None` for an absent topic.

        Topics that the user may not read are left out. aiokafka returns each topic's error as a
        number; raises `KafkaError` for all other errors.
        """
        found: dict[str, dict[str, str] | None] = {}
        answers = await self.client.describe_configs(list(resources)) if resources else ()
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
            f"{doing}: {self._connection.servers} denies this user access to {', '.join(topics)};"
            f" grant it {rights} on these topics"
        )

    async def repeated(self, doing: str, request: Callable[[], Awaitable[T]]) -> T:
        """Return the result of a request, which is repeated while a broker is unavailable."""
        # Without a `RetryingCaller`, because a command has no readiness check: it runs for seconds
        # under the connection's deadline, while brokers elect a controller or learn of a topic.
        async with self._connection.requesting(doing):
            while True:
                try:
                    return await request()
                except KafkaError as error:
                    # One of several brokers may be unavailable or not know the leader yet.
                    if not error.retriable:
                        raise
                await asyncio.sleep(PAUSE_SECONDS)


@asynccontextmanager
async def open_admin(connection: KafkaConnection) -> AsyncIterator[KafkaAdmin]:
    """Open an administration client; raise `BusUnavailableError` if no broker answers."""
    arguments: dict[str, Any] = connection.arguments
    client = AIOKafkaAdminClient(**arguments)
    try:
        async with connection.requesting("connecting"):
            await client.start()
        yield KafkaAdmin(connection=connection, client=client)
    finally:
        await client.close()


MAX_REPLICAS: Final = 3

_MAX_SHOWN: Final = 3  # topics in an error message
Status = Literal["ok", "created", "missing", "partitions differ", "config differs"]


@dataclass(frozen=True, kw_only=True)
class TopicLine:
    """The result of comparing one topic with the topic table."""

    topic: str
    """The topic's name."""
    status: Status
    """`ok`, `created`, or the difference."""
    wanted: str = ""
    """The values in the topic table that differ from the topic's own; empty if none differ."""
    found: str = ""
    """The topic's own values that differ; empty if none differ or the topic is missing."""


async def create_topics(
    settings: KafkaSettings,
    topics: Iterable[Topic] | None = None,
    *,
    partitions: int | None = None,
    replication_factor: int | None = None,
) -> list[TopicLine]:
    """Create the missing topics; return one line for each topic.

    `topics` defaults to the topic table. In the table, topics that are placed by node get
    `partitions`, with the same default as in `check_topics`. `replication_factor` defaults to the
    number of brokers, at most 3. Raises `TopicsError` without creating anything if an existing
    topic has a different number of partitions, and `RefusedError` if the user lacks a permission.
    """
    async with open_admin(KafkaConnection(settings)) as admin:
        try:
            table = await _table(admin, settings, topics, partitions=partitions)
            before = await _check(admin, table)
        except RefusedError as error:
            # The message always names Create, because only an attempt to create a topic would show
            # whether the user has this permission.
            raise RefusedError(
                f"{error}, and Create if gpuledger has to create missing topics"
            ) from error
        # Checked before any topic is created, because a partial creation is harder to undo.
        refuse_other_partitions(before, is_given=partitions is not None)
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
        refuse_other_partitions(after, is_given=partitions is not None)
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
    """Compare each topic with the topic table without changes; return one line for each topic.

    Topics that are placed by node must have `partitions`. The default is the number that the
    samples topic had when the join read it. If the join has not read it, the default is its present
    number; if it is missing, the number that most existing topics have.
    """
    async with open_admin(KafkaConnection(settings)) as admin:
        return await compare_topics(admin, settings, topics, partitions=partitions)


async def compare_topics(
    admin: KafkaAdmin,
    settings: KafkaSettings,
    topics: Iterable[Topic] | None = None,
    *,
    partitions: int | None = None,
) -> list[TopicLine]:
    """Compare each topic with the topic table, like `check_topics`, over an open connection."""
    table = await _table(admin, settings, topics, partitions=partitions)
    return await _check(admin, table)


async def delete_topics(settings: KafkaSettings) -> None:
    """Delete an installation's topics with all their records."""
    async with open_admin(KafkaConnection(settings)) as admin:
        await admin.delete([topic.name for topic in Topics(settings.topic_prefix)])


def partitions_remedy(*, is_given: bool) -> str:
    """Return the remedy for a topic that has the wrong number of partitions.

    `is_given` means that the user has chosen the number.
    """
    stop = "Leave out --partitions, or stop" if is_given else "Stop"
    return (
        f"The number of partitions is never changed in place. {stop} all components, delete these"
        " topics with Kafka's own tools (their records are lost), and create them again"
    )


def refuse_other_partitions(lines: Iterable[TopicLine], *, is_given: bool) -> None:
    """Raise `TopicsError` if a topic has the wrong number of partitions.

    `is_given` means that the user has chosen the number.
    """
    different = [line for line in lines if line.status == "partitions differ"]
    if not different:
        return
    shown = [f"{each.topic} has {each.found}, wanted {each.wanted}" for each in different]
    if len(shown) > _MAX_SHOWN:
        shown[_MAX_SHOWN:] = [f"and {len(shown) - _MAX_SHOWN} more, see `gpuledger topics check`"]
    raise TopicsError(f"{'; '.join(shown)}. {partitions_remedy(is_given=is_given)}")


def compare(topic: Topic, found: FoundTopic | None) -> TopicLine:
    """Compare the topic on the brokers with the wanted one; `None` means that it is missing."""
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
    # Compared with its actual number of replicas, because brokers may have been added since.
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
    """Return `topics` if they are given, otherwise the topic table with `partitions`."""
    if topics is not None:
        return list(topics)
    table = Topics(settings.topic_prefix)
    if partitions is None:
        # The samples topic is created first, so its partition count is the one that the operator
        # chose, unless partitions were added since the join read it.
        samples = table.samples.name
        found = await admin.describe([topic.name for topic in table])
        partitions = found_partitions(table, found)
        if samples in found:
            group = table.group(_JOIN_GROUP)
            partitions = await admin.partitions_read(samples, group=group) or partitions
    return with_partitions(table, partitions)


def found_partitions(table: Topics, found: Mapping[str, FoundTopic]) -> int | None:
    """Return the partition count of the samples topic, or of most topics if it is missing.

    Only topics that are placed by node count. Returns `None` if none of them exists.
    """
    if samples := found.get(table.samples.name):
        return samples.partitions
    placed = (topic.name for topic in table if topic.is_placed_by_node)
    counts = Counter(found[name].partitions for name in placed if name in found)
    return max(counts, key=lambda count: counts[count], default=None)


def with_partitions(table: Iterable[Topic], partitions: int | None) -> list[Topic]:
    """Return the topics; if `partitions` is given, topics placed by node get this number."""
    return [
        replace(topic, partitions=partitions) if partitions and topic.is_placed_by_node else topic
        for topic in table
    ]


async def _check(admin: KafkaAdmin, topics: Sequence[Topic]) -> list[TopicLine]:
    found = await admin.describe([topic.name for topic in topics])
    return [compare(topic, found.get(topic.name)) for topic in topics]
