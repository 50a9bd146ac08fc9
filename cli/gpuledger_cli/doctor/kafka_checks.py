"""The doctor's checks of the brokers: topics, permissions and consumer groups.

`gpuledger.topics` and `gpuledger.rights` define what must exist.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from gpuledger.bus.administration import TopicLine, partitions_remedy
from gpuledger.bus.inspection import FoundGroup, Inspector
from gpuledger.bus.protocol import HistoryReader, TopicPartition
from gpuledger.rights import KAFKA_USERS, KafkaUser, grants
from gpuledger.texts import counted
from gpuledger.topics import Topics, replay_group
from gpuledger_cli.doctor.verdicts import Verdict, ok, problem, skipped, unknown

LAGGING_SECONDS: Final = 60
"""If a group has an older unread record, it lags, as in the alert `GpuledgerJoinLagging`."""
COMPONENTS: Final = {
    who.name.removeprefix("sink "): who
    for who in KAFKA_USERS
    if who.group or who.name in {"agent", "podwatch"}
}
"""The components that connect to Kafka, by their names for users."""
_JOIN: Final = "join"


async def check_brokers(brokers: Inspector) -> list[Verdict]:
    """Count the brokers."""
    count = await brokers.count_brokers()
    return [ok(f"{counted(count, 'broker')} answered")]


async def check_topics(brokers: Inspector) -> list[Verdict]:
    """Compare the topics with the topic table: existence, partitions, retention."""
    lines = await brokers.compare_topics()
    wrong = [line for line in lines if line.status != "ok"]
    return [_judge_topic(line) for line in wrong] or [ok(f"{len(lines)} topics are as required")]


def _judge_topic(line: TopicLine) -> Verdict:
    if line.status == "missing":
        return problem(f"{line.topic} is missing", "Run `gpuledger topics create`.")
    finding = f"{line.topic}: {line.status}: wanted {line.wanted}, found {line.found}"
    if line.status == "partitions differ":
        return problem(finding, f"{partitions_remedy(is_given=False)}.")
    return problem(
        finding,
        f"Run `kafka-configs.sh --alter --topic {line.topic} --add-config {line.wanted}`, unless"
        " you intend the difference.",
    )


async def check_permissions(
    brokers: Inspector, topics: Topics, components: Sequence[str]
) -> list[Verdict]:
    """Compare the connected user's permissions with those that the components need.

    Without `components`, missing permissions are not a problem, because the user may be a person.
    """
    operations = await brokers.list_operations([topic.name for topic in topics])
    if operations is None:
        return [unknown("the brokers do not report permissions; they are older than Kafka 2.8")]
    missing = {
        name: await _missing(brokers, COMPONENTS[name], topics, operations)
        for name in components or COMPONENTS
    }
    complete = [name for name, lacking in missing.items() if not lacking]
    if components:
        return [
            problem(
                f"as {name}, this user lacks {', '.join(lacking)}",
                "Grant it; `gpuledger topics export --format acls` prints the commands.",
            )
            for name, lacking in missing.items()
            if lacking
        ] or [ok(f"this user has the permissions of {', '.join(complete)}")]
    if len(complete) == len(COMPONENTS):
        return [ok("this user has the permissions of every component")]
    return [
        skipped(
            f"this user has the permissions of {', '.join(complete) or 'no component'}",
            "To check the user of a component, add --as COMPONENT and the component's --config.",
        )
    ]


async def _missing(
    brokers: Inspector, who: KafkaUser, topics: Topics, operations: Mapping[str, Collection[str]]
) -> list[str]:
    """Return the permissions that the connected user lacks for a component.

    Topics that do not exist are left out, because only the check `topics` reports them.
    """
    lacking = []
    for grant in grants(who, topics):
        if grant.resource == "topic":
            allowed = operations.get(grant.name, grant.operations)
            lacking += [
                f"{operation} on topic {grant.name}"
                for operation in grant.operations
                if operation not in allowed
            ]
        # If the permission is on a prefix, any id that begins with it will do.
        elif not await brokers.may_use(
            grant.resource, f"{grant.name}0" if grant.is_prefix else grant.name
        ):
            kind = "transactional ids" if grant.is_prefix else grant.resource
            lacking.append(f"{' and '.join(grant.operations)} on {kind} {grant.name}")
    return lacking


async def check_groups(
    brokers: Inspector, reader: HistoryReader, topics: Topics, *, now_ms: int
) -> list[Verdict]:
    """Check that each group with a committed offset has members and reads recent records."""
    verdicts: list[Verdict] = []
    unused: list[str] = []
    for name, who in COMPONENTS.items():
        if not who.group:
            continue
        group = topics.group(who.group)
        described = await brokers.describe_group(group)
        if described is not None:
            verdicts.append(await _judge_group(name, group, described, reader, now_ms=now_ms))
            # A running sink also reads replayed records, in a second group.
            for_replay = await brokers.describe_group(replay_group(group))
            if for_replay is not None and for_replay.members == 0 and described.members > 0:
                verdicts.append(
                    problem(
                        f"{name}: group {replay_group(group)} has no member",
                        f"Read the check `{name}.replay` in the component's /readyz.",
                    )
                )
        elif name == _JOIN:
            verdicts.append(
                problem(f"{name}: group {group} has never committed an offset", "Start the join.")
            )
        else:
            unused.append(name)
    if unused:
        verdicts.append(
            skipped(f"{', '.join(unused)}: no sink of this kind has committed an offset")
        )
    return verdicts


async def _judge_group(
    name: str, group: str, described: FoundGroup, reader: HistoryReader, *, now_ms: int
) -> Verdict:
    ends: dict[TopicPartition, int] = {}
    for topic in sorted({at.topic for at in described.committed}):
        ends |= {at: span.end for at, span in (await reader.spans(topic)).items()}
    behind = {
        at: ends[at] - offset
        for at, offset in described.committed.items()
        if 0 <= offset < ends.get(at, 0)
    }
    # Transaction markers have offsets too, so the number is an upper bound.
    members = counted(described.members, "member")
    text = f"{name}: {members}, at most {counted(sum(behind.values()), 'record')} behind"
    if described.members == 0:
        component = "join" if name == _JOIN else f"sink {name}"
        return problem(
            f"{text} in group {group}",
            f"Start the {component}. If you no longer run it, run"
            f" `kafka-consumer-groups.sh --delete --group {group}`.",
        )
    due = await reader.offsets_at(behind, now_ms - LAGGING_SECONDS * 1000) if behind else {}
    late = [at for at, offset in due.items() if described.committed[at] < offset]
    if late:
        return problem(
            f"{text}; {counted(len(late), 'partition')} with unread records older than"
            f" {LAGGING_SECONDS} s",
            "Read the failed checks in its /readyz, and its log. If there are none, add replicas.",
        )
    return ok(text)
