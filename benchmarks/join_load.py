"""The load of the join's benchmarks: its topics and its cache. Nothing is measured here."""

import asyncio
import time
from collections.abc import Sequence

from aiokafka import AIOKafkaProducer

from benchmarks.ticks import Fleet, node_name
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Message
from gpuledger.clock import NS_PER_MS
from gpuledger.codec import Decoder, encode
from gpuledger.keys import key_in
from gpuledger.records import PodRecord
from gpuledger.records.base import DEFAULT_CLUSTER
from gpuledger.settings import KafkaSettings
from gpuledger.topics import partition_of_node
from gpuledger_enricher.join.pods.pods import ClusterObjects, ClusterPods
from gpuledger_enricher.watched_records import PodSharing
from tests.default_topics import NAMESPACES, NODES, PODS, SAMPLES


def partition_of(node: int) -> int:
    """Return a node's partition."""
    return partition_of_node(
        key_in(DEFAULT_CLUSTER, node_name(node)), partitions=SAMPLES.partitions
    )


def cache_pods(fleet: Fleet) -> ClusterPods:
    """Return all pods of the nodes as a worker has them after reading their topic."""
    decode = Decoder(topic=PODS.name, record=PodRecord).decode
    pods, sharing = ClusterPods(), PodSharing()
    for node in range(fleet.nodes):
        for pod in fleet.pods(node):
            pods.put(sharing.share(decode(encode(pod))), partition=partition_of(node))
    return pods


def cache_places(fleet: Fleet) -> ClusterObjects:
    """Return the nodes and their namespace as a worker has them after reading their topics."""
    places, (namespace, nodes) = ClusterObjects(), fleet.places()
    places.namespaces.put(namespace, partition=0, seen_time_ns=0)
    for number, node in enumerate(nodes):
        places.nodes.put(node, partition=partition_of(number), seen_time_ns=0)
    return places


async def publish_pods(settings: KafkaSettings, fleet: Fleet) -> None:
    """Write all pods of the nodes, the nodes, and their namespace."""
    messages: dict[int, list[Message]] = {}
    for node in range(fleet.nodes):
        for pod in fleet.pods(node):
            message = Message(key_in(pod.cluster, pod.uid).encode(), encode(pod), 0)
            messages.setdefault(partition_of(node), []).append(message)
    async with KafkaBus(settings).producer() as producer:
        for partition, all_of_it in messages.items():
            await producer.publish(PODS.name, partition, all_of_it)
        namespace, nodes = fleet.places()
        key = key_in(namespace.cluster, namespace.name).encode()
        await producer.publish(NAMESPACES.name, 0, [Message(key, encode(namespace), 0)])
        described: dict[int, list[Message]] = {}
        for number, one in enumerate(nodes):
            message = Message(key_in(one.cluster, one.name).encode(), encode(one), 0)
            described.setdefault(partition_of(number), []).append(message)
        for partition, all_of_it in described.items():
            await producer.publish(NODES.name, partition, all_of_it)


async def publish_one_by_one(
    settings: KafkaSettings, ticks: Sequence[bytes], *, nodes: int
) -> None:
    """Write each tick as its own batch; the bus's producer would combine them."""
    producer = AIOKafkaProducer(
        bootstrap_servers=settings.bootstrap_servers, acks="all", compression_type="zstd"
    )
    await producer.start()
    try:
        waiting = []
        # Records older than the topic's retention may be deleted before they are read.
        now_ms = time.time_ns() // NS_PER_MS
        for number, tick in enumerate(ticks):
            batch = producer.create_batch()
            node = number % nodes
            batch.append(
                key=key_in(DEFAULT_CLUSTER, node_name(node)).encode(), value=tick, timestamp=now_ms
            )
            place = partition_of(node)
            waiting.append(await producer.send_batch(batch, SAMPLES.name, partition=place))
        await asyncio.gather(*waiting)
    finally:
        await producer.stop()
