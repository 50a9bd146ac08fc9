"""Real receivers accept the samples of the remote-write sink, and return them."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from gpuledger.records import Category, GpuEvent
from gpuledger.runtime import Readiness
from gpuledger_sinks.registry import REMOTE_WRITE
from gpuledger_sinks.settings import RemoteWriteSettings
from tests.real.sinks.running_sinks import sending
from tests.unit.sinks.builders import (
    NODE,
    SECOND_NS,
    bus,
    committed,
    dead_letters,
    entry,
    event,
    eventually,
    holder,
    place_of,
    pod,
    publish,
    set_back,
)

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from gpuledger.bus.memory import MemoryBus
    from tests.real.services.prometheus import Prometheus, PrometheusApi

AT = place_of(NODE)
BUSY = "gpuledger_pod_gpu_busy_ratio"


def ticks(count: int, *, namespace: str, first_ns: int, **changes: object) -> list[GpuEvent]:
    described = pod(namespace=namespace)
    return [
        event(
            number,
            time_ns=first_ns + number * SECOND_NS,
            pods=[described],
            **({"entries": [entry(busy_ns=250_000_000), entry(Category.IDLE)]} | changes),  # type: ignore[arg-type]  # an event's fields
        )
        for number in range(count)
    ]


def sending_to(on: MemoryBus, to: PrometheusApi) -> AbstractAsyncContextManager[Readiness]:
    return sending(on, RemoteWriteSettings(url=to.remote_write_url, interval_seconds=0))


async def query(of: PrometheusApi, promql: str) -> list[tuple[dict[str, str], float]]:
    found = await asyncio.to_thread(of.query, promql)
    return [(one["metric"], float(one["value"][1])) for one in found]


@pytest.mark.parametrize("receiver", ["prometheus", "victoria_metrics"])
async def test_a_query_by_namespace_and_pod_has_a_result(
    receiver: str, request: pytest.FixtureRequest
) -> None:
    api: PrometheusApi = request.getfixturevalue(receiver)
    on, namespace = bus(), f"query-{receiver.replace('_', '-')}"
    await publish(on, *ticks(5, namespace=namespace, first_ns=time.time_ns() - 5 * SECOND_NS))
    async with sending_to(on, api) as readiness:
        await eventually(lambda: committed(on, REMOTE_WRITE.group, AT) == 5)
        assert readiness.is_ready(), readiness.report()
    assert await dead_letters(on) == []

    promql = f'sum by (namespace, pod) ({BUSY}{{namespace="{namespace}", pod="train-0"}})'
    await asyncio.to_thread(api.await_query, promql)
    assert await query(api, promql) == [({"namespace": namespace, "pod": "train-0"}, 0.25)]
    counted = await query(api, f'count_over_time({BUSY}{{namespace="{namespace}"}}[1m])')
    assert [value for _, value in counted] == [5]


async def test_a_pods_series_end_with_the_first_tick_without_it(
    prometheus: PrometheusApi,
) -> None:
    on, first_ns = bus(), time.time_ns() - 5 * SECOND_NS
    *before, last = ticks(3, namespace="ended", first_ns=first_ns, node="node-ended")
    gone = event(
        3,
        node="node-ended",
        time_ns=last.time_ns + SECOND_NS,
        entries=[entry(Category.IDLE)],
        pods=[],
    )
    await publish(on, *before, last)
    at = place_of("node-ended")
    async with sending_to(on, prometheus):
        await eventually(lambda: committed(on, REMOTE_WRITE.group, at) == 3)
        alive = f'{BUSY}{{namespace="ended"}}'
        await asyncio.to_thread(prometheus.await_query, alive)
        await publish(on, gone)
        await eventually(lambda: committed(on, REMOTE_WRITE.group, at) == 4)

    # Without the marker Prometheus would return the last value for five more minutes.
    assert await query(prometheus, alive) == []
    assert len(await query(prometheus, 'gpuledger_gpu_power_watts{node="node-ended"}')) == 1


async def test_a_query_returns_the_pods_to_which_idle_gpus_are_allocated(
    prometheus: PrometheusApi,
) -> None:
    on, first_ns, node = bus(), time.time_ns() - 5 * SECOND_NS, "node-idle"
    allocated = [holder(), holder("chat-0", namespace="serving")]
    idle = [
        entry(Category.IDLE, busy_ns=busy_ns, allocation=position)
        for busy_ns, position in ((250_000_000, 0), (125_000_000, 1), (500_000_000, None))
    ]
    changes = {
        "entries": [entry(busy_ns=125_000_000), *idle],
        "allocated_to": allocated,
        "node": node,
    }
    *before, last = ticks(3, namespace="idle", first_ns=first_ns, **changes)
    free = {
        "entries": [entry(Category.IDLE, busy_ns=1_000_000_000)],
        "allocated_to": [],
        "node": node,
        "seq": last.seq + 1000,
    }
    (gone,) = ticks(1, namespace="idle", first_ns=last.time_ns + SECOND_NS, **free)
    of_idle = f'gpuledger_category_gpu_busy_ratio{{node="{node}", category="idle"}}'
    by_holder = f"sum by (allocated_namespace, allocated_pod) ({of_idle})"
    at = place_of(node)
    await publish(on, *before, last)
    async with sending_to(on, prometheus):
        await eventually(lambda: committed(on, REMOTE_WRITE.group, at) == 3)
        await asyncio.to_thread(prometheus.await_query, by_holder)
        shared = await query(prometheus, by_holder)
        await publish(on, gone)
        await eventually(lambda: committed(on, REMOTE_WRITE.group, at) == 4)

    assert {labels.get("allocated_pod"): value for labels, value in shared} == {
        "notebook-0": 0.25,
        "chat-0": 0.125,
        None: 0.5,
    }
    assert await query(prometheus, by_holder) == [({}, 1.0)]


async def test_after_a_crash_repeated_samples_do_not_cost_any_new_ones(
    prometheus: PrometheusApi,
) -> None:
    on, first_ns = bus(), time.time_ns() - 20 * SECOND_NS
    events = ticks(8, namespace="replayed", first_ns=first_ns, node="node-replayed")
    at = place_of("node-replayed")
    await publish(on, *events[:5])
    async with sending_to(on, prometheus):
        await eventually(lambda: committed(on, REMOTE_WRITE.group, at) == 5)
    await set_back(on, REMOTE_WRITE.group, {at: 2})
    await publish(on, *events[5:])
    async with sending_to(on, prometheus):
        await eventually(lambda: committed(on, REMOTE_WRITE.group, at) == 8)

    counted = await query(prometheus, f'count_over_time({BUSY}{{namespace="replayed"}}[1m])')
    assert [value for _, value in counted] == [8]


async def test_an_outage_of_the_receiver_loses_no_sample(
    start_prometheus: object, tmp_path: object
) -> None:
    server: Prometheus = start_prometheus()  # type: ignore[operator]  # a factory
    on, first_ns = bus(), time.time_ns() - 20 * SECOND_NS
    events = ticks(8, namespace="outage", first_ns=first_ns)
    await publish(on, *events[:4])
    async with sending_to(on, server) as readiness:
        await eventually(lambda: committed(on, REMOTE_WRITE.group, AT) == 4)
        await asyncio.to_thread(server.kill)
        await publish(on, *events[4:])
        receiver = readiness.check("remote_write.receiver")
        await eventually(lambda: not receiver.is_ok)
        assert committed(on, REMOTE_WRITE.group, AT) == 4
        await asyncio.to_thread(server.start)
        await eventually(lambda: committed(on, REMOTE_WRITE.group, AT) == 8)
        assert receiver.is_ok

    counted = await query(server, f'count_over_time({BUSY}{{namespace="outage"}}[1m])')
    assert [value for _, value in counted] == [8]
