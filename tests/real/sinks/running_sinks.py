"""Sinks as separate processes, and events for them on a real Kafka."""

from __future__ import annotations

import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from gpuledger.bus.administration import create_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Message
from gpuledger.codec import encode
from gpuledger.keys import key_in
from gpuledger.runtime import Readiness
from gpuledger.settings import KafkaSettings
from gpuledger.topics import Topic, partition_of_node
from gpuledger_sinks.loop import run_sink
from gpuledger_sinks.registry import ALERTS, REMOTE_WRITE
from gpuledger_sinks.settings import AlertsSettings, RemoteWriteSettings
from tests.default_topics import EVENTS, TOPICS
from tests.real.services import web
from tests.real.services.ports import free_ports
from tests.real.services.process import Process
from tests.unit.sinks.builders import SECOND_NS, entry, event, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from gpuledger.bus.protocol import Bus
    from gpuledger.clock import Clock
    from gpuledger.records import GpuEvent
    from tests.real.services.kafka import Kafka, KafkaBroker

KINDS = {AlertsSettings: ALERTS, RemoteWriteSettings: REMOTE_WRITE}
NODES = [f"node-{number}" for number in range(8)]
SINK = (Path(sys.executable).with_name("gpuledger"), "sink")


@asynccontextmanager
async def sending(
    on: Bus,
    settings: AlertsSettings | RemoteWriteSettings,
    *,
    readiness: Readiness | None = None,
    clock: Clock | None = None,
) -> AsyncIterator[Readiness]:
    """Run the sink with these settings within this process; yields its checks.

    Samples are committed after each poll; tests wait for that.
    """
    if isinstance(settings, RemoteWriteSettings):
        settings = replace(settings, commit_interval_seconds=0)
    shown, kind = readiness or Readiness(), KINDS[type(settings)]
    sink = run_sink(kind, bus=on, settings=settings, readiness=shown, clock=clock)
    async with running(sink):
        yield shown


class Sink(Process):
    def __init__(self, kind: str, kafka: Kafka, folder: Path, **settings: str) -> None:
        port = free_ports(1)[0]
        self.health = f"http://127.0.0.1:{port}"
        super().__init__(
            name=f"{kind}-{port}",
            argv=[*SINK, kind],
            folder=folder,
            environment={
                "GPULEDGER_KAFKA__BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
                "GPULEDGER_KAFKA__SESSION_TIMEOUT_SECONDS": "6",
                "GPULEDGER_HTTP__LISTEN": f"127.0.0.1:{port}",
                **{f"GPULEDGER_{name.upper()}": value for name, value in settings.items()},
            },
        )

    def is_ready(self) -> bool:
        return web.fetch(f"{self.health}/readyz").status == 200


async def publish(to: KafkaBroker, events: Iterable[GpuEvent | bytes]) -> None:
    settings = KafkaSettings(bootstrap_servers=to.bootstrap_servers)
    async with KafkaBus(settings).producer() as producer:
        for one in events:
            node, value = (NODES[0], one) if isinstance(one, bytes) else (one.node, encode(one))
            at = partition_of_node(key_in("default", node), partitions=EVENTS.partitions)
            message = Message(
                key=key_in("default", node).encode(),
                value=value,
                timestamp_ms=time.time_ns() // 10**6,
            )
            await producer.publish(EVENTS.name, at, [message])


async def make_topics(on: Kafka, *others: Topic) -> None:
    settings = KafkaSettings(bootstrap_servers=on.bootstrap_servers)
    await create_topics(settings, [*TOPICS, *others])


def ticks(count: int, *, first: int = 0) -> list[GpuEvent]:
    start_ns = time.time_ns() - 60 * SECOND_NS
    return [
        event(number, node=node, time_ns=start_ns + number * SECOND_NS, entries=[entry()])
        for number in range(first, first + count)
        for node in NODES
    ]
