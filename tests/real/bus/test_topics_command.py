"""`gpuledger topics` on a real broker creates missing topics and reports differences."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from gpuledger.bus.administration import TopicLine, check_topics, create_topics
from gpuledger.errors import TopicsError
from gpuledger.settings import KafkaSettings
from gpuledger_cli.__main__ import main
from tests.default_topics import EVENTS, PODS, SAMPLES, TOPICS
from tests.real.changed_topics import DEADLINE_SECONDS, delete

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.real.services.kafka import Kafka
    from tests.real.services.kcat import Kcat


@pytest.fixture
def broker(start_kafka: Callable[[], Kafka]) -> Kafka:
    # The topics have fixed names, so no other test uses this broker.
    return start_kafka()


def statuses(lines: list[TopicLine]) -> dict[str, str]:
    return {line.topic: line.status for line in lines}


def test_create_creates_all_topics_and_check_finds_them_correct(
    broker: Kafka, kcat: Kcat, capsys: pytest.CaptureFixture[str]
) -> None:
    at = ["--bootstrap-servers", broker.bootstrap_servers]
    assert main(["topics", "check", *at]) == 1
    assert capsys.readouterr().out.count("missing") == len(TOPICS)

    assert main(["topics", "create", *at]) == 0
    assert capsys.readouterr().out.count("created") == len(TOPICS)

    assert main(["topics", "check", *at]) == 0
    assert main(["topics", "create", *at]) == 0
    assert capsys.readouterr().out.count(" ok ") == 2 * len(TOPICS)
    listed: Any = json.loads(json.dumps(kcat.metadata(broker.bootstrap_servers)))
    found = {topic["topic"]: len(topic["partitions"]) for topic in listed["topics"]}
    ours = {name: count for name, count in found.items() if not name.startswith("__")}
    assert ours == {topic.name: topic.partitions for topic in TOPICS}


async def test_a_different_number_of_partitions_is_rejected_and_nothing_is_created(
    broker: Kafka,
) -> None:
    settings = KafkaSettings(bootstrap_servers=broker.bootstrap_servers)
    await create_topics(settings, [replace(SAMPLES, partitions=3)])

    with pytest.raises(TopicsError, match=f"{SAMPLES.name} has partitions=3, wanted partitions=12"):
        await create_topics(settings, [SAMPLES, PODS])
    found = statuses(await check_topics(settings, [SAMPLES, PODS]))
    assert found == {SAMPLES.name: "partitions differ", PODS.name: "missing"}


def test_the_rejection_is_one_line_and_exit_code_2(
    broker: Kafka, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = KafkaSettings(bootstrap_servers=broker.bootstrap_servers)
    asyncio.run(create_topics(settings, [SAMPLES, replace(EVENTS, partitions=1)]))

    assert main(["topics", "create", "--bootstrap-servers", broker.bootstrap_servers]) == 2

    reported = capsys.readouterr().err
    assert reported.count("\n") == 1
    assert "never changed in place" in reported


async def test_a_missing_samples_topic_gets_the_partitions_of_the_other_topics(
    broker: Kafka,
) -> None:
    settings = KafkaSettings(bootstrap_servers=broker.bootstrap_servers)
    await create_topics(settings, partitions=3)
    await delete(settings, SAMPLES)
    async with asyncio.timeout(DEADLINE_SECONDS):
        # Kafka deletes asynchronously.
        while (await check_topics(settings, [SAMPLES]))[0].status != "missing":  # noqa: ASYNC110  # no event
            await asyncio.sleep(0.1)

    created = statuses(await create_topics(settings))

    assert {name for name, status in created.items() if status == "created"} == {SAMPLES.name}
    assert set(statuses(await check_topics(settings, partitions=3)).values()) == {"ok"}


async def test_a_different_configuration_is_reported_and_left_unchanged(broker: Kafka) -> None:
    settings = KafkaSettings(bootstrap_servers=broker.bootstrap_servers)
    await create_topics(settings, [replace(SAMPLES, retention_ms=60_000), PODS])

    for lines in (
        await create_topics(settings, [SAMPLES, PODS]),
        await check_topics(settings, [SAMPLES, PODS]),
    ):
        assert statuses(lines) == {SAMPLES.name: "config differs", PODS.name: "ok"}
        assert lines[0].found == "retention.ms=60000"
        assert lines[0].wanted == f"retention.ms={SAMPLES.retention_ms}"


async def test_more_replicas_than_brokers_are_rejected_with_the_brokers_error(
    broker: Kafka,
) -> None:
    settings = KafkaSettings(bootstrap_servers=broker.bootstrap_servers)

    with pytest.raises(TopicsError, match=f"{SAMPLES.name} was not created: .*replica"):
        await create_topics(settings, [SAMPLES], replication_factor=3)
