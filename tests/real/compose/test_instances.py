"""The dashboard over MIG-partitioned GPUs: each GPU counts once, each instance has a name."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.scenario.load import load_scenario
from gpuledger_simulator.simulation import Simulation
from gpuledger_sinks.remote_write.active_series import ActiveSeries
from gpuledger_sinks.remote_write.write_client import open_client
from gpuledger_sinks.settings import RemoteWriteSettings
from tests.real.compose.panel_queries import Grafana, Shown
from tests.ticks import event_of, play
from tests.unit.deployment import dashboard
from tests.unit.deployment.components import ROOT
from tests.unit.sinks.remote_write.interval_samples import samples_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gpuledger.records import GpuEvent
    from tests.real.services.prometheus import Prometheus

SCENARIO = load_scenario(ROOT / "scenarios" / "sharing.yaml")
SECONDS = 30
"""Seconds in which no GPU is repartitioned."""
WINDOW = range(SECONDS - 10, SECONDS - 1)


def events(epoch_ns: int) -> Iterator[GpuEvent]:
    for name in (node.name for node in SCENARIO.nodes):
        clock = ManualClock(start_ns=epoch_ns)
        node = Simulation(SCENARIO, epoch_ns=epoch_ns, clock=clock).node(name)
        for tick in play(node, clock, [1.0] * SECONDS):
            yield event_of(tick.sample)


@pytest.fixture
async def shown(
    start_prometheus: Callable[..., Prometheus],
) -> Callable[[str], list[Shown]]:
    """Return the content of a panel once all ticks are in a Prometheus of its own."""
    prometheus, epoch = start_prometheus(), int(time.time()) - SECONDS
    settings, series = RemoteWriteSettings(url=prometheus.remote_write_url), ActiveSeries()
    async with open_client(settings) as client:
        for event in events(epoch * 10**9):
            encoded = series.encode(samples_of(event))
            await client.write(encoded, attempt=0)
    seconds = [epoch + second for second in WINDOW]

    def show(title: str) -> list[Shown]:
        targets = [target for target in dashboard.targets() if target.panel == title]
        grafana = Grafana(prometheus)
        return [one for target in targets for one in grafana.show(target, seconds)]

    return show


async def test_a_gpu_counts_once_and_each_of_its_instances_has_a_name(
    shown: Callable[[str], list[Shown]],
) -> None:
    (counted,), (power,) = shown("GPUs"), shown("Power")
    parts, idle = shown("Power, by pod"), shown("Idle, by GPU")

    assert counted.mean == len(SCENARIO.nodes)
    assert sum(one.mean for one in parts) == pytest.approx(power.mean, rel=0.02)
    names = [one.name for one in idle]
    assert len(set(names)) == len(names)
    assert {name for name in names if "MIG-" not in name} == {
        "default mps-node GPU 0",
        "default accounts-node GPU 0",
    }
    assert sum(name.startswith("default mig-node MIG-") for name in names) == 4
