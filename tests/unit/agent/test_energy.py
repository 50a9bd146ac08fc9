"""Energy and idle draw in a played node's ticks, compared with its GPUs' true draw."""

from collections.abc import Sequence
from typing import Any

import pytest

from gpuledger.keys import NodeId
from gpuledger.records import EnergyMethod, GpuReading
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_agent.sampling import Sampler
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import SimulatedNode, Simulation
from tests.ticks import play, tick_of

EPOCH_NS = 1_795_000_000_000_000_000
MAX_MILLIWATTS = 700_000
COUNTER_CALL = "nvmlDeviceGetTotalEnergyConsumption"
UNEVEN = [0.25, *[0.97, 1.0, 1.06, 0.93] * 8]
TRAIN = {"command": "train", "memory_bytes": 1 << 30, "load": {"busy_ratio": 0.6}}


def scenario(
    *faults: dict[str, Any],
    step: float = 0.1,
    processes: Sequence[dict[str, Any]] = ({},),
    mig: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    gpu = {
        "model": "NVIDIA H100 80GB HBM3",
        "idle_watts": 71.5,
        "energy_step_seconds": step,
        "mig": mig,
    }
    return {
        "name": "energy",
        "nodes": [{"name": "n", "gpus": gpu}],
        "host_processes": [{"node": "n", "gpus": [0], **TRAIN, **one} for one in processes],
        "faults": [{"node": "n", "calls": [COUNTER_CALL], **fault} for fault in faults],
    }


class Played:
    """A node whose GPU is read in every tick."""

    def __init__(self, content: dict[str, Any], lengths: Sequence[float]) -> None:
        self.clock = ManualClock(start_ns=EPOCH_NS)
        simulation = Simulation(parse_scenario(content), epoch_ns=EPOCH_NS, clock=self.clock)
        self.node: SimulatedNode = simulation.node("n")
        ticks = play(self.node, self.clock, lengths)
        # The first one covers a time before the first reading.
        self.samples = [tick.sample for tick in ticks][1:]
        self.board: list[GpuReading] = [sample.gpus[0] for sample in self.samples]

    @property
    def total(self) -> int:
        """The energy in all ticks, in millijoules."""
        return sum(one.energy_millijoules or 0 for one in self.board)

    @property
    def drawn(self) -> list[float]:
        """The true energy in the time that each tick covers, in millijoules."""
        ends_ns = [(one.time_ns - EPOCH_NS, one.interval_ns) for one in self.samples]
        joules = self.node.gpus[0].joules
        return [joules(end_ns - length_ns, end_ns) * 1_000 for end_ns, length_ns in ends_ns]


@pytest.mark.parametrize("step", [0.0, 0.02, 0.1, 0.9])
def test_ticks_add_up_to_a_counter_that_moves_in_steps(step: float) -> None:
    played = Played(scenario(step=step), UNEVEN)
    methods = [one.energy_method for one in played.board]
    # A fast poll and a tick may lie between two steps of the slowest counter.
    assert set(methods) - {EnergyMethod.INTERPOLATED} == {EnergyMethod.COUNTER}
    assert step > 0.5 or EnergyMethod.INTERPOLATED not in methods
    late = step * MAX_MILLIWATTS
    for energy, drawn in zip(played.board[4:], played.drawn[4:], strict=True):
        assert energy.energy_millijoules == pytest.approx(drawn, abs=late + 25_000)
    assert played.total == pytest.approx(sum(played.drawn), abs=late + 50_000)


def test_ticks_between_the_steps_of_a_slow_counter_follow_the_draw_and_add_up_to_it() -> None:
    played = Played(scenario(step=1.5), [0.25] * 126)
    methods = [one.energy_method for one in played.board]
    assert set(methods) == {EnergyMethod.COUNTER, EnergyMethod.INTERPOLATED}
    # The energy since the counter's last step is not known yet.
    assert played.total == pytest.approx(sum(played.drawn), abs=1.5 * MAX_MILLIWATTS)


@pytest.mark.parametrize(
    ("fault", "hidden"),
    [
        ({"kind": "garbage", "end_seconds": 6.5}, {"interpolated"}),
        ({"kind": "frozen", "end_seconds": 12.5}, {"interpolated", "power"}),
    ],
)
def test_ticks_add_up_over_a_time_in_which_the_counter_cannot_be_read(
    fault: dict[str, Any], hidden: set[str]
) -> None:
    played = Played(scenario({**fault, "start_seconds": 5.5}, step=0.0), [1.0] * 20)
    methods = [str(one.energy_method) for one in played.board]
    end = round(fault["end_seconds"])
    assert set(methods[:4]) == set(methods[end + 1 :]) == {"counter"}
    assert set(methods[4 : end + 1]) - {"counter"} == hidden
    each = [one.energy_millijoules or 0 for one in played.board]
    # The mean draw of the last second is used for a time that lies a quarter of a second back.
    assert each[2:] == pytest.approx(played.drawn[2:], rel=0.05)
    assert sum(each) == pytest.approx(sum(played.drawn), rel=0.01)


def test_without_a_moving_counter_ticks_add_up_to_the_draw() -> None:
    played = Played(scenario({"kind": "frozen"}), [1.0] * 60)
    methods = [str(one.energy_method) for one in played.board]
    assert set(methods[3:]) == {"power"}
    assert played.total == pytest.approx(sum(played.drawn), rel=0.005)


def test_reloading_the_driver_loses_the_energy_of_the_time_without_a_driver() -> None:
    reload = {"kind": "driver_reload", "start_seconds": 5, "end_seconds": 9, "calls": []}
    clock = ManualClock(start_ns=EPOCH_NS)
    run = Simulation(parse_scenario(scenario(reload, step=0)), epoch_ns=EPOCH_NS, clock=clock)
    node = run.node("n")
    sampler = Sampler(node=NodeId("default", "n"), procfs=node.procfs)
    board: list[GpuReading] = []
    for seconds in ((0.0, *[1.0] * 4), (5.5, *[1.0] * 5)):
        session = NvmlSession(node.nvml, monotonic_ns=node.clock.monotonic_ns)
        gpus = session.open()
        for length in seconds:
            clock.advance(length)
            if length > 1:
                session.close()
                gpus = session.open()
            if tick := tick_of(sampler, gpus, node.clock):
                board += tick.sample.gpus
        session.close()
    methods = [str(one.energy_method) for one in board]
    assert methods == ["interpolated", *["counter"] * 3, *["power"] * 2, *["counter"] * 4]
    counters = [one.energy_total_millijoules or 0 for one in board]
    assert counters[4] < counters[3]
    energies = [one.energy_millijoules or 0 for one in board]
    # Both ends are shifted by the lag of a tick, a quarter of a second.
    assert sum(energies[6:]) == pytest.approx(counters[-1] - counters[5], abs=0.3 * MAX_MILLIWATTS)


# The draw of a GPU without processes.


def idle_draws(played: Played) -> list[int | None]:
    return [one.idle_draw_milliwatts for one in played.board]


def test_the_idle_draw_is_known_after_the_gpu_was_free_for_long_enough() -> None:
    late = {"start_seconds": 21.5, "end_seconds": 30}
    played = Played(scenario(processes=[late]), [1.0] * 45)
    found = idle_draws(played)
    assert found[:8] == [None] * 8
    known = [one for one in found[9:] if one is not None]
    assert max(known) - min(known) < 500
    # A step of the counter is a hundredth of the time for which a GPU is observed.
    assert known[-1] == pytest.approx(71_500, rel=0.015)


def test_the_idle_draw_of_a_gpu_whose_counter_has_stopped_comes_from_its_power() -> None:
    found = idle_draws(Played(scenario({"kind": "frozen"}, processes=[]), [1.0] * 20))
    assert found[-1] == pytest.approx(71_500, abs=1)


@pytest.mark.parametrize(
    "process",
    [
        {},
        # Present all the time, with almost no kernels.
        {"load": {"busy_ratio": 0.0001, "kernel_seconds": 0.0005}},
        {"kind": "graphics", "memory_visible": False},
    ],
)
def test_the_idle_draw_of_a_gpu_with_a_process_is_not_known(process: dict[str, Any]) -> None:
    assert set(idle_draws(Played(scenario(processes=[process]), [1.0] * 40))) == {None}


def test_a_gpu_whose_processes_come_and_go_does_not_count_as_free() -> None:
    """However short they are: the driver's samples show processes that no list contains."""
    short = [{"start_seconds": n + 0.3, "end_seconds": n + 0.6} for n in range(0, 40, 4)]
    assert set(idle_draws(Played(scenario(processes=short), [1.0] * 40))) == {None}


def test_a_gpu_with_mig_is_free_if_all_its_instances_are() -> None:
    mig = [{"instances": ["1g.10gb", "3g.40gb"]}]
    process = {"instance": 1, "start_seconds": 20.5, "end_seconds": 25}
    played = Played(scenario(mig=mig, processes=[process]), [1.0] * 50)
    found = idle_draws(played)
    assert found[7] is None
    assert found[-1] == pytest.approx(71_500, rel=0.01)
    busy = Played(scenario(mig=mig, processes=[{"instance": 1}]), [1.0] * 30)
    assert set(idle_draws(busy)) == {None}


def test_an_instance_has_no_energy_and_no_idle_draw() -> None:
    content = scenario(mig=[{"instances": ["1g.10gb"]}], processes=[])
    clock = ManualClock(start_ns=EPOCH_NS)
    run = Simulation(parse_scenario(content), epoch_ns=EPOCH_NS, clock=clock)
    tick = play(run.node("n"), clock, [1.0] * 15)[-1]
    board, instance = tick.sample.gpus
    assert board.idle_draw_milliwatts
    assert (instance.energy_millijoules, instance.energy_method) == (None, None)
    assert instance.idle_draw_milliwatts is None
