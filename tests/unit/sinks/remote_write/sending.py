"""The remote-write sink over the bus in memory, for its tests."""

import asyncio
from collections.abc import Callable
from typing import Any

from prometheus_client import REGISTRY

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Message
from gpuledger.codec import encode
from gpuledger.keys import OfNode, node_key
from gpuledger.ledger.usage import COUNTERS
from gpuledger.runtime import Readiness
from gpuledger_sinks.loop import run_sink
from gpuledger_sinks.registry import REMOTE_WRITE
from gpuledger_sinks.settings import RemoteWriteSettings
from tests.unit.sinks.builders import NODE, ManualClock, committed, place_of
from tests.unit.sinks.receiver import Receiver
from tests.unit.sinks.remote_write.oracle import Series, parse_compressed

AT = place_of(NODE)


def sink(
    on: MemoryBus,
    receiver: Receiver,
    *,
    clock: ManualClock | None = None,
    readiness: Readiness | None = None,
    group: str | None = None,
    **changes: Any,  # noqa: ANN401  # as RemoteWriteSettings takes them
) -> asyncio.Future[None]:
    # Samples and their order are the same in both versions; other tests cover the detection.
    settings = {
        "protocol": "1.0",
        "interval_seconds": 0,
        "commit_interval_seconds": 0,
        **changes,
    }
    return asyncio.ensure_future(
        run_sink(
            REMOTE_WRITE,
            bus=on,
            settings=RemoteWriteSettings(url=f"{receiver.url}/api/v1/write", **settings),
            readiness=readiness or Readiness(),
            clock=clock or ManualClock(),
            group=group,
        )
    )


def is_committed(on: MemoryBus, offset: int) -> Callable[[], bool]:
    return lambda: committed(on, REMOTE_WRITE.group, AT) == offset


def nodes_in(partition: int) -> list[str]:
    return [f"n{n}" for n in range(99) if place_of(f"n{n}").partition == partition]


def dropped(reason: str) -> float:
    labels = {"sink": "remote_write", "reason": reason}
    return REGISTRY.get_sample_value("gpuledger_sink_dropped_total", labels) or 0.0


def gauges_of_body(body: bytes) -> list[Series]:
    """Return the samples except those of counters, which begin with an earlier 0."""
    counters = {metric.name for metric in COUNTERS.metrics}
    return [one for one in parse_compressed(body) if one.name not in counters]


async def publish_at_once(on: MemoryBus, *events: OfNode) -> None:
    messages = [
        Message(key=node_key(one).encode(), value=encode(one), timestamp_ms=0) for one in events
    ]
    async with on.producer() as producer:
        await producer.publish(AT.topic, AT.partition, messages)
