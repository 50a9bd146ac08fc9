"""A process that uses its GPU only for parts of its life, in NVML and in `/proc`."""

import pynvml
import pytest

from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import SimulatedNode, Simulation
from tests.unit.simulator.conftest import EPOCH_NS

SECOND_NS = 10**9


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start_ns=EPOCH_NS)


@pytest.fixture
def node(clock: ManualClock) -> SimulatedNode:
    """Return a node with a process from 1 s to 8 s, on the GPU in 3-3.5 s, 5-5.5 s and 7-7.5 s."""
    content = {
        "name": "visits",
        "nodes": [{"name": "n", "gpus": {"model": "NVIDIA L4", "accounting": "v2"}}],
        "host_processes": [
            {
                "node": "n",
                "command": "notebook",
                "gpus": [0],
                "memory_bytes": 1 << 30,
                "load": {"busy_ratio": 0.6},
                "start_seconds": 1,
                "end_seconds": 8,
                "visits": {
                    "first_seconds": 2, "length_seconds": 0.5, "count": 3, "every_seconds": 2,
                },
            }
        ],
    }  # fmt: skip
    node = Simulation(parse_scenario(content), epoch_ns=EPOCH_NS, clock=clock).node("n")
    node.nvml.nvmlInit()
    return node


def test_a_process_is_listed_and_uses_memory_only_during_visits_but_keeps_running(
    node: SimulatedNode, clock: ManualClock
) -> None:
    nvml, handle = node.nvml, node.nvml.nvmlDeviceGetHandleByIndex(0)
    (process,) = node.gpus[0].processes
    idle = nvml.nvmlDeviceGetMemoryInfo(handle).used
    listed, held, runs = [], [], []
    for number in range(90):
        time = number / 10
        pids = [one.pid for one in nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)]
        listed += [time] if pids == [process.pid] else []
        held += [time] if nvml.nvmlDeviceGetMemoryInfo(handle).used > idle else []
        try:
            node.procfs.read(f"/proc/{process.pid}/stat")
            runs.append(time)
        except FileNotFoundError:
            pass
        clock.advance(0.1)
    expected = [begin + tenth / 10 for begin in (3, 5, 7) for tenth in range(5)]
    assert listed == held == pytest.approx(expected)
    assert runs == pytest.approx([1 + tenth / 10 for tenth in range(70)])


def test_each_visit_has_an_account_and_the_latest_is_returned(
    node: SimulatedNode, clock: ManualClock
) -> None:
    nvml, handle = node.nvml, node.nvml.nvmlDeviceGetHandleByIndex(0)
    (process,) = node.gpus[0].processes
    assert nvml.nvmlDeviceGetAccountingPids(handle) == []
    clock.advance(2.5)
    with pytest.raises(pynvml.NVMLError_NotFound):
        nvml.nvmlDeviceGetAccountingStats(handle, process.pid)
    reported = []
    for seconds in (0.7, 0.8, 1.5, 4.0):
        clock.advance(seconds)
        stats = nvml.nvmlDeviceGetAccountingStats_v2(handle, process.pid)
        start_ns = stats.startTime * 1000 - EPOCH_NS
        reported.append((round(start_ns / SECOND_NS, 3), stats.time, stats.isRunning))
        end_ns = min(start_ns + SECOND_NS // 2, clock.time_ns() - EPOCH_NS)
        busy_percent = 100 * node.gpus[0].device_busy_ns(start_ns, end_ns) / (end_ns - start_ns)
        assert stats.sumGpuUtil / stats.sampleCount / 100 == pytest.approx(busy_percent, abs=0.02)
    assert reported == [(3.0, 0, 1), (3.0, 500, 0), (5.0, 500, 0), (7.0, 500, 0)]


def test_the_truth_counts_memory_by_visits(node: SimulatedNode, clock: ManualClock) -> None:
    clock.advance(9)
    (process,) = node.gpus[0].processes
    assert process.on_gpu_ns(0, 9 * SECOND_NS) == 1.5 * SECOND_NS
    assert process.on_gpu_ns(3_250_000_000, 5_250_000_000) == SECOND_NS // 2
