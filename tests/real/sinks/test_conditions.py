"""How long a condition has held goes on over kills, on a real Kafka and Alertmanager."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from gpuledger.bus.kafka import KafkaBus
from gpuledger.records import Account, GpuEvent
from gpuledger.settings import KafkaSettings
from gpuledger_sinks.alerts.active_alerts import rfc3339
from tests.default_topics import TOPICS
from tests.real.sinks.running_sinks import NODES, Sink, make_topics, publish
from tests.unit.sinks.builders import SECOND_NS, entry, event

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.real.services.alertmanager import Alertmanager
    from tests.real.services.kafka import Kafka

NODE = NODES[0]
FOR_SECONDS = 60


def busy(start_ns: int, second: int) -> GpuEvent:
    time_ns = start_ns + second * SECOND_NS
    return event(second, node=NODE, time_ns=time_ns, entries=[entry(Account.HOST)])


async def written(broker: Kafka) -> int:
    """Return how many records of conditions there are."""
    settings = KafkaSettings(bootstrap_servers=broker.bootstrap_servers)
    async with KafkaBus(settings).reader() as reader:
        spans = await reader.spans(TOPICS.conditions.name)
    return sum(span.end - span.first for span in spans.values())


def standing(alertmanager: Alertmanager) -> list[Any]:
    return [one for one in alertmanager.alerts() if one["labels"]["node"] == NODE]


async def test_for_goes_on_over_kills_and_what_fires_keeps_its_start(
    broker: Kafka,
    start_alertmanager: Callable[..., Alertmanager],
    start_sink: Callable[..., Sink],
) -> None:
    await make_topics(broker)
    alertmanager = await asyncio.to_thread(start_alertmanager)
    # The condition holds for longer than any of the three sinks has seen it.
    start_ns = time.time_ns() - 2 * FOR_SECONDS * SECOND_NS
    settings = {
        "alerts__urls": f'["{alertmanager.url}"]',
        "alerts__busy_without_pod__for_seconds": str(FOR_SECONDS),
    }
    for first in (0, 25, 50):
        before = await written(broker)
        sink = start_sink("alerts", broker, **settings)
        await asyncio.to_thread(sink.wait_until, sink.is_ready, deadline_seconds=40)
        assert standing(alertmanager) == []
        await publish(broker, [busy(start_ns, second) for second in range(first, first + 25)])
        async with asyncio.timeout(30):
            while await written(broker) <= before:
                pass
        sink.kill()
    # What was written may be of a part of the ticks: the last sink reads the others.
    start_sink("alerts", broker, **settings)
    fired = await asyncio.to_thread(alertmanager.await_alerts, "GpuBusyWithoutPod")
    # Alertmanager tells milliseconds.
    started = rfc3339(busy(start_ns, FOR_SECONDS).time_ns)[: len("2026-01-01T00:00:00.000")]
    assert [alert["startsAt"] for alert in fired] == [f"{started}Z"]
