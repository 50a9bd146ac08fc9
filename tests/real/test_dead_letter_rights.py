"""The documented permissions suffice to list and replay dead letters; lesser ones do not."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from typing import TYPE_CHECKING

from gpuledger.bus.administration import create_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.settings import KafkaSettings
from gpuledger_sinks.registry import ROWS
from tests.default_topics import TOPICS
from tests.real.deployment.test_kafka_rights import granted_rights
from tests.real.end_to_end.components import BIN, refuse_stray_settings
from tests.unit.cli.dead_letters.builders import JOIN, record_of, reject
from tests.unit.enricher.join.ticks import sample
from tests.unit.sinks.builders import event

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.real.services.authorizing_kafka import AuthorizingKafka

LIMIT_SECONDS = 120.0
USERS = {"gpuledger-dead-letters", "gpuledger-dead-letters-replay"}


def run(kafka: AuthorizingKafka, user: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BIN / "gpuledger", "dead-letters", *options],
        env={
            "PATH": os.environ["PATH"],
            "GPULEDGER_KAFKA__BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
            "GPULEDGER_KAFKA__SECURITY_PROTOCOL": "SASL_SSL",
            "GPULEDGER_KAFKA__SSL_CA_FILE": str(kafka.ca_file),
            "GPULEDGER_KAFKA__SASL_USERNAME": user,
            "GPULEDGER_KAFKA__SASL_PASSWORD": kafka.users[user],
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_SECONDS,
    )


async def cause_rejection(kafka: AuthorizingKafka) -> None:
    """Create the topics, and add a dead letter of the join and one of the sink `rows`."""
    settings = KafkaSettings(bootstrap_servers=kafka.plaintext_bootstrap_servers)
    await create_topics(settings, TOPICS)
    await kafka.allow(right for right in granted_rights() if right.user in USERS)
    bus = KafkaBus(settings)
    # Retention would remove older records before they are read.
    now_ns = time.time_ns()
    await reject(bus, record_of(event(0)), consumer=ROWS.group, time_ns=now_ns)
    partitions = await bus.partitions(TOPICS.samples.name)
    record = record_of(sample(), partitions=partitions)
    await reject(bus, record, consumer=JOIN, time_ns=now_ns)


def test_the_documented_permissions_suffice_and_permissions_to_list_do_not_allow_a_replay(
    start_authorizing_kafka: Callable[[], AuthorizingKafka],
) -> None:
    refuse_stray_settings()
    kafka = start_authorizing_kafka()
    asyncio.run(cause_rejection(kafka))

    # Permissions take effect on brokers a moment after they are granted.
    deadline = time.monotonic() + LIMIT_SECONDS
    while True:
        listed = run(kafka, "gpuledger-dead-letters", "list", "--format", "csv")
        if len(listed.stdout.splitlines()) == 1 + 2:
            break
        assert time.monotonic() < deadline, listed.stderr
    refused = run(kafka, "gpuledger-dead-letters", "replay", "--all", "--yes")
    assert refused.returncode == 2
    assert "gpuledger." in refused.stderr
    replayed = run(kafka, "gpuledger-dead-letters-replay", "replay", "--all", "--yes")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert sorted(replayed.stdout.splitlines()) == [
        f"1 replayed to {consumer}" for consumer in (JOIN, ROWS.group)
    ]
