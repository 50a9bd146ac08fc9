"""Counters on real brokers and a strict Prometheus, with kills of the sink at random moments."""

from __future__ import annotations

import asyncio
import os
import random
import time
import urllib.parse
from typing import TYPE_CHECKING, Final

from gpuledger_sinks.registry import REMOTE_WRITE
from tests.real.sinks.running_sinks import NODES, make_topics, publish
from tests.unit.sinks.builders import SECOND_NS, entry, event

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuledger.records import GpuEvent
    from tests.real.services.kafka import Kafka
    from tests.real.services.prometheus import PrometheusApi
    from tests.real.sinks.running_sinks import Sink

KILLS: Final = int(os.environ.get("TEST_KILLS", "6"))
"""How often the sink is killed; `TEST_KILLS=50` takes five minutes."""
INTERVAL_SECONDS: Final = 5
TICKS: Final = 40 * KILLS
RUN: Final = "kills"
"""The label that separates this test's series from those of others in the same Prometheus."""
BUSY: Final = f'gpuledger_gpu_busy_seconds_total{{category="pod", run="{RUN}"}}'


def ticks(start_ns: int, first: int, count: int) -> list[GpuEvent]:
    return [
        event(number, node=node, time_ns=start_ns + number * SECOND_NS, entries=[entry()])
        for number in range(first, first + count)
        for node in NODES
    ]


def samples(
    prometheus: PrometheusApi, promql: str, *, at_seconds: float
) -> dict[str, list[tuple[float, float]]]:
    """Return the stored samples of the last hour, by node."""
    query = urllib.parse.urlencode({"query": f"{promql}[1h]", "time": at_seconds})
    found = prometheus.fetch(f"/api/v1/query?{query}").json()["data"]["result"]
    return {
        one["metric"]["node"]: [(float(at), float(value)) for at, value in one["values"]]
        for one in found
    }


async def test_every_interval_is_stored_once_and_no_counter_falls_whenever_the_sink_is_killed(
    broker: Kafka, prometheus: PrometheusApi, start_sink: Callable[..., Sink]
) -> None:
    await make_topics(broker)
    chance = random.Random(20)  # noqa: S311  # moments, not secrets
    # Each node's time begins at a multiple of the interval.
    start_ns = (time.time_ns() // SECOND_NS - TICKS - 60) // INTERVAL_SECONDS * INTERVAL_SECONDS
    start_ns *= SECOND_NS
    settings = {
        "remote_write__url": prometheus.remote_write_url,
        "remote_write__interval_seconds": str(INTERVAL_SECONDS),
        "remote_write__external_labels": f'{{"run": "{RUN}"}}',
        "kafka__group_instance_id": "sink-0",
    }
    for kill in range(KILLS):
        sink = start_sink(REMOTE_WRITE.name, broker, **settings)
        await publish(broker, ticks(start_ns, 1 + 40 * kill, 40))
        await asyncio.sleep(chance.uniform(0.5, 4.0))
        sink.kill()
    sink = start_sink(REMOTE_WRITE.name, broker, **settings)
    await publish(broker, ticks(start_ns, 1 + TICKS, 1))
    whole = TICKS / 2

    def all_sent() -> bool:
        found = prometheus.query(f"{BUSY} >= {whole}")
        return len(found) == len(NODES)

    await asyncio.to_thread(sink.wait_until, all_sent, deadline_seconds=120)
    assert sink.stop(deadline_seconds=120) == 0

    now_seconds = time.time()
    stored = samples(prometheus, BUSY, at_seconds=now_seconds)
    assert stored.keys() == set(NODES)
    for node, found in stored.items():
        by_time = {round(at - start_ns / SECOND_NS, 3): value for at, value in found}
        expected = {0.001: 0.0} | {
            float(tick): tick / 2 for tick in range(INTERVAL_SECONDS, TICKS + 1, INTERVAL_SECONDS)
        }
        assert {at: value for at, value in by_time.items() if at <= TICKS} == expected, node
        assert len(found) == len(by_time), node
    gauges = samples(
        prometheus, f'gpuledger_pod_gpu_busy_ratio{{run="{RUN}"}}', at_seconds=now_seconds
    )
    for found in gauges.values():
        assert len([at for at, _ in found if at <= start_ns / SECOND_NS + TICKS]) == (
            TICKS // INTERVAL_SECONDS
        )
