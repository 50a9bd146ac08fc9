"""The bias of the driver's whole percents: remeasures the table in docs/concepts/accuracy.md."""

from collections import defaultdict
from pathlib import Path
from typing import Final

import pytest

from gpuledger.keys import NodeId
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_agent.sampling import Sampler
from gpuledger_enricher.join.booking.books import book_tick
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import Simulation
from tests.ticks import tick_of
from tests.unit.owners import pod_of

PAGE: Final = (Path(__file__).parents[3] / "docs" / "concepts" / "accuracy.md").read_text()
EPOCH_NS: Final = 1_795_000_000_000_000_000
RUN_SECONDS: Final = 60
BIG_RATIO: Final = 0.5


def scenario(small_ratio: float, kernel_seconds: float) -> dict[str, object]:
    """Return a scenario of two pods that share a GPU, one of them with very little to do."""
    loads = {"big": (BIG_RATIO, 0.005), "small": (small_ratio, kernel_seconds)}
    return {
        "name": "small-users",
        "nodes": [{"name": "gpu-a", "gpus": {"model": "NVIDIA L4", "count": 1}}],
        "pods": [
            {
                "namespace": "research",
                "name": name,
                "node": "gpu-a",
                "containers": [
                    {
                        "name": "main",
                        "processes": [
                            {
                                "command": "python",
                                "gpus": [0],
                                "load": {"busy_ratio": ratio, "kernel_seconds": length},
                                "memory_bytes": 2**30,
                            }
                        ],
                    }
                ],
            }
            for name, (ratio, length) in loads.items()
        ],
    }


def booked_over_true(small_ratio: float, kernel_seconds: float) -> float:
    """Return the small pod's booked time divided by the time that its kernels used."""
    clock = ManualClock(start_ns=EPOCH_NS)
    load = scenario(small_ratio, kernel_seconds)
    simulation = Simulation(parse_scenario(load), epoch_ns=EPOCH_NS, clock=clock)
    node = simulation.node("gpu-a")
    sampler, gpus = (
        Sampler(node=NodeId("default", node.name), procfs=node.procfs),
        NvmlSession(node.nvml, monotonic_ns=node.clock.monotonic_ns).open(),
    )
    samples = []
    for _ in range(RUN_SECONDS + 2):
        clock.advance(1.0)
        if tick := tick_of(sampler, gpus, node.clock):
            samples.append(tick.sample)
    booked: dict[str | None, float] = defaultdict(float)
    for sample in samples:
        for row in book_tick(sample):
            for entry in row.entries:
                booked[pod_of(entry, sample)] += (entry.busy_ns or 0) / 1e9
    start_ns = samples[0].time_ns - samples[0].interval_ns
    truth = {one.pod: one for one in simulation.truth(start_ns, samples[-1].time_ns)}
    return booked[truth["small"].uid] / truth["small"].busy_seconds


def table() -> list[tuple[float, float, float]]:
    """Return the page's rows: the true share, the kernels' length, and booked over true."""
    text = PAGE.partition("<!-- small:begin -->\n")[2].partition("<!-- small:end -->")[0]
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()
    ]
    lengths = [float(cell.split()[2]) / 1000 for cell in head[1:]]
    return [
        (float(row[0].removesuffix(" %")) / 100, length, float(cell))
        for row in rows
        for length, cell in zip(lengths, row[1:], strict=True)
    ]


@pytest.mark.parametrize(("small_ratio", "kernel_seconds", "reported"), table())
def test_the_page_shows_the_bias_of_whole_percents_for_a_small_user(
    small_ratio: float, kernel_seconds: float, reported: float
) -> None:
    assert booked_over_true(small_ratio, kernel_seconds) == pytest.approx(reported, abs=0.0051)
