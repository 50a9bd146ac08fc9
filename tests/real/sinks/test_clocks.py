"""Nodes whose wall clocks are set, before a real Prometheus and a real Alertmanager."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from gpuledger.records import Account
from gpuledger_sinks.registry import ALERTS, REMOTE_WRITE
from gpuledger_sinks.settings import AlertsSettings, BusyWithoutPodSettings, RemoteWriteSettings
from tests.real.services.prometheus import CONFIG
from tests.real.sinks.running_sinks import sending
from tests.unit.sinks.builders import (
    SECOND_NS,
    bus,
    committed,
    dead_letters,
    entry,
    eventually,
    place_of,
    publish,
)
from tests.unit.sinks.clocks import CASES, COUNT
from tests.unit.sinks.test_clocks import WITHOUT_WINDOW

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuledger.records import GpuEvent
    from tests.real.services.alertmanager import AlertmanagerApi
    from tests.real.services.prometheus import Prometheus, PrometheusApi

WINDOW = CONFIG + "storage: {tsdb: {out_of_order_time_window: 2h}}\n"
# Beside other series Prometheus takes nothing that is an hour behind them, also not of a new one.
OUT_OF_BOUNDS = {"an hour behind until it is set right": {"out_of_order": 7}}
UTILIZATION = "gpuledger_gpu_utilization_ratio"


async def send(case: str, to: PrometheusApi, *, node: str) -> tuple[float, Counter[str]]:
    """Return how many ticks of a case the receiver has, and why others were put aside."""
    on, at, start_ns = bus(), place_of(node), time.time_ns() - (COUNT + 1) * SECOND_NS
    ticks = CASES[case]
    settings = RemoteWriteSettings(
        # Which tick is refused is said in 1.0 alone.
        url=to.remote_write_url,
        protocol="1.0",
        interval_seconds=0,
    )
    async with sending(on, settings):
        await publish(on, *(told.event([entry()], node=node, start_ns=start_ns) for told in ticks))
        await eventually(
            lambda: committed(on, REMOTE_WRITE.group, at) == len(ticks), within_seconds=60
        )
    promql = f'count_over_time({UTILIZATION}{{node="{node}"}}[3h])'
    await asyncio.to_thread(to.await_query, promql)
    (found,) = await asyncio.to_thread(to.query, promql)
    return float(found["value"][1]), Counter(one.reason for one in await dead_letters(on))


@pytest.mark.parametrize("case", CASES)
async def test_all_that_prometheus_can_take_reaches_it(
    case: str, prometheus: PrometheusApi
) -> None:
    node = f"without-window-{list(CASES).index(case)}"
    await send("never set", prometheus, node=f"beside-{node}")
    lost = OUT_OF_BOUNDS.get(case, WITHOUT_WINDOW[case])
    stored, letters = await send(case, prometheus, node=node)
    assert (stored, letters) == (len(CASES[case]) - sum(lost.values()), lost)


async def test_with_a_window_prometheus_takes_what_is_behind_too(
    start_prometheus: Callable[..., Prometheus],
) -> None:
    server = start_prometheus(config=WINDOW)
    for number, case in enumerate(CASES):
        lost = dict(WITHOUT_WINDOW[case])
        lost.pop("out_of_order", None)
        stored, letters = await send(case, server, node=f"with-window-{number}")
        assert (stored, letters) == (len(CASES[case]) - sum(lost.values()), lost), case


@pytest.mark.parametrize("case", CASES)
async def test_an_alert_fires_and_is_resolved_whatever_the_clock_shows(
    case: str, alertmanager: AlertmanagerApi
) -> None:
    on, node = bus(), f"clock-{list(CASES).index(case)}"
    at, start_ns = place_of(node), time.time_ns() - (COUNT + 1) * SECOND_NS
    settings = AlertsSettings(
        urls=[alertmanager.url], busy_without_pod=BusyWithoutPodSettings(for_seconds=5.0)
    )

    def standing() -> list[str]:
        found = [one for one in alertmanager.alerts() if one["labels"].get("node") == node]
        return [one["status"]["state"] for one in found]

    def events(account: Account, *seconds: int) -> list[GpuEvent]:
        return [
            told.event([entry(account)], node=node, start_ns=start_ns)
            for told in CASES[case]
            if told.arrives in range(*seconds)
        ]

    busy, idle = events(Account.HOST, 30), events(Account.IDLE, 30, COUNT)
    async with sending(on, settings):
        await publish(on, *busy)
        await eventually(lambda: committed(on, ALERTS.group, at) == len(busy))
        assert await asyncio.to_thread(standing) == ["active"]
        await publish(on, *idle)
        count = len(busy) + len(idle)
        await eventually(lambda: committed(on, ALERTS.group, at) == count)
        # Only alerts that have not ended are listed.
        assert await asyncio.to_thread(standing) == []
