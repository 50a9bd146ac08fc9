"""Holds the topics on the brokers to the topic table: makes what is missing, says what differs.

Nothing that exists is changed: a partition count cannot be without moving records away from where
their readers look for them, and a configuration may differ on purpose.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from gpuledger.bus.kafka_admin import FoundTopic, KafkaAdmin, WantedTopic, open_admin
from gpuledger.bus.kafka_connection import KafkaConnection
from gpuledger.errors import RefusedError, TopicsError
from gpuledger.settings import KafkaSettings
from gpuledger.topics import TOPICS, Topic

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
    topics: Iterable[Topic] = TOPICS,
    *,
    replication_factor: int | None = None,
) -> list[TopicLine]:
    """Make the topics that are missing, with as many replicas as there are brokers, at most 3.

    Raises `TopicsError`, and makes nothing, where a topic has another number of partitions.
    """
    table = list(topics)
    async with open_admin(KafkaConnection(settings)) as admin:
        try:
            before = await _check(admin, table)
        except RefusedError as error:
            # Whether it has that right only making a topic would tell.
            raise RefusedError(
                f"{error}, and Create, by which those are made that are missing"
            ) from error
        refuse_other_partitions(before)
        missing = {line.topic for line in before if line.status == "missing"}
        if not missing:
            return before
        replicas = replication_factor or min(MAX_REPLICAS, await admin.count_brokers())
        wanted = [_wanted(topic, replicas) for topic in table if topic.name in missing]
        await admin.create(wanted)
        after = await _check(admin, table)
        refuse_other_partitions(after)
        return [
            TopicLine(topic=line.topic, status="created")
            if line.topic in missing and line.status == "ok"
            else line
            for line in after
        ]


async def check_topics(
    settings: KafkaSettings, topics: Iterable[Topic] = TOPICS
) -> list[TopicLine]:
    """Compare each topic with the topic table, and change nothing."""
    async with open_admin(KafkaConnection(settings)) as admin:
        return await _check(admin, list(topics))


async def find_groups(
    settings: KafkaSettings, topics: Iterable[Topic] = TOPICS
) -> dict[str, list[str]]:
    """Return the consumer groups that read these topics, each with those that it reads, sorted."""
    names = {topic.name for topic in topics}
    async with open_admin(KafkaConnection(settings)) as admin:
        found = await admin.groups()
    return {group: sorted(read & names) for group, read in sorted(found.items()) if read & names}


async def find_live_groups(settings: KafkaSettings, groups: Iterable[str]) -> list[str]:
    """Return those of the consumer groups that have members."""
    async with open_admin(KafkaConnection(settings)) as admin:
        return [group for group in groups if await admin.has_members(group)]


def refuse_other_partitions(lines: Iterable[TopicLine]) -> None:
    """Raise `TopicsError` where a topic has another number of partitions than it must have."""
    other = [line for line in lines if line.status == "partitions differ"]
    if other:
        said = "; ".join(f"{line.topic} has {line.found}, wanted {line.wanted}" for line in other)
        raise TopicsError(
            f"{said}. The number of partitions is never changed in place, because a node's records "
            f"must stay where its readers look for them. Stop all producers and consumers, delete "
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
    wanted = topic.config(replication_factor=found.replication_factor)
    other = [key for key, value in wanted.items() if found.config.get(key) != value]
    if not other:
        return TopicLine(topic=topic.name, status="ok")
    return TopicLine(
        topic=topic.name,
        status="config differs",
        wanted=_listed(other, wanted),
        found=_listed(other, found.config),
    )


async def _check(admin: KafkaAdmin, topics: Sequence[Topic]) -> list[TopicLine]:
    found = await admin.describe([topic.name for topic in topics])
    return [compare(topic, found.get(topic.name)) for topic in topics]


def _wanted(topic: Topic, replicas: int) -> WantedTopic:
    return WantedTopic(
        name=topic.name,
        partitions=topic.partitions,
        replication_factor=replicas,
        config=topic.config(replication_factor=replicas),
    )


def _listed(keys: Iterable[str], config: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={config.get(key, '(unset)')}" for key in keys)
