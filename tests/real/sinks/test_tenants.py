"""A tenant for each namespace: real brokers, and a real Prometheus for each tenant by its header.

What stands for a receiver with tenants hands requests on by the header, as a gateway does.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from aiohttp import ClientSession, web

from gpuledger_sinks.registry import REMOTE_WRITE
from tests.real.sinks.running_sinks import make_topics, publish
from tests.unit.sinks.builders import SECOND_NS, entry, event, pod

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpuledger.records import GpuEvent
    from tests.real.services.kafka import Kafka
    from tests.real.services.prometheus import Prometheus
    from tests.real.sinks.running_sinks import Sink

HEADER: Final = "X-Scope-OrgID"
TICKS: Final = 12
NAMESPACES: Final = ("research", "serving")
NODES: Final = {"node-a": "research", "node-b": "serving"}
HALF: Final = 0.5
"""The busy seconds of a pod in a tick."""
DEVICES: Final = "last_over_time(gpuledger_gpu_utilization_ratio[5m])"
BUSY: Final = "gpuledger_gpu_busy_seconds_total"


def ticks(start_ns: int) -> list[GpuEvent]:
    return [
        event(
            number,
            node=node,
            time_ns=start_ns + number * SECOND_NS,
            entries=[entry(busy_ns=SECOND_NS // 2)],
            pods=[pod(namespace=namespace)],
        )
        for number in range(1, TICKS + 1)
        for node, namespace in NODES.items()
    ]


async def serve(tenants: Mapping[str, Prometheus]) -> tuple[web.AppRunner, str]:
    """Serve an address that hands a request on to its tenant's Prometheus, and refuses others."""

    async def hand_on(request: web.Request) -> web.Response:
        tenant = tenants.get(request.headers.get(HEADER, ""))
        if tenant is None:
            return web.Response(status=401, text="no org id")
        passed = {
            name: value
            for name, value in request.headers.items()
            if name.lower().startswith(("content-", "x-prometheus"))
        }
        async with (
            ClientSession(auto_decompress=False) as session,
            session.post(
                tenant.remote_write_url, data=await request.read(), headers=passed
            ) as answer,
        ):
            told = {
                name: value
                for name, value in answer.headers.items()
                if name.lower().startswith(("content-type", "x-prometheus"))
            }
            return web.Response(status=answer.status, body=await answer.read(), headers=told)

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/api/v1/push", hand_on)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    return runner, f"http://{host}:{port}/api/v1/push"


async def test_each_tenant_has_its_namespaces_pods_and_no_others(
    broker: Kafka, start_prometheus: Callable[..., Prometheus], start_sink: Callable[..., Sink]
) -> None:
    await make_topics(broker)
    tenants = {f"team-{name}": start_prometheus() for name in NAMESPACES}
    tenants["gpus"] = start_prometheus()
    runner, url = await serve(tenants)
    try:
        sink = start_sink(
            REMOTE_WRITE.name,
            broker,
            remote_write__url=url,
            remote_write__interval_seconds="1",
            remote_write__tenants__of_namespace="team-{namespace}",
            remote_write__tenants__shared="gpus",
        )
        await publish(broker, ticks(time.time_ns() // SECOND_NS * SECOND_NS - 60 * SECOND_NS))

        def is_sent() -> bool:
            # Devices are of all.
            if len(tenants["gpus"].query(DEVICES)) != len(NODES):
                return False
            of_pods = [tenants[f"team-{name}"].query(f'{BUSY}{{pod!=""}}') for name in NAMESPACES]
            # The last interval is closed by time alone.
            return all(
                len(found) == 1 and float(found[0]["value"][1]) >= (TICKS - 1) * HALF
                for found in of_pods
            )

        await asyncio.to_thread(sink.wait_until, is_sent, deadline_seconds=60)
        for tenant, prometheus in tenants.items():
            found = prometheus.query('count by (namespace) ({namespace!=""})')
            of = {f"team-{one['metric']['namespace']}" for one in found}
            assert of == ({tenant} if tenant != "gpus" else set())
        assert sink.stop(deadline_seconds=30) == 0
    finally:
        await runner.cleanup()
