"""Energy against the simulator's truth: working pods pay for it, others pay only idle draw."""

from collections import defaultdict

import pytest

from gpuledger_enricher.join.booking.books import book_tick
from gpuledger_enricher.join.booking.shares import idle_milliwatts
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import Simulation
from tests.ticks import play
from tests.unit.owners import pod_of

EPOCH_NS = 1_795_000_000_000_000_000
MODEL = "NVIDIA H200"
LOADS = {"large": 0.3, "small": 0.1}


def scenario() -> dict[str, object]:
    return {
        "name": "energy",
        "nodes": [{"name": "gpu-a", "gpus": {"model": MODEL, "count": 1}}],
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
                                "load": {"busy_ratio": ratio, "kernel_seconds": 0.005},
                                "memory_bytes": 2**30,
                            }
                        ],
                    }
                ],
            }
            for name, ratio in LOADS.items()
        ],
    }


def test_a_pod_is_booked_what_its_kernels_drew_and_idle_draw_for_their_time() -> None:
    clock = ManualClock(start_ns=EPOCH_NS)
    simulation = Simulation(parse_scenario(scenario()), epoch_ns=EPOCH_NS, clock=clock)
    samples = [tick.sample for tick in play(simulation.node("gpu-a"), clock, [1.0] * 30)]
    joules: dict[str | None, float] = defaultdict(float)
    for sample in samples:
        for row in book_tick(sample):
            for entry in row.entries:
                name = pod_of(entry, sample) or str(entry.category)
                joules[name] += (entry.energy_millijoules or 0) / 1e3

    milliwatts = idle_milliwatts(MODEL)
    assert milliwatts is not None
    watts = milliwatts / 1e3
    start_ns, end_ns = samples[0].time_ns - samples[0].interval_ns, samples[-1].time_ns
    pods = simulation.truth(start_ns, end_ns)
    for pod in pods:
        expected = pod.joules + watts * pod.busy_seconds
        assert joules[pod.uid] == pytest.approx(expected, rel=0.02), pod.pod
    idle_seconds = (end_ns - start_ns) / 1e9 - sum(pod.busy_seconds for pod in pods)
    assert joules["idle"] == pytest.approx(watts * idle_seconds, rel=0.02)
