"""The simulation's clocks."""

import pytest

from gpuledger_simulator.clock import ManualClock, ScaledClock
from gpuledger_simulator.simulation import Simulation

SECOND = 1_000_000_000


def test_scaled_time_does_not_depend_on_when_a_process_starts() -> None:
    machine = ManualClock(start_ns=1000 * SECOND)
    early = ScaledClock(epoch_ns=990 * SECOND, speed=60, machine=machine)
    machine.advance(5)
    late = ScaledClock(epoch_ns=990 * SECOND, speed=60, machine=machine)
    assert early.time_ns() == late.time_ns() == (990 + 15 * 60) * SECOND


def test_intervals_of_a_scaled_clock_are_scenario_seconds() -> None:
    machine = ManualClock(start_ns=0)
    clock = ScaledClock(epoch_ns=0, speed=10, machine=machine)
    before = clock.monotonic_ns(), clock.boottime_ns()
    machine.advance(2)
    assert clock.monotonic_ns() - before[0] == clock.boottime_ns() - before[1] == 20 * SECOND


async def test_sleeping_advances_a_manual_clock() -> None:
    clock = ManualClock(start_ns=5)
    await clock.sleep(1.5)
    assert clock.time_ns() == 5 + 1_500_000_000
    assert clock.monotonic_ns() == clock.boottime_ns() == 1_500_000_000


@pytest.mark.parametrize("node", ["node-a", "node-b"])
async def test_a_nodes_clock_counts_from_its_boot(
    simulation: Simulation, clock: ManualClock, node: str
) -> None:
    own = simulation.node(node).clock
    await own.sleep(3)
    assert own.time_ns() == clock.time_ns()
    assert own.monotonic_ns() == 3 * SECOND
    assert own.boottime_ns() == (18_000 + 3) * SECOND
