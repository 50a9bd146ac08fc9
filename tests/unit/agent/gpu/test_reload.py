"""After a reload of the driver its counters start over, and the tick names them."""

from gpuledger_agent.core.gpu_sampler import GpuSampler
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import Simulation
from tests.ticks import query_all, tick_gpu

EPOCH_NS = 1_790_000_000_000_000_000


def test_counters_that_a_reload_reset_are_named_and_lifetime_counters_are_not() -> None:
    ailment = {"start_seconds": 1, "end_seconds": 5, "throttle": "power", "ecc_corrected": 3}
    content = {
        "name": "reload",
        "nodes": [{"name": "n", "gpus": {"model": "NVIDIA H100 80GB HBM3", "ailments": [ailment]}}],
        "host_processes": [{"node": "n", "command": "train", "gpus": [0], "memory_bytes": 1 << 30}],
        "faults": [{"node": "n", "kind": "driver_reload", "start_seconds": 10, "end_seconds": 20}],
    }
    clock = ManualClock(start_ns=EPOCH_NS)
    node = Simulation(parse_scenario(content), epoch_ns=EPOCH_NS, clock=clock).node("n")
    nvml = NvmlSession(node.nvml, monotonic_ns=clock.monotonic_ns)
    clock.advance(9)
    gpu = GpuSampler()
    answers = query_all(nvml.open()[0])
    before = tick_gpu(gpu, answers, now_ns=clock.monotonic_ns())
    clock.advance(12)
    nvml.close()
    gpu.forget()
    answers = query_all(nvml.open()[0])
    after = tick_gpu(gpu, answers, now_ns=clock.monotonic_ns())
    assert before.details.resets is None
    assert after.details.resets == [
        "energy_total_millijoules",
        "power_ns_total",
        "pcie_sent_bytes_total",
        "pcie_received_bytes_total",
        "ecc_corrected_volatile_total",
    ]
    assert after.details.health
    assert after.details.health.ecc_corrected_aggregate_total == 3
    assert after.details.health.ecc_corrected_volatile_total == 0
    assert not after.dropped_readings
