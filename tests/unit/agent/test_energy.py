"""Energy and idle draw of a played node's ticks, against what its boards drew."""

from collections.abc import Sequence
from typing import Any

import pytest

from agent.gpu.nvidia.session import NvmlSession
from agent.sampling import Sampler
from gpuledger.keys import NodeId
from gpuledger.records import EnergyMethod, GpuReading
from simulator.clock import ManualClock
from simulator.scenario.load import parse_scenario
from simulator.simulation import SimulatedNode, Simulation
from tests.ticks import play, tick_of

EPOCH_NS = 1_795_000_000_000_000_000
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
    """A node of which the boards are read tick by tick."""

    def __init__(self, content: dict[str, Any], lengths: Sequence[float]) -> None:
        self.clock = ManualClock(start_ns=EPOCH_NS)
        simulation = Simulation(parse_scenario(content), epoch_ns=EPOCH_NS, clock=self.clock)
        self.node: SimulatedNode = simulation.node("n")
        library = self.node.nvml
        library.nvmlInit()
        self._first: int = library.nvmlDeviceGetTotalEnergyConsumption(
            library.nvmlDeviceGetHandleByIndex(0)
        )
        ticks = play(self.node, self.clock, lengths)
        self.board: list[GpuReading] = [tick.sample.gpus[0] for tick in ticks]

    @property
    def total(self) -> int:
        """All that ticks have, in millijoules."""
        return sum(one.energy_millijoules or 0 for one in self.board)

    @property
    def drawn(self) -> float:
        """All that was drawn, in millijoules."""
        return self.node.gpus[0].joules(0, self.clock.time_ns() - EPOCH_NS) * 1_000

    @property
    def risen(self) -> int:
        """By how much the counter rose, in millijoules."""
        return (self.board[-1].energy_total_millijoules or 0) - self._first


@pytest.mark.parametrize("step", [0.0, 0.02, 0.1, 0.9])
def test_ticks_add_up_to_a_counter_that_moves_in_steps(step: float) -> None:
    played = Played(scenario(step=step), UNEVEN)
    methods = [one.energy_method for one in played.board]
    # A first tick of a quarter of a second may lie between two steps.
    assert set(methods[1:]) == {EnergyMethod.COUNTER}
    assert played.total == played.risen


def test_ticks_between_the_steps_of_a_slow_counter_have_the_draw_and_add_up_to_it() -> None:
    played = Played(scenario(step=1.5), [0.25] * 126)
    methods = [one.energy_method for one in played.board]
    assert set(methods) == {EnergyMethod.COUNTER, EnergyMethod.INTERPOLATED}
    assert methods.count(EnergyMethod.COUNTER) == 21
    # What the draw says of the end of the time is not known yet.
    assert 0 <= played.total - played.risen < 1.5 * 700_000


@pytest.mark.parametrize(
    ("fault", "hidden"),
    [
        ({"kind": "garbage", "end_seconds": 6.5}, ["interpolated"]),
        # What is frozen is the first answer of that time.
        (
            {"kind": "frozen", "end_seconds": 12.5},
            ["counter", "interpolated", "interpolated", *["power"] * 4],
        ),
    ],
)
def test_ticks_add_up_over_a_time_in_which_the_counter_does_not_show(
    fault: dict[str, Any], hidden: list[str]
) -> None:
    played = Played(scenario({**fault, "start_seconds": 5.5}, step=0.0), [1.0] * 20)
    methods = [str(one.energy_method) for one in played.board]
    assert methods == [*["counter"] * 5, *hidden, *["counter"] * (15 - len(hidden))]
    assert played.total == played.risen
    each = [one.energy_millijoules or 0 for one in played.board]
    truth = [played.node.gpus[0].joules(n * 10**9, (n + 1) * 10**9) * 1_000 for n in range(20)]
    # The draw is said in whole milliwatts.
    assert each == pytest.approx(truth, abs=5)


def test_without_a_counter_that_moves_ticks_add_up_to_the_draw() -> None:
    played = Played(scenario({"kind": "frozen"}), [1.0] * 60)
    assert [str(one.energy_method) for one in played.board] == [
        *["interpolated"] * 2,
        *["power"] * 58,
    ]
    # The draw is said in whole milliwatts.
    assert played.total == pytest.approx(played.drawn, abs=60)


def test_a_driver_that_was_loaded_anew_costs_the_time_in_which_it_was_gone() -> None:
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
    assert methods == [*["counter"] * 4, "power", *["counter"] * 5]
    counters = [one.energy_total_millijoules or 0 for one in board]
    assert counters[4] < counters[3]
    energies = [one.energy_millijoules or 0 for one in board]
    assert sum(energies[5:]) == counters[-1] - counters[4]


# What a board draws without a process.


def idle_draws(played: Played) -> list[int | None]:
    return [one.idle_draw_milliwatts for one in played.board]


def test_the_idle_draw_is_known_once_the_board_was_free_for_long_enough() -> None:
    late = {"start_seconds": 21.5, "end_seconds": 30}
    played = Played(scenario(processes=[late]), [1.0] * 45)
    found = idle_draws(played)
    assert found[:9] == [None] * 9
    assert len(set(found[9:])) == 1
    assert found[-1] == pytest.approx(71_500, rel=0.01)


def test_the_idle_draw_of_a_board_whose_counter_has_stopped_is_by_its_draw() -> None:
    found = idle_draws(Played(scenario({"kind": "frozen"}, processes=[]), [1.0] * 20))
    assert found[-1] == 71_500


@pytest.mark.parametrize(
    "process",
    [
        {},
        # There all the time, with hardly a kernel.
        {"load": {"busy_ratio": 0.0001, "kernel_seconds": 0.0005}},
        {"kind": "graphics", "memory_visible": False},
    ],
)
def test_of_a_board_with_a_process_no_idle_draw_is_known(process: dict[str, Any]) -> None:
    assert set(idle_draws(Played(scenario(processes=[process]), [1.0] * 40))) == {None}


def test_a_board_whose_processes_come_and_go_is_not_taken_for_free() -> None:
    """However short they are: the driver's samples show them where no list does."""
    short = [{"start_seconds": n + 0.3, "end_seconds": n + 0.6} for n in range(0, 40, 4)]
    assert set(idle_draws(Played(scenario(processes=short), [1.0] * 40))) == {None}


def test_a_board_that_is_cut_is_free_where_all_its_instances_are() -> None:
    mig = [{"instances": ["1g.10gb", "3g.40gb"]}]
    process = {"instance": 1, "start_seconds": 20.5, "end_seconds": 25}
    played = Played(scenario(mig=mig, processes=[process]), [1.0] * 50)
    found = idle_draws(played)
    assert found[8] is None
    assert found[-1] == pytest.approx(71_500, rel=0.01)
    busy = Played(scenario(mig=mig, processes=[{"instance": 1}]), [1.0] * 30)
    assert set(idle_draws(busy)) == {None}


def test_no_instance_has_energy_or_an_idle_draw_of_its_own() -> None:
    content = scenario(mig=[{"instances": ["1g.10gb"]}], processes=[])
    clock = ManualClock(start_ns=EPOCH_NS)
    run = Simulation(parse_scenario(content), epoch_ns=EPOCH_NS, clock=clock)
    tick = play(run.node("n"), clock, [1.0] * 15)[-1]
    board, instance = tick.sample.gpus
    assert board.idle_draw_milliwatts
    assert (instance.energy_millijoules, instance.energy_method) == (None, None)
    assert instance.idle_draw_milliwatts is None
