"""The documented permissions suffice for `watermarks` and `cluster retire`; lesser ones do not."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from typing import TYPE_CHECKING

from gpuledger.bus.administration import create_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Message
from gpuledger.codec import encode
from gpuledger.completeness import message_of
from gpuledger.keys import key_in
from gpuledger.records import GpuFacts, Inventory, Watermark
from gpuledger.settings import KafkaSettings
from gpuledger.topics import partition_of_node
from tests.default_topics import INVENTORY, PODS, TOPICS, WATERMARKS
from tests.real.deployment.test_kafka_rights import granted_rights
from tests.real.end_to_end.components import BIN, refuse_stray_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.real.services.authorizing_kafka import AuthorizingKafka

LIMIT_SECONDS = 120.0
WATCHER, RETIRER = "gpuledger-watermarks", "gpuledger-cluster-retire"
INSPECTOR = "gpuledger-inspect"
AGO_NS = 600 * 10**9


def run(kafka: AuthorizingKafka, user: str, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BIN / "gpuledger", *command],
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


async def publish_cluster(kafka: AuthorizingKafka) -> None:
    """Create the topics, and add podwatch's watermarks and an inventory of a cluster."""
    settings = KafkaSettings(bootstrap_servers=kafka.plaintext_bootstrap_servers)
    await create_topics(settings, TOPICS)
    await kafka.allow(
        right for right in granted_rights() if right.user in {WATCHER, RETIRER, INSPECTOR}
    )
    bus = KafkaBus(settings)
    partitions = await bus.partitions(INVENTORY.name)
    time_ns = time.time_ns() - AGO_NS
    gpu = GpuFacts(uuid="GPU-1", index=0, model="H100", instances=[], capabilities=[])
    inventory = Inventory(cluster="gone", node="n", boot_id="b", time_ns=time_ns, gpus=[gpu])
    key = key_in("gone", "n")
    message = Message(key.encode(), encode(inventory), time_ns // 10**6)
    async with bus.producer() as producer:
        home = partition_of_node(key, partitions=partitions)
        await producer.publish(INVENTORY.name, home, [message])
        for partition in range(partitions):
            watermark = Watermark(
                component="podwatch",
                cluster="gone",
                partition=partition,
                complete_until_ns=time_ns,
                topic=PODS.name,
                next_offset=0,
                publisher="test",
            )
            message = message_of(watermark, time_ns=time_ns)
            await producer.publish(WATERMARKS.name, partition, [message])


def test_the_documented_permissions_suffice_and_those_for_watermarks_do_not_allow_retire(
    start_authorizing_kafka: Callable[[], AuthorizingKafka],
) -> None:
    refuse_stray_settings()
    kafka = start_authorizing_kafka()
    asyncio.run(publish_cluster(kafka))

    # Permissions take effect on brokers a moment after they are granted.
    deadline = time.monotonic() + LIMIT_SECONDS
    while True:
        found = run(kafka, WATCHER, "watermarks", "--component", "podwatch")
        if found.returncode == 0:
            break
        assert time.monotonic() < deadline, found.stderr
    for component in ("join", "store", "rows"):
        empty = run(kafka, WATCHER, "watermarks", "--component", component)
        assert empty.stdout.startswith("not complete: no watermark of"), empty.stderr
    nothing = run(kafka, INSPECTOR, "inspect")
    assert (nothing.returncode, "no event in the last" in nothing.stderr) == (1, True), nothing
    refused = run(kafka, WATCHER, "cluster", "retire", "gone")
    assert refused.returncode == 2
    assert "gpuledger." in refused.stderr
    retired = run(kafka, RETIRER, "cluster", "retire", "gone")
    assert retired.returncode == 0, retired.stdout + retired.stderr
    assert "retired 1 GPU of 1 node" in retired.stdout
