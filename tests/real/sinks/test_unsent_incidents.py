"""A sink still reports incidents that no Alertmanager accepted, whatever Kafka's group does."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import orjson

from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Message
from gpuledger.codec import encode
from gpuledger.keys import key_in
from gpuledger.records import AttributedIncident, Incident, Severity
from gpuledger.runtime import Readiness
from gpuledger.settings import KafkaSettings
from gpuledger.topics import partition_of_node
from gpuledger_sinks.settings import AlertsSettings
from tests.default_topics import ATTRIBUTED_INCIDENTS
from tests.real import changed_topics
from tests.real.sinks.running_sinks import NODES, make_topics, sending
from tests.real.sinks.running_sinks import publish as publish_events
from tests.unit.sinks.builders import GPU, event, eventually, reading
from tests.unit.sinks.receiver import Answer, receiving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from tests.real.services.kafka import Kafka

WITHIN_SECONDS = 120.0
PARTITIONS = ATTRIBUTED_INCIDENTS.partitions


def node_in(partition: int) -> str:
    names = (f"n{number}" for number in range(5000))
    return next(
        n
        for n in names
        if partition_of_node(key_in("default", n), partitions=PARTITIONS) == partition
    )


async def publish(on: KafkaBus, node: str, *xids: int, kind: str = "xid") -> None:
    async with on.producer() as producer:
        for xid in xids:
            incident = Incident(
                cluster="default",
                node=node,
                boot_id="boot-1",
                gpu_uuid=f"{GPU}-{xid}",  # XIDs of one GPU are one alert
                time_ns=time.time_ns(),
                kind=kind,
                source="nvml",
                severity=Severity.CRITICAL,
                xid=xid,
                message="GPU has fallen off the bus",
                processes=[],
            )
            value = encode(AttributedIncident(incident=incident, pods=[]))
            at = partition_of_node(key_in("default", node), partitions=PARTITIONS)
            message = Message(key_in("default", node).encode(), value, time.time_ns() // 1_000_000)
            await producer.publish(ATTRIBUTED_INCIDENTS.name, at, [message])


@dataclass
class Alertmanager:
    """An Alertmanager that is away at first."""

    url: str = ""
    is_there: bool = False
    requests: int = 0
    took: set[tuple[str, str]] = field(default_factory=set)

    def answer(self, body: bytes) -> Answer:
        self.requests += 1
        if not self.is_there:
            return Answer(503, "away")
        self.took |= {(one["labels"]["node"], one["labels"]["xid"]) for one in orjson.loads(body)}
        return Answer(200)


@asynccontextmanager
async def away() -> AsyncIterator[Alertmanager]:
    alertmanager = Alertmanager()
    async with receiving(by_body=alertmanager.answer) as receiver:
        alertmanager.url = receiver.url
        yield alertmanager


def sink(settings: KafkaSettings, to: Alertmanager) -> AbstractAsyncContextManager[Readiness]:
    return sending(KafkaBus(settings), AlertsSettings(urls=[to.url]))


def holds(readiness: Readiness, partitions: int) -> bool:
    return readiness.check("alerts.kafka").detail.startswith(f"{partitions} partitions assigned")


async def test_incidents_that_were_not_accepted_before_a_rebalance_are_reported(
    broker: Kafka,
) -> None:
    await make_topics(broker)
    settings = KafkaSettings(bootstrap_servers=broker.bootstrap_servers, session_timeout_seconds=6)
    nodes = [node_in(partition) for partition in range(PARTITIONS)]
    for node in nodes:
        await publish(KafkaBus(settings), node, 79)
    async with away() as alertmanager:
        async with sink(settings, alertmanager) as first:
            await eventually(lambda: alertmanager.requests > 1, within_seconds=WITHIN_SECONDS)
            async with sink(settings, alertmanager) as second:
                for one in (first, second):
                    await eventually(partial(holds, one, PARTITIONS), within_seconds=WITHIN_SECONDS)
                requests = alertmanager.requests
                await eventually(lambda: alertmanager.requests > requests + 3, within_seconds=120)
        alertmanager.is_there = True
        async with sink(settings, alertmanager):
            reported = {(node, "79") for node in nodes}
            await eventually(lambda: alertmanager.took == reported, within_seconds=WITHIN_SECONDS)


async def test_incidents_of_a_topic_that_is_recreated_during_an_outage_are_reported(
    broker: Kafka,
) -> None:
    await make_topics(broker)
    settings, node = KafkaSettings(bootstrap_servers=broker.bootstrap_servers), node_in(3)
    await publish(KafkaBus(settings), node, 1, 2, 3, 4, 5)
    async with away() as alertmanager:
        async with sink(settings, alertmanager) as readiness:
            await eventually(lambda: alertmanager.requests > 1, within_seconds=WITHIN_SECONDS)
            await changed_topics.recreate(settings, ATTRIBUTED_INCIDENTS)
            await publish(KafkaBus(settings), node, 11, 12)
            gaps = readiness.check("alerts.gaps")
            await eventually(lambda: not gaps.is_ok, within_seconds=WITHIN_SECONDS)
            alertmanager.is_there = True
            await eventually(lambda: (node, "12") in alertmanager.took, within_seconds=120)
        await publish(KafkaBus(settings), node, 21, 22, 23)
        async with sink(settings, alertmanager):
            await eventually(lambda: (node, "23") in alertmanager.took, within_seconds=120)

    reported = {int(xid) for _, xid in alertmanager.took}
    assert reported >= {11, 12, 21, 22, 23}


async def test_a_lost_gpu_is_reported_by_a_sink_that_was_restarted(broker: Kafka) -> None:
    await make_topics(broker)
    settings, node = KafkaSettings(bootstrap_servers=broker.bootstrap_servers), NODES[0]
    await publish(KafkaBus(settings), node, 79, kind="gpu_lost")
    for _ in range(2):
        async with away() as alertmanager, sink(settings, alertmanager):
            alertmanager.is_there = True
            await eventually(lambda: alertmanager.requests > 0, within_seconds=WITHIN_SECONDS)
            lost = reading(uuid=f"{GPU}-79", unresponsive=True)
            ticked = event(node=node, of=lost, entries=[], time_ns=time.time_ns())
            await publish_events(broker, [ticked])
            await eventually(lambda: (node, "79") in alertmanager.took, within_seconds=120)
