"""The draw of played GPUs, its owners, and the forms in which drivers report it."""

import pynvml
import pytest

from gpuledger.errors import UserError
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import SimulatedNode, Simulation
from tests.unit.simulator.conftest import EPOCH_NS

SECOND = 1_000_000_000
ENERGY, POWER = "nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetPowerUsage"
BOARD = {"model": "NVIDIA A100-SXM4-80GB", "idle_watts": 80, "max_watts": 400}


def simulate(clock: ManualClock, **group: object) -> Simulation:
    """Return a run with pods `light` and `sleeper`, and a host process from second 4 to 8."""

    def pod(name: str, load: dict[str, float], **times: float) -> dict[str, object]:
        process = {"command": name, "gpus": [0], "memory_bytes": 1 << 30, "load": load, **times}
        containers = [{"name": "main", "processes": [process]}]
        return {"namespace": "a", "name": name, "node": "n", "containers": containers}

    content = {
        "name": "energy",
        "nodes": [{"name": "n", "gpus": {**BOARD, **group}}],
        "pods": [
            pod("light", {"busy_ratio": 0.5, "draw_ratio": 0.25}, start_seconds=1),
            # Its first kernel is far in the future.
            pod("sleeper", {"busy_ratio": 0.001, "kernel_seconds": 0.0005}, start_seconds=2),
        ],
        "host_processes": [
            {
                "node": "n",
                "command": "burn",
                "gpus": [0],
                "memory_bytes": 1 << 30,
                "start_seconds": 4,
                "end_seconds": 8,
            }
        ],
    }
    return Simulation(parse_scenario(content), epoch_ns=EPOCH_NS, clock=clock)


def opened(node: SimulatedNode) -> dict[str, int | None]:
    """Return the energy counter and the power that a node's driver reports; `None` if absent."""
    node.nvml.nvmlInit()
    handle = node.nvml.nvmlDeviceGetHandleByIndex(0)
    found: dict[str, int | None] = {}
    for name in (ENERGY, POWER):
        try:
            found[name] = getattr(node.nvml, name)(handle)
        except pynvml.NVMLError_NotSupported:
            found[name] = None
    return found


@pytest.mark.parametrize("context_watts", [0, 40])
@pytest.mark.parametrize("span", [(0, 1), (0, 12), (3, 9), (4.5, 5.25)])
def test_idle_contexts_and_kernels_sum_to_the_draw_of_the_gpu(
    clock: ManualClock, context_watts: float, span: tuple[float, float]
) -> None:
    simulation = simulate(clock, context_watts=context_watts)
    start, end = (round(seconds * SECOND) for seconds in span)
    pods = simulation.truth(EPOCH_NS + start, EPOCH_NS + end)
    host = simulation.host_truth(EPOCH_NS + start, EPOCH_NS + end)
    parts = host.joules + host.context_joules
    parts += sum(pod.joules + pod.context_joules for pod in pods)
    idle = 80 * (end - start) / SECOND
    assert idle + parts == pytest.approx(simulation.nodes["n"].gpus[0].joules(start, end))


def test_kernels_draw_the_ratio_of_their_load_of_the_maximum_beyond_idle(
    clock: ManualClock,
) -> None:
    simulation = simulate(clock, context_watts=40)
    light, sleeper = simulation.truth(EPOCH_NS, EPOCH_NS + 12 * SECOND)
    host = simulation.host_truth(EPOCH_NS, EPOCH_NS + 12 * SECOND)
    assert light.joules == pytest.approx(light.busy_seconds * 0.25 * (400 - 80 - 40))
    assert host.joules == pytest.approx(host.busy_seconds * (400 - 80 - 40))
    assert sleeper.joules == pytest.approx(sleeper.busy_seconds * (400 - 80 - 40))


def test_the_draw_of_contexts_is_divided_equally_among_the_current_processes(
    clock: ManualClock,
) -> None:
    simulation = simulate(clock, context_watts=60)
    light, sleeper = simulation.truth(EPOCH_NS, EPOCH_NS + 10 * SECOND)
    host = simulation.host_truth(EPOCH_NS, EPOCH_NS + 10 * SECOND)
    # Only process for a second; two from 2 to 4 and from 8 to 10; three from 4 to 8.
    assert light.context_joules == pytest.approx(60 * (1 + 4 / 2 + 4 / 3))
    assert sleeper.context_joules == pytest.approx(60 * (4 / 2 + 4 / 3))
    assert host.context_joules == pytest.approx(60 * 4 / 3)


def test_a_context_draws_before_any_kernel_runs(clock: ManualClock) -> None:
    board = {"nodes": [{"name": "n", "gpus": {**BOARD, "context_watts": 50}}], "name": "one"}
    load = {"busy_ratio": 0.001, "kernel_seconds": 0.0005, "draw_ratio": 0}
    process = {"command": "p", "gpus": [0], "memory_bytes": 1, "node": "n", "load": load}
    content = {**board, "host_processes": [{**process, "end_seconds": 3}]}
    gpu = Simulation(parse_scenario(content), epoch_ns=EPOCH_NS, clock=clock).nodes["n"].gpus[0]
    assert gpu.joules(0, 3 * SECOND) == 3 * (80 + 50)
    assert gpu.joules(3 * SECOND, 6 * SECOND) == 3 * 80


def test_a_gpu_cannot_draw_more_than_its_maximum(clock: ManualClock) -> None:
    with pytest.raises(UserError, match="context_watts"):
        simulate(clock, context_watts=321)


def test_the_idle_draw_of_the_scenario_overrides_that_of_the_product(clock: ManualClock) -> None:
    # Half as much again as in the product's table.
    simulation = simulate(clock, idle_watts=82.5)
    gpu = simulation.nodes["n"].gpus[0]
    assert gpu.joules(0, SECOND) == 82.5
    assert opened(simulation.nodes["n"])[POWER] == 82_500


def test_an_energy_counter_may_rise_be_frozen_or_be_absent(clock: ManualClock) -> None:
    def reported(counter: str) -> tuple[int | None, int | None]:
        here = ManualClock(start_ns=EPOCH_NS)
        node = simulate(here, energy_counter=counter).nodes["n"]
        first = opened(node)[ENERGY]
        here.advance(10)
        return first, opened(node)[ENERGY]

    first, later = reported("counting")
    assert first is not None
    assert later is not None
    assert later > first
    assert reported("frozen") == (first, first)
    assert reported("absent") == (None, None)


def test_power_may_be_the_mean_of_25_ms_of_each_100(clock: ManualClock) -> None:
    node = simulate(clock, power_mean="quarter").nodes["n"]
    clock.advance(5.2)
    shown = []
    for _ in range(20):
        clock.advance(0.05)
        now_ns = round((clock.time_ns() - EPOCH_NS) / 50_000_000) * 50_000_000
        end_ns = now_ns - now_ns % 100_000_000
        joules = node.gpus[0].joules(end_ns - 25_000_000, end_ns)
        shown.append((opened(node)[POWER], round(joules * 1000 / 0.025)))
    assert [reported for reported, _ in shown] == [true for _, true in shown]
    # It is not the mean over the time in between.
    assert len({reported for reported, _ in shown}) > 5
