"""Nodes whose wall clocks are set, before a real Prometheus and a real Alertmanager."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from gpuledger_sinks.registry import REMOTE_WRITE
from gpuledger_sinks.settings import RemoteWriteSettings
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

    from tests.real.services.prometheus import Prometheus, PrometheusApi

WINDOW = CONFIG + "storage: {tsdb: {out_of_order_time_window: 2h}}\n"
# Prometheus rejects samples an hour behind its newest series, even those of a new series.
OUT_OF_BOUNDS = {"an hour behind until it is set right": {"out_of_order": 7}}
UTILIZATION = "gpuledger_gpu_utilization_ratio"


async def send(case: str, to: PrometheusApi, *, node: str) -> tuple[float, Counter[str]]:
    """Return how many of a case's ticks the receiver has, and why the others were rejected."""
    on, at, start_ns = bus(), place_of(node), time.time_ns() - (COUNT + 1) * SECOND_NS
    ticks = CASES[case]
    settings = RemoteWriteSettings(
        # Only 1.0 reports which tick is rejected.
        url=to.remote_write_url,
        protocol="1.0",
        interval_seconds=0,
    )
    async with sending(on, settings):
        await publish(
            on, *(reported.event([entry()], node=node, start_ns=start_ns) for reported in ticks)
        )
        await eventually(
            lambda: committed(on, REMOTE_WRITE.group, at) == len(ticks), within_seconds=120
        )
    promql = f'count_over_time({UTILIZATION}{{node="{node}"}}[3h])'
    await asyncio.to_thread(to.await_query, promql)
    (found,) = await asyncio.to_thread(to.query, promql)
    return float(found["value"][1]), Counter(one.reason for one in await dead_letters(on))


@pytest.mark.parametrize("case", CASES)
async def test_everything_that_prometheus_can_accept_reaches_it(
    case: str, prometheus: PrometheusApi
) -> None:
    node = f"without-window-{list(CASES).index(case)}"
    await send("never set", prometheus, node=f"beside-{node}")
    lost = OUT_OF_BOUNDS.get(case, WITHOUT_WINDOW[case])
    stored, records = await send(case, prometheus, node=node)
    assert (stored, records) == (len(CASES[case]) - sum(lost.values()), lost)


async def test_with_a_window_prometheus_accepts_late_samples_too(
    start_prometheus: Callable[..., Prometheus],
) -> None:
    server = start_prometheus(config=WINDOW)
    for number, case in enumerate(CASES):
        lost = dict(WITHOUT_WINDOW[case])
        lost.pop("out_of_order", None)
        stored, records = await send(case, server, node=f"with-window-{number}")
        assert (stored, records) == (len(CASES[case]) - sum(lost.values()), lost), case
