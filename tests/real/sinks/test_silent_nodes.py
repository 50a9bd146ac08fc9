"""An unresponsive node is detected on a real Kafka, where a marker ends each transaction."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Message, TopicPartition
from gpuledger.codec import encode
from gpuledger.keys import key_in
from gpuledger.settings import KafkaSettings
from gpuledger.topics import partition_of_node
from gpuledger_sinks.settings import RemoteWriteSettings
from tests.default_topics import EVENTS
from tests.real.sinks.running_sinks import make_topics, sending
from tests.unit.sinks.builders import NODE, event, eventually
from tests.unit.sinks.receiver import receiving
from tests.unit.sinks.remote_write.oracle import parse_compressed

if TYPE_CHECKING:
    from tests.real.services.kafka import Kafka
    from tests.unit.sinks.receiver import Received


def ends(request: Received) -> bool:
    return all(math.isnan(one.value) for one in parse_compressed(request.body))


async def test_the_series_of_a_node_are_ended_if_its_last_tick_came_in_a_transaction(
    broker: Kafka,
) -> None:
    await make_topics(broker)
    bus = KafkaBus(KafkaSettings(bootstrap_servers=broker.bootstrap_servers))
    at = TopicPartition(
        EVENTS.name, partition_of_node(key_in("default", NODE), partitions=EVENTS.partitions)
    )
    now_ns = time.time_ns()
    message = Message(
        key_in("default", NODE).encode(), encode(event(0, time_ns=now_ns)), now_ns // 1_000_000
    )
    async with bus.transactions("a-join-0") as transactions:
        await transactions.commit({at: [message]}, offsets={}, group="a-join")
    async with receiving() as receiver:
        settings = RemoteWriteSettings(
            url=f"{receiver.url}/write",
            protocol="1.0",
            stale_after_seconds=2.0,
            interval_seconds=0,
        )
        async with sending(bus, settings):
            await eventually(lambda: len(receiver.received) == 2, within_seconds=120)

    assert [ends(request) for request in receiver.received] == [False, True]
