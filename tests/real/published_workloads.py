"""The GPU use of played workloads as events in Kafka, one each half second."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from typing_extensions import override

from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Message
from gpuledger.codec import encode
from gpuledger.keys import key_in
from gpuledger.records import (
    Category,
    Entry,
    EventContainer,
    GpuBooks,
    GpuEvent,
    GpuReading,
    PodDescription,
    PodState,
)
from gpuledger.settings import KafkaSettings
from gpuledger.topics import partition_of_node
from tests.default_topics import EVENTS
from tests.real.played import Played
from tests.real.played_workloads import NAMESPACE, NODE

if TYPE_CHECKING:
    from gpuledger.bus.protocol import Producer
    from tests.real.played_workloads import PlayedWorkloads, Use

_INTERVAL_NS = 500_000_000
_KEY = key_in("default", NODE)


@dataclass
class PublishedWorkloads(Played):
    """Publishes events in which each pod has a GPU of its own, except while `played` is silent."""

    played: PlayedWorkloads
    bootstrap_servers: str

    @override
    def _play(self) -> None:
        asyncio.run(self._publish())

    async def _publish(self) -> None:
        bus = KafkaBus(KafkaSettings(bootstrap_servers=self.bootstrap_servers))
        async with bus.producer() as producer:
            while not self._end.is_set():
                if not self.played.is_silent:
                    await self._publish_event(producer)
                await asyncio.sleep(_INTERVAL_NS / 1e9)

    async def _publish_event(self, producer: Producer) -> None:
        now_ns = time.time_ns()
        event = _event(self.played.uses(), now_ns)
        message = Message(_KEY.encode(), encode(event), now_ns // 1_000_000)
        partition = partition_of_node(_KEY, partitions=EVENTS.partitions)
        await producer.publish(EVENTS.name, partition, [message])


def _event(uses: list[Use], now_ns: int) -> GpuEvent:
    return GpuEvent(
        cluster="default",
        node=NODE,
        boot_id="boot",
        seq=now_ns // 1_000_000 % 10**9,
        time_ns=now_ns,
        interval_ns=_INTERVAL_NS,
        gpus=[
            GpuBooks(
                reading=GpuReading(uuid=f"GPU-{place}", index=place),
                entries=[_entry(place, use)],
            )
            for place, use in enumerate(uses)
        ],
        pods=[
            PodDescription(
                uid=use.uid,
                state=PodState.KNOWN,
                namespace=NAMESPACE,
                name=use.name,
                owner_kind="Deployment",
                owner_name=use.owner,
            )
            for use in uses
        ],
        containers=[EventContainer(pod=place, name="server") for place in range(len(uses))],
        allocations=[],
    )


def _entry(place: int, use: Use) -> Entry:
    busy_ns = round(use.busy * _INTERVAL_NS)
    return Entry(category=Category.POD, container=place, busy_ns=busy_ns)
