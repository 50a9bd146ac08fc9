"""Shares on a simulated node: the agent reads the kubelet's socket and its list of pods."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml
from typing_extensions import override

from gpuledger.clock import NS_PER_SECOND
from gpuledger.runtime import Backoff, Check
from gpuledger.runtime.tasks import run_tasks
from gpuledger_agent.core.raw import CallGroup, SampleCursor
from gpuledger_agent.host.kubelet.allocations import Allocations
from gpuledger_agent.host.kubelet.assignments import DeviceIndex
from gpuledger_agent.host.kubelet.pod_list import NodePods
from gpuledger_agent.host.kubelet.shares.pod_shares import PodShares
from gpuledger_agent.host.node_pods import PodChanges, PodEnds
from gpuledger_agent.settings import AllocationsSettings, KubeletSettings
from gpuledger_agent.source_selection import play
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import Simulation

ROOT = Path(__file__).parents[6]
EPOCH_NS = 1_795_000_000_000_000_000


class SteppedClock(ManualClock):
    """A clock that only `advance` moves; others sleep until it has moved far enough."""

    @override
    async def sleep(self, seconds: float) -> None:
        due_ns = self.monotonic_ns() + round(seconds * NS_PER_SECOND)
        while self.monotonic_ns() < due_ns:  # noqa: ASYNC110  # any advance may be enough
            await asyncio.sleep(0)


def reserved(*pods: dict[str, Any]) -> dict[str, Any]:
    """Return a scenario with a GPU that a pod reserves for others, and these other pods."""
    reservation = {
        "namespace": "kai-resource-reservation",
        "name": "gpu-reservation-0",
        "labels": {"runai-gpu-group": "g1"},
        "containers": [{"name": "resource-reservation", "devices": [{"gpu": 0}]}],
    }
    return {
        "name": "reserved",
        "nodes": [
            {
                "name": "n",
                "ended_pods_listed_seconds": 600,
                "gpus": {"model": "NVIDIA L4", "count": 2},
            }
        ],
        "pods": [
            {
                "node": "n",
                **pod,
                "containers": pod.get("containers") or [{"name": "main", "devices": []}],
            }
            for pod in (reservation, *pods)
        ],
    }


def fraction(name: str, value: str, **lives: float) -> dict[str, Any]:
    return {
        "namespace": "research",
        "name": name,
        "labels": {"runai-gpu-group": "g1"},
        "annotations": {"gpu-fraction": value},
        **lives,
    }


async def shares_at(
    scenario: dict[str, Any], *seconds: float, node: str = "n"
) -> list[dict[str, int | None]]:
    """Return the share of each pod at these times, by an agent that polls every second."""
    clock = SteppedClock(start_ns=EPOCH_NS)
    host = play(Simulation(parse_scenario(scenario), epoch_ns=EPOCH_NS, clock=clock).node(node))
    assert host.kubelet
    assert host.pod_list
    index = DeviceIndex.of(
        [gpu.query(CallGroup.HEALTH, SampleCursor())["facts"] for gpu in host.gpus.open()]
    )
    shares = PodShares(AllocationsSettings(), check=Check(), pod_list_check=None)
    allocations = Allocations(
        kubelet=host.kubelet,
        clock=clock,
        check=Check(),
        backoff=Backoff(),
        settings=KubeletSettings(),
        ends=PodEnds(host.pod_folders),
        have_pods_changed=PodChanges(host.list_pod_folders, host.list_pod_cgroups).have_changed,
        shares=shares,
    )
    pods = NodePods(host.pod_list, [shares], refresh_seconds=30, clock=clock)
    found = []
    async with run_tasks(allocations.run(), pods.run(Check())):
        for second in range(round(max(seconds)) + 1):
            allocations.request_if_due()
            pods.request_if_due()
            await allocations.wait_answer(5)
            for _ in range(20):
                await asyncio.sleep(0)
            if second in seconds:
                found.append({one.pod: one.share_ppm for one in allocations.current(index)})
            clock.advance(1)
    return found


async def test_an_idle_pod_has_its_fraction_of_a_reserved_gpu() -> None:
    scenario = reserved(fraction("a", "0.5"), fraction("b", "0.25"))
    assert await shares_at(scenario, 2) == [{"a": 500_000, "b": 250_000}]


async def test_a_share_starts_within_three_seconds_and_ends_with_the_pod() -> None:
    """Although the kubelet lists the ended pod for a long time."""
    scenario = reserved(
        fraction("a", "0.5"), fraction("b", "0.25", start_seconds=60, end_seconds=90)
    )
    assert await shares_at(scenario, 59, 63, 89, 92) == [
        {"a": 500_000},
        {"a": 500_000, "b": 250_000},
        {"a": 500_000, "b": 250_000},
        {"a": 500_000},
    ]


@pytest.mark.parametrize("ids", ["hami", "gpu-mem"])
async def test_an_annotation_replaces_device_ids_that_only_count_shares(ids: str) -> None:
    scenario = reserved(
        {
            "namespace": "research",
            "name": "a",
            "annotations": {"scheduler.framework.gpushare.allocation": '{"0":{"1":6}}'},
            "containers": [{"name": "main", "devices": [{"gpu": 0, "replica": 0, "ids": ids}]}],
        }
    )
    (found,) = await shares_at(scenario, 2)
    assert [*found] == ["a"]
    assert 200_000 < (found["a"] or 0) < 300_000


@pytest.mark.parametrize(
    ("node", "shares"),
    [
        ("kai-node", {"train-0": 500_000, "notebook-0": 250_000}),
        ("cgpu-node", {"chat-0": 250_000, "embeddings-0": 500_000}),
    ],
)
async def test_the_scenario_of_fractions_has_these_shares(
    node: str, shares: dict[str, int]
) -> None:
    scenario = yaml.safe_load((ROOT / "scenarios" / "fractions.yaml").read_text())
    (found,) = await shares_at(scenario, 2, node=node)
    assert found == pytest.approx(shares, rel=0.1)
