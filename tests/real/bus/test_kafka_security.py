"""The Kafka bus over TLS and with a login."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest
from msgspec.structs import replace

from gpuledger.bus.administration import create_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Subscription, TopicPartition
from gpuledger.errors import BusUnavailableError
from gpuledger.records import PodRecord
from gpuledger.settings import KafkaSettings, Secret
from gpuledger.topics import Topic
from tests.bus_contract.harness import poll_until, texts
from tests.real.bus.builders import numbered, settings_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.real.services.secure_kafka import SecureKafka


@pytest.fixture(autouse=True)
async def _let_connections_end() -> AsyncIterator[None]:
    yield
    # aiokafka does not wait for a connection of a failed start, and TLS ends with a message to the
    # peer; a loop that closes earlier leaves a transport, which is an error here.
    await asyncio.sleep(0.2)


def secured(kafka: SecureKafka, **others: object) -> KafkaSettings:
    given: dict[str, object] = {
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_username": kafka.username,
        "sasl_password": Secret(kafka.password),
        "ssl_ca_file": kafka.ca_file,
        "request_timeout_seconds": 5.0,
    }
    return settings_of(kafka.bootstrap_servers, **(given | others))


async def test_records_are_sent_and_read_over_tls_with_a_login(secure_kafka: SecureKafka) -> None:
    topic = Topic(name=f"secure-{uuid4().hex[:8]}", record=PodRecord, key="uid", partitions=1)
    settings = secured(secure_kafka)
    await create_topics(settings, [topic])
    bus = KafkaBus(settings)
    async with (
        bus.producer() as producer,
        bus.consumer(Subscription(group="g", topics=[topic.name])) as consumer,
    ):
        await producer.publish(topic.name, 0, [numbered(1)])
        records = await poll_until(bool, consumer)
        await consumer.commit({TopicPartition(topic.name, 0): 1})

    assert texts(records) == ["1"]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"sasl_password": Secret("wrong")}, r"SaslAuthenticationFailed.*kafka\.sasl_password$"),
        (
            {"sasl_mechanism": "SCRAM-SHA-256"},
            r"UnsupportedSaslMech\w+; check kafka\.sasl_mechanism$",
        ),
        ({"ssl_ca_file": None}, r"CERTIFICATE_VERIFY_FAILED.*check kafka\.ssl_ca_file$"),
        ({"security_protocol": "PLAINTEXT"}, r"check kafka\.security_protocol$"),
        ({"security_protocol": "SASL_PLAINTEXT"}, r"check kafka\.security_protocol$"),
        ({"security_protocol": "SSL"}, r"check kafka\.security_protocol$"),
    ],
)
async def test_a_rejected_login_or_certificate_gives_the_reason_and_shows_no_password(
    secure_kafka: SecureKafka, other: dict[str, object], reason: str
) -> None:
    bus = KafkaBus(secured(secure_kafka, **other))

    with pytest.raises(BusUnavailableError, match=reason) as raised:
        await bus.partitions("any")

    assert f"cannot connect to Kafka at {secure_kafka.bootstrap_servers}" in str(raised.value)
    assert "wrong" not in str(raised.value)


@pytest.mark.parametrize("protocol", ["SSL", "SASL_SSL", "SASL_PLAINTEXT"])
async def test_a_port_that_accepts_only_plaintext_leads_to_the_protocol_setting(
    secure_kafka: SecureKafka, protocol: str
) -> None:
    settings = secured(secure_kafka, security_protocol=protocol)
    plaintext = replace(settings, bootstrap_servers=secure_kafka.plaintext_bootstrap_servers)

    with pytest.raises(BusUnavailableError, match=r"check kafka\.security_protocol$"):
        await KafkaBus(plaintext).partitions("any")


async def test_an_unreadable_certificate_names_its_setting(tmp_path: Path) -> None:
    absent = tmp_path / "ca.pem"
    bus = KafkaBus(settings_of("localhost:9", security_protocol="SSL", ssl_ca_file=absent))

    with pytest.raises(Exception, match=r"kafka\.ssl_ca_file.*ca\.pem"):
        await bus.partitions("any")
