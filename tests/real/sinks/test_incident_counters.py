"""Counters of incidents on real brokers and a strict Prometheus, with kills of the sink."""

from __future__ import annotations

import asyncio
import os
import random
import time
import urllib.parse
from typing import TYPE_CHECKING, Final

from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Message
from gpuledger.codec import encode
from gpuledger.keys import node_key
from gpuledger.settings import KafkaSettings
from gpuledger.topics import partition_of_node
from gpuledger_sinks.registry import REMOTE_WRITE
from tests.default_topics import ATTRIBUTED_INCIDENTS
from tests.real import remote_write_page
from tests.real.sinks.running_sinks import NODES, make_topics, publish
from tests.unit.sinks.builders import GPU, SECOND_NS, entry, event
from tests.unit.sinks.remote_write.happened import attributed, incident

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpuledger.records import Incident
    from tests.real.services.kafka import Kafka
    from tests.real.services.prometheus import PrometheusApi
    from tests.real.sinks.running_sinks import Sink

KILLS: Final = int(os.environ.get("TEST_KILLS", "6"))
"""How often the sink is killed; `TEST_KILLS=50` takes five minutes."""
TICKS_A_KILL: Final = 20
NODE: Final = NODES[0]
XIDS: Final = (31, 48, 79, 9_999)


async def publish_incidents(to: Kafka, incidents: Sequence[Incident]) -> None:
    settings = KafkaSettings(bootstrap_servers=to.bootstrap_servers)
    async with KafkaBus(settings).producer() as producer:
        for one in incidents:
            key = node_key(one)
            at = partition_of_node(key, partitions=ATTRIBUTED_INCIDENTS.partitions)
            message = Message(
                key=key.encode(),
                value=encode(attributed(one)),
                timestamp_ms=one.time_ns // 10**6,
            )
            await producer.publish(ATTRIBUTED_INCIDENTS.name, at, [message])


def stored(prometheus: PrometheusApi, selector: str, label: str) -> dict[str, list[float]]:
    """Return the stored values of the last hour, by a label, in chronological order."""
    query = urllib.parse.urlencode({"query": f"{selector}[1h]", "time": time.time()})
    found = prometheus.fetch(f"/api/v1/query?{query}").json()["data"]["result"]
    return {
        one["metric"][label]: [float(value) for _, value in one["values"] if value != "NaN"]
        for one in found
    }


async def test_every_incident_is_counted_once_and_no_counter_falls_whenever_the_sink_is_killed(
    broker: Kafka, prometheus: PrometheusApi, start_sink: Callable[..., Sink]
) -> None:
    await make_topics(broker)
    chance = random.Random(31)  # noqa: S311  # moments, not secrets
    run = "incidents"
    # The incidents are in the past, so that the query returns the last value.
    start_ns = time.time_ns() - (TICKS_A_KILL * (KILLS + 1) + 30) * SECOND_NS
    settings = {
        "remote_write__url": prometheus.remote_write_url,
        "remote_write__interval_seconds": "1",
        "remote_write__health_interval_seconds": "2",
        "remote_write__external_labels": f'{{"run": "{run}"}}',
        "kafka__group_instance_id": "sink-0",
    }
    happened: dict[int, int] = dict.fromkeys(XIDS, 0)
    number = 0
    sink = start_sink(REMOTE_WRITE.name, broker, **settings)
    for kill in range(KILLS + 1):
        for _ in range(TICKS_A_KILL):
            number += 1
            time_ns = start_ns + number * SECOND_NS
            await publish(broker, [event(number, node=NODE, time_ns=time_ns, entries=[entry()])])
            if chance.random() < 0.4:
                xid = chance.choice(XIDS)
                happened[xid] += 1
                one = incident(node=NODE, xid=xid, time_ns=time_ns + chance.randrange(SECOND_NS))
                await publish_incidents(broker, [one] * chance.choice([1, 1, 2]))
            await asyncio.sleep(chance.uniform(0, 0.1))
        if kill < KILLS:
            await asyncio.sleep(chance.uniform(0.5, 4.0))
            sink.kill()
            sink = start_sink(REMOTE_WRITE.name, broker, **settings)
    of_run = f'{{run="{run}", node="{NODE}", gpu_uuid="{GPU}"'
    by_xid = f"gpuledger_gpu_xid_errors_total{of_run}}}"
    by_kind = f"gpuledger_gpu_incidents_total{of_run}}}"
    expected = {"other" if xid == 9_999 else str(xid): count for xid, count in happened.items()}

    async def run_until_all_are_reported() -> None:
        nonlocal number
        while True:
            number += 1
            time_ns = start_ns + number * SECOND_NS
            await publish(broker, [event(number, node=NODE, time_ns=time_ns, entries=[entry()])])
            found = await asyncio.to_thread(stored, prometheus, by_xid, "xid")
            if {xid: values[-1] for xid, values in found.items() if values} == expected:
                return
            await asyncio.sleep(0.2)

    async with asyncio.timeout(120):
        await run_until_all_are_reported()
    assert sink.stop(deadline_seconds=120) == 0

    for code, values in stored(prometheus, by_xid, "xid").items():
        assert values == sorted(values), code
        # It starts at 0, so a receiver sees the whole count as an increase.
        assert (values[0], values[-1]) == (0, expected[code])
    kinds = stored(prometheus, by_kind, "kind")
    assert kinds["xid"] == sorted(kinds["xid"])
    assert (kinds["xid"][0], kinds["xid"][-1]) == (0, sum(expected.values()))
    assert set(kinds["gpu_lost"]) == {0}


async def test_the_alerts_of_the_page_fire_on_their_incidents(
    broker: Kafka, prometheus: PrometheusApi, start_sink: Callable[..., Sink]
) -> None:
    await make_topics(broker)
    settings = {
        "remote_write__url": prometheus.remote_write_url,
        "remote_write__interval_seconds": "1",
        "remote_write__health_interval_seconds": "1",
        "remote_write__external_labels": '{"run": "alerts"}',
    }
    node, start_ns = NODES[1], time.time_ns() - 20 * SECOND_NS

    async def tick(*numbers: int) -> None:
        ticks = [
            event(number, node=node, time_ns=start_ns + number * SECOND_NS, entries=[entry()])
            for number in numbers
        ]
        await publish(broker, ticks)

    requested = remote_write_page.alerts()
    about = {
        "A GPU fell off the bus": [incident(node=node, xid=79, time_ns=start_ns + 6 * SECOND_NS)],
        "Any XID of a GPU": [incident(node=node, xid=31, time_ns=start_ns + 6 * SECOND_NS)],
        "Repeated XIDs": [
            incident(node=node, xid=31, time_ns=start_ns + 6 * SECOND_NS + number)
            for number in range(1, 9)
        ],
        "Memory errors rise": [
            incident(node=node, kind="ecc_uncorrected", time_ns=start_ns + 6 * SECOND_NS)
        ],
    }
    sink = start_sink(REMOTE_WRITE.name, broker, **settings)
    await tick(*range(1, 6))
    alive = f'gpuledger_gpu_incidents_total{{run="alerts", node="{node}"}}'
    await asyncio.to_thread(prometheus.await_query, alive)
    for expression in map(requested.__getitem__, about):
        assert node not in {one["metric"].get("node") for one in prometheus.query(expression)}
    for incidents in about.values():
        await publish_incidents(broker, incidents)
    await tick(*range(6, 12))

    def fires(expression: str) -> bool:
        return node in {one["metric"].get("node") for one in prometheus.query(expression)}

    async with asyncio.timeout(120):
        number = 12
        while not all(fires(requested[what]) for what in about):
            await tick(number)
            number += 1
            await asyncio.sleep(0.3)
    assert sink.stop(deadline_seconds=120) == 0
