"""Permissions of each component on Kafka: the only source for documentation, manifests and ACLs.

Each topic has a row in `USES`, each component and command a row in `KAFKA_USERS`. `grants` derives
each user's permissions from both, with the names of one installation. Nothing here contacts a
broker.
"""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from gpuledger.topics import Topics, replay_group

Resource = Literal["topic", "group", "transactionalId"]


@dataclass(frozen=True, kw_only=True)
class TopicUse:
    """The writers and readers of a topic, by their names in `KAFKA_USERS`."""

    topic: str
    """Name of the topic's attribute in `Topics`."""
    writers: tuple[str, ...]
    readers: tuple[str, ...] = ()
    describers: tuple[str, ...] = ()
    """Users that only look up the topic's partitions and offsets."""


_LIST: Final = "dead letters list"
_REPLAY: Final = "dead letters replay"
_WATERMARKS: Final = "watermarks"
_INSPECT: Final = "inspect"
_RETIRE: Final = "cluster retire"
_DOCTOR: Final = "doctor"
_SINKS: Final = ("sink remote_write", "sink alerts", "sink store", "sink rows")
_REPLAYABLE_SINKS: Final = ("sink remote_write", "sink store", "sink rows")

USES: Final = (
    TopicUse(
        topic="samples", writers=("agent", _REPLAY), readers=("join", "replay", _RETIRE, _DOCTOR)
    ),
    TopicUse(topic="readings", writers=("agent",), readers=("sink remote_write",)),
    TopicUse(topic="processes", writers=("agent", _REPLAY), readers=("join",)),
    TopicUse(topic="incidents", writers=("agent", _REPLAY), readers=("join",)),
    TopicUse(
        topic="inventory", writers=("agent", _RETIRE), readers=("sink store", _RETIRE, _DOCTOR)
    ),
    TopicUse(
        topic="pods",
        writers=("podwatch",),
        readers=("podwatch", "join", "sink store", "replay"),
        describers=(_WATERMARKS, _RETIRE),
    ),
    TopicUse(
        topic="pending_pods",
        writers=("podwatch", _RETIRE),
        readers=("podwatch", "sink store", _RETIRE),
    ),
    TopicUse(
        topic="nodes",
        writers=("podwatch",),
        readers=("podwatch", "join", "sink store", "replay"),
    ),
    TopicUse(
        topic="namespaces",
        writers=("podwatch",),
        readers=("podwatch", "join", "sink store", "replay"),
    ),
    TopicUse(
        topic="events",
        writers=("join",),
        readers=(*_SINKS, "sink scaler", "replay", _INSPECT, _DOCTOR),
        describers=(_WATERMARKS,),
    ),
    TopicUse(topic="progress", writers=("join",), readers=("join",)),
    TopicUse(
        topic="watermarks",
        writers=("podwatch", "join", "sink store", "sink rows", _RETIRE),
        readers=("join", "sink store", "sink rows", _WATERMARKS, _RETIRE, _DOCTOR),
    ),
    TopicUse(
        topic="attributed_incidents",
        writers=("join",),
        readers=("sink remote_write", "sink alerts", "sink store"),
    ),
    TopicUse(topic="rows", writers=("sink rows",), describers=(_WATERMARKS,)),
    TopicUse(topic="counters", writers=("sink remote_write",), readers=("sink remote_write",)),
    TopicUse(topic="dead_letters", writers=("join", *_SINKS), readers=(_LIST, _REPLAY)),
    TopicUse(topic="replay", writers=(_REPLAY,), readers=_REPLAYABLE_SINKS),
)
"""One row per topic, in the order of the topic table. Readers that are not listed here, such as
other programs, need their own permissions."""


@dataclass(frozen=True, kw_only=True)
class KafkaUser:
    """A user of Kafka: a component, or a command for people."""

    name: str
    """The user's name in `USES`."""
    user: str
    """The user's name on Kafka, with the default prefix `gpuledger`."""
    shown: str = ""
    """The name in the table for people, if it differs from `name`."""
    group: str = ""
    """The user's consumer group, with the default prefix. The user's transactional ids begin with
    the group's name."""
    is_transactional: bool = False
    """Whether the user writes in transactions."""
    on_all_topics: tuple[str, ...] = ()
    """Operations on all topics that begin with the prefix."""
    describes_groups: bool = False
    """Whether the user looks up all groups that begin with the prefix."""


_CHECKS: Final = ("Describe", "DescribeConfigs")

KAFKA_USERS: Final = (
    KafkaUser(name="agent", user="gpuledger-agent"),
    KafkaUser(name="podwatch", user="gpuledger-podwatch"),
    KafkaUser(name="join", user="gpuledger-join", group="gpuledger-join", is_transactional=True),
    KafkaUser(
        name="sink remote_write",
        user="gpuledger-sink-remote-write",
        group="gpuledger-remote-write",
        is_transactional=True,
    ),
    KafkaUser(name="sink alerts", user="gpuledger-sink-alerts", group="gpuledger-alerts"),
    KafkaUser(name="sink store", user="gpuledger-sink-store", group="gpuledger-store"),
    KafkaUser(
        name="sink rows",
        user="gpuledger-sink-rows",
        group="gpuledger-rows",
        is_transactional=True,
    ),
    KafkaUser(name="sink scaler", user="gpuledger-sink-scaler"),
    KafkaUser(
        name="topics create",
        user="gpuledger-topics",
        shown="topics Job, `gpuledger topics create`",
        on_all_topics=("Create", *_CHECKS),
    ),
    KafkaUser(
        name="topics check",
        user="gpuledger-topics-check",
        shown="`gpuledger topics check`",
        on_all_topics=_CHECKS,
    ),
    KafkaUser(name=_WATERMARKS, user="gpuledger-watermarks", shown="`gpuledger watermarks`"),
    KafkaUser(name=_INSPECT, user="gpuledger-inspect", shown="`gpuledger inspect`"),
    KafkaUser(name=_RETIRE, user="gpuledger-cluster-retire", shown="`gpuledger cluster retire`"),
    KafkaUser(
        name=_DOCTOR,
        user="gpuledger-doctor",
        shown="`gpuledger doctor`",
        on_all_topics=_CHECKS,
        describes_groups=True,
    ),
    KafkaUser(name="replay", user="gpuledger-replay", shown="`gpuledger replay`"),
    KafkaUser(
        name=_LIST,
        user="gpuledger-dead-letters",
        shown="`gpuledger dead-letters list`, `gpuledger dead-letters show`",
    ),
    KafkaUser(
        name=_REPLAY,
        user="gpuledger-dead-letters-replay",
        shown="`gpuledger dead-letters replay`",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Grant:
    """Permission for operations on one resource, or on all resources that begin with its name."""

    resource: Resource
    """Type of the resource, by the name in Kafka and Strimzi."""
    name: str
    operations: tuple[str, ...]
    """Operations, by their names in Kafka."""
    is_prefix: bool = False


def grants(who: KafkaUser, topics: Topics) -> Iterator[Grant]:
    """Yield exactly the permissions that one user needs in an installation.

    `Read` and `Write` imply `Describe`.
    """
    for use in USES:
        users = {"Read": use.readers, "Write": use.writers, "Describe": use.describers}
        operations = tuple(operation for operation in users if who.name in users[operation])
        if operations:
            name = getattr(topics, use.topic).name
            yield Grant(resource="topic", name=name, operations=operations)
    if who.group:
        group = topics.group(who.group)
        yield Grant(resource="group", name=group, operations=("Read",))
        if who.name in _REPLAYABLE_SINKS:
            yield Grant(resource="group", name=replay_group(group), operations=("Read",))
        if who.is_transactional:
            # A transactional id is the group's name, a hyphen and a partition number.
            yield Grant(
                resource="transactionalId", name=f"{group}-", operations=("Write",), is_prefix=True
            )
    if who.on_all_topics:
        yield Grant(
            resource="topic",
            name=f"{topics.prefix}.",
            operations=who.on_all_topics,
            is_prefix=True,
        )
    if who.describes_groups:
        name = f"{topics.prefix}-"
        yield Grant(resource="group", name=name, operations=("Describe",), is_prefix=True)


COLUMNS: Final = ("who", "reads", "writes", "group", "transactional ids", "other operations")


def table_rows(topics: Topics) -> Iterator[tuple[str, ...]]:
    """Yield a Markdown row for each user, with the columns in `COLUMNS`."""
    for who in KAFKA_USERS:
        found = list(grants(who, topics))

        def named(resource: Resource, operation: str, found: list[Grant] = found) -> str:
            return ", ".join(
                f"`{right.name}{'…' if right.is_prefix else ''}`"
                for right in found
                if right.resource == resource and operation in right.operations
            )

        yield (
            who.shown or who.name,
            named("topic", "Read"),
            named("topic", "Write"),
            named("group", "Read"),
            named("transactionalId", "Write"),
            _other_operations(who, topics, described=named("topic", "Describe")),
        )


def _other_operations(who: KafkaUser, topics: Topics, *, described: str) -> str:
    found = []
    if who.on_all_topics:
        operations = ", ".join(f"`{operation}`" for operation in who.on_all_topics)
        found.append(f"{operations} on all topics that begin with `{topics.prefix}.`")
    elif described:
        found.append(f"`Describe` on {described}")
    if who.describes_groups:
        found.append(f"`Describe` on all groups that begin with `{topics.prefix}-`")
    return "; ".join(found)


# Manifests for Strimzi, whose operators create topics and users from them.

ApiVersion = Literal["v1", "v1beta2"]


def strimzi_manifests(
    topics: Topics,
    *,
    cluster: str,
    partitions: int | None = None,
    replicas: int = 3,
    api_version: ApiVersion = "v1",
) -> Iterator[dict[str, object]]:
    """Yield a KafkaTopic for each topic and a KafkaUser for each user, as Kubernetes objects.

    `partitions` is the number of partitions of topics that are placed by node; by default, each
    topic has the number in the topic table. `cluster` is the name of the Kafka object.
    """
    labels = {"strimzi.io/cluster": cluster, "app.kubernetes.io/part-of": "gpuledger"}

    def made(kind: str, name: str, spec: dict[str, object]) -> dict[str, object]:
        return {
            "apiVersion": f"kafka.strimzi.io/{api_version}",
            "kind": kind,
            "metadata": {"name": name, "labels": labels},
            "spec": spec,
        }

    for topic in topics:
        name = _name_of_object(topic.name)
        spec: dict[str, object] = {} if name == topic.name else {"topicName": topic.name}
        spec["partitions"] = (
            partitions if partitions and topic.is_placed_by_node else topic.partitions
        )
        spec["replicas"] = replicas
        spec["config"] = topic.config(replication_factor=replicas)
        yield made("KafkaTopic", name, spec)
    for who in KAFKA_USERS:
        acls = [_acl_of(grant) for grant in grants(who, topics)]
        spec = {
            "authentication": {"type": "scram-sha-512"},
            "authorization": {"type": "simple", "acls": acls},
        }
        yield made("KafkaUser", _name_of_object(topics.group(who.user)), spec)


def _acl_of(grant: Grant) -> dict[str, object]:
    return {
        "resource": {
            "type": grant.resource,
            "name": grant.name,
            "patternType": "prefix" if grant.is_prefix else "literal",
        },
        "operations": list(grant.operations),
    }


def acl_commands(topics: Topics, *, bootstrap_servers: str) -> Iterator[str]:
    """Yield a command of Kafka's own tool for each grant, after a comment that names the user."""
    for who in KAFKA_USERS:
        user = _name_of_object(topics.group(who.user))
        yield f"# {who.shown or who.name}"
        for grant in grants(who, topics):
            words = [
                *("kafka-acls.sh", "--bootstrap-server", bootstrap_servers, "--add"),
                *("--allow-principal", f"User:{user}"),
                *(word for each in grant.operations for word in ("--operation", each)),
                *(_ACL_OPTIONS[grant.resource], grant.name),
                *("--resource-pattern-type", "prefixed" if grant.is_prefix else "literal"),
            ]
            yield shlex.join(words)


_ACL_OPTIONS: Final[dict[Resource, str]] = {
    "topic": "--topic",
    "group": "--group",
    "transactionalId": "--transactional-id",
}


def _name_of_object(name: str) -> str:
    """Return a valid Kubernetes name, without capitals and underscores."""
    return name.lower().replace("_", "-")
