"""What the doctor concludes from the brokers' answers, with a fake of the brokers."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from typing_extensions import override

from gpuledger.bus.administration import TopicLine
from gpuledger.bus.inspection import FoundGroup, Inspector
from gpuledger.bus.protocol import TopicPartition
from gpuledger.rights import grants
from gpuledger_cli.doctor.kafka_checks import (
    COMPONENTS,
    LAGGING_SECONDS,
    check_brokers,
    check_groups,
    check_permissions,
    check_topics,
)
from gpuledger_cli.doctor.verdicts import Status, Verdict
from tests.default_topics import EVENTS, SAMPLES, TOPICS
from tests.unit.sinks.builders import NODE, START_NS, bus, event, place_of, publish

NOW_MS = START_NS // 10**6 + 600_000
PLACE = place_of(NODE)
EVERYTHING = {topic.name: frozenset({"Read", "Write", "Describe"}) for topic in TOPICS}


@dataclass
class FakeBrokers(Inspector):
    """Answers with the given values."""

    lines: list[TopicLine] = field(default_factory=list)
    allowed: Mapping[str, Collection[str]] | None = None
    refused: Collection[str] = ()
    groups: Mapping[str, FoundGroup] = field(default_factory=dict)

    @override
    async def count_brokers(self) -> int:
        return 3

    @override
    async def compare_topics(self) -> list[TopicLine]:
        return self.lines

    @override
    async def list_operations(self, topics: Sequence[str]) -> Mapping[str, Collection[str]] | None:
        return self.allowed

    @override
    async def may_use(self, resource: str, name: str) -> bool:
        return name not in self.refused

    @override
    async def describe_group(self, name: str) -> FoundGroup | None:
        return self.groups.get(name)

    @override
    async def read_marker_times_ms(self, topic: str, ends: Mapping[int, int]) -> list[int]:
        return []


async def test_the_brokers_are_counted() -> None:
    assert await check_brokers(FakeBrokers()) == [Verdict(Status.OK, "3 brokers answered")]


@pytest.mark.parametrize(
    ("line", "action"),
    [
        (TopicLine(topic="a", status="missing"), "`gpuledger topics create`"),
        (
            TopicLine(
                topic="a", status="config differs", wanted="retention.ms=1", found="retention.ms=2"
            ),
            "--topic a --add-config retention.ms=1",
        ),
        (
            TopicLine(
                topic="a", status="partitions differ", wanted="partitions=1", found="partitions=2"
            ),
            "Stop all components",
        ),
    ],
)
async def test_a_topic_that_differs_is_a_problem_with_its_remedy(
    line: TopicLine, action: str
) -> None:
    fine = TopicLine(topic="b", status="ok")
    (found,) = await check_topics(FakeBrokers(lines=[line, fine]))
    assert found.status is Status.PROBLEM
    assert found.finding.startswith("a")
    assert action in found.action
    (passed,) = await check_topics(FakeBrokers(lines=[fine]))
    assert passed.status is Status.OK


@pytest.mark.parametrize("name", COMPONENTS)
async def test_each_permission_of_a_component_is_missed_if_it_is_lacking(name: str) -> None:
    (complete,) = await check_permissions(FakeBrokers(allowed=EVERYTHING), TOPICS, [name])
    assert complete.status is Status.OK
    for grant in grants(COMPONENTS[name], TOPICS):
        brokers = FakeBrokers(allowed=EVERYTHING)
        if grant.resource == "topic":
            brokers.allowed = EVERYTHING | {grant.name: frozenset({"Describe"})}
        else:
            brokers.refused = {f"{grant.name}0" if grant.is_prefix else grant.name}
        (found,) = await check_permissions(brokers, TOPICS, [name])
        assert found.status is Status.PROBLEM
        assert all(f"{one} " in found.finding for one in grant.operations)
        assert grant.name in found.finding


async def test_without_a_named_component_missing_permissions_are_no_problem() -> None:
    (every,) = await check_permissions(FakeBrokers(allowed=EVERYTHING), TOPICS, [])
    assert every.status is Status.OK
    reading = {topic: frozenset({"Read", "Describe"}) for topic in EVERYTHING}
    (none,) = await check_permissions(FakeBrokers(allowed=reading), TOPICS, [])
    assert none.status is Status.SKIPPED
    assert "--as COMPONENT" in none.action


async def test_permissions_that_the_brokers_do_not_report_are_unknown() -> None:
    (found,) = await check_permissions(FakeBrokers(), TOPICS, ["join"])
    assert found.status is Status.UNKNOWN


async def test_a_missing_topic_is_not_a_missing_permission() -> None:
    without = {name: found for name, found in EVERYTHING.items() if name != SAMPLES.name}
    (found,) = await check_permissions(FakeBrokers(allowed=without), TOPICS, ["join"])
    assert found.status is Status.OK


@pytest.mark.parametrize(
    ("members", "committed", "age_seconds", "status"),
    [
        (2, 2, 600, Status.OK),
        (2, 1, LAGGING_SECONDS // 2, Status.OK),
        (2, 1, 2 * LAGGING_SECONDS, Status.PROBLEM),
        (0, 2, 600, Status.PROBLEM),
    ],
)
async def test_a_group_lags_if_it_has_no_member_or_an_unread_record_is_old(
    members: int, committed: int, age_seconds: int, status: Status
) -> None:
    on = bus()
    await publish(on, event(0), event(1))
    group = FoundGroup(members=members, committed={PLACE: committed})
    names = ("gpuledger-join", "gpuledger-rows")
    brokers = FakeBrokers(groups=dict.fromkeys(names, group))
    now_ms = START_NS // 10**6 + age_seconds * 1000
    async with on.reader() as reader:
        found = await check_groups(brokers, reader, TOPICS, now_ms=now_ms)
    assert [one.status for one in found] == [status, status, Status.SKIPPED]
    assert f"at most {2 - committed} record" in found[0].finding
    assert found[2].finding.startswith("remote_write, alerts, store:")


async def test_a_join_that_has_never_read_is_a_problem_and_a_sink_is_not() -> None:
    async with bus().reader() as reader:
        found = await check_groups(FakeBrokers(), reader, TOPICS, now_ms=NOW_MS)
    assert [one.status for one in found] == [Status.PROBLEM, Status.SKIPPED]


async def test_a_replay_group_without_a_member_is_a_problem_while_its_sink_runs() -> None:
    at = TopicPartition(EVENTS.name, 0)
    running, stopped = (FoundGroup(members=count, committed={at: 0}) for count in (1, 0))
    groups = {
        "gpuledger-join": running,
        "gpuledger-rows": running,
        "gpuledger-rows-replay": stopped,
    }
    async with bus().reader() as reader:
        found = await check_groups(FakeBrokers(groups=groups), reader, TOPICS, now_ms=NOW_MS)
    assert [one.finding for one in found if one.status is Status.PROBLEM] == [
        "rows: group gpuledger-rows-replay has no member"
    ]
