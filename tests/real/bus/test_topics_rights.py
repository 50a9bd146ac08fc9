"""`gpuledger topics` names the missing permission of a user of brokers with access lists."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from gpuledger.bus.administration import create_topics
from gpuledger.settings import KafkaSettings
from gpuledger_cli.__main__ import main
from tests.default_topics import TOPICS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.real.services.authorizing_kafka import AuthorizingKafka
    from tests.real.services.kcat import Kcat

GRANT_ATTEMPTS = 50
PREFIX = ("--topic", "gpuledger.", "--resource-pattern-type", "prefixed")


@pytest.fixture
def broker(
    start_authorizing_kafka: Callable[[], AuthorizingKafka], monkeypatch: pytest.MonkeyPatch
) -> AuthorizingKafka:
    kafka = start_authorizing_kafka()
    settings = {
        "BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
        "SECURITY_PROTOCOL": "SASL_SSL",
        "SASL_USERNAME": kafka.username,
        "SASL_PASSWORD": kafka.password,
        "SSL_CA_FILE": str(kafka.ca_file),
        "REQUEST_TIMEOUT_SECONDS": "20",
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"GPULEDGER_KAFKA__{name}", value)
    return kafka


def reported(capsys: pytest.CaptureFixture[str], command: str, expected: str) -> tuple[int, str]:
    """Return the exit code and the output; a granted permission takes effect a moment later."""
    code, message = 0, ""
    for _ in range(GRANT_ATTEMPTS):
        code = main(["topics", command])
        captured = capsys.readouterr()
        message = captured.out + captured.err
        if expected in message:
            break
        time.sleep(0.2)
    return code, message


def made(broker: AuthorizingKafka, kcat: Kcat) -> int:
    """Return how many topics there are, without Kafka's own, such as `__consumer_offsets`."""
    found: Any = json.loads(json.dumps(kcat.metadata(broker.plaintext_bootstrap_servers)))
    return sum(not topic["topic"].startswith("__") for topic in found["topics"])


def test_the_missing_permission_is_named_and_the_documented_ones_suffice(
    broker: AuthorizingKafka, kcat: Kcat, capsys: pytest.CaptureFixture[str]
) -> None:
    rights = "grant it Describe and DescribeConfigs on these topics"
    for command, names_create in (("check", False), ("create", True)):
        code, message = reported(capsys, command, rights)
        assert (code, rights in message, "and Create" in message) == (2, True, names_create), (
            message
        )
    for granted in ("Create", "Describe"):
        broker.grant(*PREFIX, operations=[granted])
        for command in ("check", "create"):
            code, message = reported(capsys, command, rights)
            assert (code, message.count("\n"), rights in message) == (2, 1, True), message
    assert made(broker, kcat) == 0

    broker.grant(*PREFIX, operations=["DescribeConfigs"])
    code, message = reported(capsys, "create", "created")
    assert (code, message.count("created")) == (0, len(TOPICS)), message
    code, message = reported(capsys, "check", " ok ")
    assert (code, message.count(" ok ")) == (0, len(TOPICS)), message


def test_topics_whose_configuration_may_not_be_read_are_not_reported_as_different(
    broker: AuthorizingKafka, capsys: pytest.CaptureFixture[str]
) -> None:
    plaintext = KafkaSettings(bootstrap_servers=broker.plaintext_bootstrap_servers)
    asyncio.run(create_topics(plaintext))
    broker.grant(*PREFIX, operations=["Create", "Describe"])
    for command in ("check", "create"):
        code, message = reported(capsys, command, "grant it DescribeConfigs on these topics")
        assert (code, "grant it DescribeConfigs on these topics" in message) == (2, True), message


def test_missing_permissions_to_create_and_to_describe_topics_are_named(
    broker: AuthorizingKafka, capsys: pytest.CaptureFixture[str]
) -> None:
    broker.grant(*PREFIX, operations=["DescribeConfigs"])
    code, message = reported(capsys, "create", "grant it Create on these topics")
    assert (code, "grant it Create on these topics" in message) == (2, True), message

    broker.grant(*PREFIX, operations=["Create"])
    code, message = reported(capsys, "create", "grant it Describe on these topics")
    assert (code, "grant it Describe on these topics" in message) == (2, True), message
