"""A node's and a namespace's labels on the API server are in the event, over a real broker."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

from gpuledger.bus.administration import create_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Message
from gpuledger.codec import encode
from gpuledger.keys import key_in
from gpuledger.records import ContainerRef
from gpuledger.settings import KafkaSettings
from gpuledger.topics import partition_of_node
from gpuledger_enricher.podwatch.kinds import NAMESPACE, NODE
from tests.default_topics import EVENTS, SAMPLES
from tests.podwatch_cluster import MERGE
from tests.real.end_to_end.components import Component, refuse_stray_settings
from tests.real.test_podwatch import RealCluster
from tests.unit.enricher.join.ticks import process, sample

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tests.real.services.kafka import Kafka
    from tests.real.services.kcat import Kcat
    from tests.real.services.kube_client import KubeApiClient

DEADLINE_SECONDS = 120.0
ZONE = {"topology.kubernetes.io/zone": "eu-west-1a"}


async def test_a_namespaces_label_and_a_nodes_zone_are_in_the_event(
    kube_api: KubeApiClient, start_kafka: Callable[[], Kafka], kcat: Kcat, tmp_path: Path
) -> None:
    """When they change, earlier ticks keep the earlier labels, however late they come."""
    refuse_stray_settings()
    cluster = await RealCluster.prepared(kube_api)
    node = cluster.named("gpu")
    await cluster.create(NODE, "gpu", labels=ZONE)
    await label_namespace(cluster, "vision")
    uid = await cluster.create_pod("train", node=node)
    kafka = start_kafka()
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    await create_topics(settings)
    environment = {"KAFKA__BOOTSTRAP_SERVERS": kafka.bootstrap_servers}
    podwatch_settings = {"KUBERNETES__KUBECONFIG": str(kube_api.kubeconfig)}
    started = [
        Component(
            name=name,
            command=["gpuledger", name],
            folder=tmp_path / name,
            environment=environment | more,
        )
        for name, more in (("podwatch", podwatch_settings), ("join", {}))
    ]
    seq = 1000

    async def output(team: str, zone: str, *, time_ns: int | None = None) -> Mapping[str, Any]:
        """Publish ticks until one has this description, and return its event."""
        nonlocal seq
        async with asyncio.timeout(DEADLINE_SECONDS):
            while True:
                seq += 1000
                await publish_tick(settings, node, uid, seq=seq, time_ns=time_ns or time.time_ns())
                event = await await_event(kafka, kcat, seq)
                described = event.get("node_description", {}).get("zone"), team_of(event)
                if described == (zone, team):
                    return event
                assert time_ns is None, described
                await asyncio.sleep(0.3)

    try:
        for each in started:
            each.start()
        first = await output("vision", "eu-west-1a")
        assert first["namespaces"] == [{"name": cluster.namespace, "labels": {"team": "vision"}}]
        await asyncio.sleep(1.1)  # later changes are seen at least a second after that tick
        await label_namespace(cluster, "speech")
        await cluster.change(NODE, "gpu", labels={"topology.kubernetes.io/zone": "eu-west-1b"})
        await output("speech", "eu-west-1b")
        await output("vision", "eu-west-1a", time_ns=first["time_ns"])
    finally:
        for each in started:
            each.kill()
        await cluster.delete_pod("train")
        await cluster.delete(NODE, "gpu")


def team_of(event: Mapping[str, Any]) -> str | None:
    """Return the team of the event's only namespace."""
    return next((each["labels"]["team"] for each in event.get("namespaces", ())), None)


async def label_namespace(cluster: RealCluster, team: str) -> None:
    """Set the team of the pods' namespace."""
    path = f"{NAMESPACE.path}/{cluster.namespace}"
    body = {"metadata": {"labels": {"team": team}}}
    await cluster.send("PATCH", path, body, content_type=MERGE)


async def publish_tick(
    settings: KafkaSettings, node: str, uid: str, *, seq: int, time_ns: int
) -> None:
    """Publish a tick in which the pod is busy."""
    tick = sample(
        node=node,
        seq=seq,
        time_ns=time_ns,
        containers=[ContainerRef(pod_uid=uid, container_id="c" * 64)],
        processes=[process(container=0, sm_utilization_ratio=0.5)],
    )
    key = key_in("default", node)
    partition = partition_of_node(key, partitions=SAMPLES.partitions)
    async with KafkaBus(settings).producer() as producer:
        message = Message(key.encode(), encode(tick), time.time_ns() // 10**6)
        await producer.publish(SAMPLES.name, partition, [message])


async def await_event(kafka: Kafka, kcat: Kcat, seq: int) -> Mapping[str, Any]:
    """Return the event of a tick once it is there."""
    while True:
        found = await asyncio.to_thread(kcat.consume, kafka.bootstrap_servers, EVENTS.name)
        for each in found:
            event: Mapping[str, Any] = json.loads(each.value or b"")
            if event["seq"] == seq:
                return event
        await asyncio.sleep(0.2)
