"""docs/guides/uninstall.md removes every group, topic, ACL and user from real brokers."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from typing import TYPE_CHECKING, Any, Final

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.client import AIOKafkaClient
from aiokafka.protocol.admin import DescribeAclsRequest

from gpuledger.bus.administration import create_topics
from gpuledger.rights import KAFKA_USERS, grants
from gpuledger.settings import KafkaSettings
from gpuledger.topics import Topics
from tests.real.deployment.test_kafka_rights import RESOURCES
from tests.real.end_to_end.components import BIN
from tests.real.services.authorizing_kafka import Operation, Right
from tests.unit.deployment.components import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.real.services.authorizing_kafka import AuthorizingKafka

PAGE: Final = (ROOT / "docs" / "guides" / "uninstall.md").read_text()
ANY: Final = 1
"""Kafka's filter that accepts every type, pattern, operation or permission."""
SERVERS: Final = "broker-1.example.com:9093"
TOOLS: Final = {
    "kafka-acls.sh": "org.apache.kafka.tools.AclCommand",
    "kafka-configs.sh": "kafka.admin.ConfigCommand",
    "kafka-consumer-groups.sh": "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand",
    "kafka-topics.sh": "org.apache.kafka.tools.TopicCommand",
}
ONE_USER: Final = "sink rows"
"""The user whose ACLs are removed, with all kinds of resources; each command starts a JVM."""


def documented(tool: str, option: str) -> str:
    """Return the command of the page that runs a tool with an option."""
    commands = re.findall(r"^ *([\w-]+(?:\.sh)? (?:.*\\\n)*.*)$", PAGE, re.MULTILINE)
    (found,) = {
        re.sub(r"\s*\\\n\s*", " ", command)
        for command in commands
        if command.startswith(f"{tool} ") and option in command.split()
    }
    return found


def run_tool(kafka: AuthorizingKafka, command: str) -> None:
    """Run a command with one of Kafka's tools on these brokers."""
    tool, *arguments = [word.strip("'") for word in command.split()]
    moved = [word.replace(SERVERS, kafka.plaintext_bootstrap_servers) for word in arguments]
    kafka.run_tool(TOOLS[tool], *moved)


def all_groups() -> set[str]:
    """Return every consumer group of an installation."""
    granted = [grant for who in KAFKA_USERS for grant in grants(who, Topics())]
    # A prefix is not the name of a group.
    return {grant.name for grant in granted if grant.resource == "group" and not grant.is_prefix}


async def commit(kafka: AuthorizingKafka, group: str) -> None:
    """Let a group exist without members."""
    at = TopicPartition(Topics().events.name, 0)
    consumer = AIOKafkaConsumer(
        bootstrap_servers=kafka.plaintext_bootstrap_servers,
        group_id=group,
        enable_auto_commit=False,
    )
    await consumer.start()
    try:
        consumer.assign([at])
        await consumer.commit({at: 0})
    finally:
        await consumer.stop()


async def on_brokers(kafka: AuthorizingKafka) -> tuple[set[str], set[str]]:
    """Return the existing groups and topics of gpuledger."""
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.plaintext_bootstrap_servers)
    await admin.start()
    try:
        groups = {name for name, *_ in await admin.list_consumer_groups()}
        topics = {name for name in await admin.list_topics() if name.startswith("gpuledger.")}
    finally:
        await admin.close()
    return groups, topics


def test_the_documented_commands_delete_all_groups_and_topics_and_a_user(
    start_authorizing_kafka: Callable[[], AuthorizingKafka],
) -> None:
    kafka = start_authorizing_kafka()
    plain = KafkaSettings(bootstrap_servers=kafka.plaintext_bootstrap_servers)
    asyncio.run(create_topics(plain, Topics()))
    for group in all_groups():
        asyncio.run(commit(kafka, group))
    assert asyncio.run(on_brokers(kafka)) == (all_groups(), {topic.name for topic in Topics()})

    try:
        run_tool(kafka, documented("kafka-consumer-groups.sh", "--delete"))
        run_tool(kafka, documented("kafka-topics.sh", "--delete"))
        run_tool(kafka, documented("kafka-configs.sh", "--delete-config"))

        assert asyncio.run(on_brokers(kafka)) == (set(), set())
    finally:
        # The pool discards stopped brokers; a later test would miss the deleted user on this one.
        kafka.kill()


async def acls_of(kafka: AuthorizingKafka, user: str) -> list[Any]:
    """Return the resources on which a user has permissions."""
    client = AIOKafkaClient(bootstrap_servers=kafka.plaintext_bootstrap_servers)
    await client.bootstrap()
    try:
        request = DescribeAclsRequest(ANY, None, ANY, f"User:{user}", None, ANY, ANY)
        answer = await client.send(client.get_random_node(), request)
    finally:
        await client.close()
    assert answer.error_code == 0, answer
    found: list[Any] = answer.resources
    return found


def removal_commands(folder: Path) -> list[str]:
    """Return the commands of the file that the documented pipeline writes."""
    pipeline = documented("gpuledger", "export")
    subprocess.run(
        ["/bin/bash", "-o", "pipefail", "-c", pipeline],
        cwd=folder,
        env={"PATH": f"{BIN}:{os.environ['PATH']}"},
        check=True,
        timeout=60,
    )
    lines = (folder / pipeline.split()[-1]).read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


def test_the_documented_pipeline_prints_commands_that_remove_all_acls_of_a_user(
    start_authorizing_kafka: Callable[[], AuthorizingKafka], tmp_path: Path
) -> None:
    kafka = start_authorizing_kafka()
    (who,) = [who for who in KAFKA_USERS if who.name == ONE_USER]
    granted = [
        Right(who.user, Operation[name], RESOURCES[one.resource], one.name, is_prefix=one.is_prefix)
        for one in grants(who, Topics())
        for name in one.operations
    ]
    asyncio.run(kafka.allow(granted))
    commands = removal_commands(tmp_path)
    assert all(" --remove --force " in command for command in commands)
    assert len(asyncio.run(acls_of(kafka, who.user))) == len(list(grants(who, Topics())))

    for command in commands:
        if f"User:{who.user}" in command.split():
            run_tool(kafka, command)

    assert asyncio.run(acls_of(kafka, who.user)) == []
