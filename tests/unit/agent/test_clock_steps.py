"""Steps of the wall clock: their effect on reported times, and on who used the GPUs."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.clock import NS_PER_SECOND
from gpuledger.keys import NodeId
from gpuledger.records import NodeSample
from gpuledger_agent.core.fast_polls import OthersScope
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_agent.sampling import Sampler
from gpuledger_simulator.clock import ManualClock, NodeClock, SetClock
from gpuledger_simulator.scenario.load import load_scenario
from gpuledger_simulator.schema import ClockStep
from gpuledger_simulator.simulation import SimulatedNode, Simulation
from tests.examples import examples
from tests.ticks import play, tick_of
from tests.unit.agent.test_sampling import EPOCH_NS, QUICKSTART, busy_seconds

NODE = "gpu-node-1"
STEP_AT = 20
TICKS = 45
GPUS = 2
Steps = Sequence[tuple[float, float]]


def simulation_of(steps: Steps, clock: ManualClock) -> Simulation:
    scenario = load_scenario(QUICKSTART)
    set_at = [ClockStep(at_seconds=at, by_seconds=by) for at, by in steps]
    nodes = [msgspec.structs.replace(node, clock_steps=set_at) for node in scenario.nodes]
    changed = msgspec.structs.replace(scenario, nodes=nodes)
    return Simulation(changed, epoch_ns=EPOCH_NS, clock=clock)


def played(steps: Steps, *, driver_follows: bool = True) -> tuple[list[NodeSample], float]:
    """Return the ticks, and the pods' GPU time in seconds that the ticks do not report."""
    clock = ManualClock(start_ns=EPOCH_NS)
    simulation = simulation_of(steps if driver_follows else (), clock)
    node = simulation.node(NODE)
    if not driver_follows:
        node = shown_by_another_clock(node, clock, steps)
    clock.advance(0.1)
    start_ns = clock.time_ns()
    samples = [tick.sample for tick in play(node, clock, [0.25, *[1.0] * TICKS])]
    reported = busy_seconds(samples)
    truth = simulation.truth(start_ns, clock.time_ns(), NODE)
    return samples, sum(used.busy_seconds - reported[used.uid] for used in truth)


def shown_by_another_clock(node: SimulatedNode, clock: ManualClock, steps: Steps) -> SimulatedNode:
    """Return the node with a stepped wall clock and a driver that stamps by its own clock."""
    booted_ns = clock.time_ns() - node.clock.boottime_ns()
    made = [
        SetClock(EPOCH_NS + round(at * NS_PER_SECOND), round(by * NS_PER_SECOND))
        for at, by in steps
    ]
    return replace(node, clock=NodeClock(clock, boot_time_ns=booted_ns, steps=made))


@pytest.mark.parametrize(
    ("by_seconds", "lost_seconds"),
    [
        (0, 0.2),
        (0.4, 0.2),
        (240, 0.2),
        (365 * 86_400, 0.2),
        (-0.06, 0.3),
        (-0.4, 0.6),
        (-3, 4),
        (-8, 4),
        (-100, 4),
        (-3600, 4),
        (-365 * 86_400, 4),
    ],
)
def test_a_clock_step_loses_a_few_seconds_of_attributed_time_and_nothing_later(
    by_seconds: float, lost_seconds: float
) -> None:
    _, unreported = played([(STEP_AT, by_seconds)])
    assert abs(unreported) < GPUS * lost_seconds


@pytest.mark.parametrize("by_seconds", [-0.4, -3600])
def test_a_clock_step_loses_nothing_if_the_driver_stamps_by_its_own_clock(
    by_seconds: float,
) -> None:
    _, unreported = played([(STEP_AT, by_seconds)], driver_follows=False)
    assert abs(unreported) < GPUS * 0.3


def test_energy_is_still_read_after_the_clock_was_set_back() -> None:
    """Energy has no time stamp, while samples may be from either clock until buffers turn over."""
    clock = ManualClock(start_ns=EPOCH_NS)
    node = simulation_of([(3, -3600)], clock).node(NODE)
    sampler = Sampler(node=NodeId("default", NODE), procfs=node.procfs)
    gpus = NvmlSession(node.nvml, monotonic_ns=node.clock.monotonic_ns).open()
    requested = []
    for _ in range(8):
        tick_of(sampler, gpus, node.clock)
        cursors = [
            sampler.fast_poll_cursors(scope, now_ns=node.clock.monotonic_ns())
            for scope in OthersScope
        ]
        requested.append([(len(one), any(one.values())) for one in cursors])
        clock.advance(1.0)
    assert requested[2] == [(0, False), (GPUS, False), (GPUS, True)]
    assert requested[4:] == [[(0, False), (GPUS, False), (GPUS, False)]] * 4


@examples(8)
@given(
    steps=st.lists(
        st.tuples(st.integers(1, 40), st.integers(-(10**6), 10**6) | st.integers(-9, 9)), max_size=5
    )
)
def test_seq_and_intervals_do_not_depend_on_the_wall_clock(steps: list[tuple[int, int]]) -> None:
    samples, _ = played(steps)
    assert [sample.seq for sample in samples[1:]] == [
        samples[0].seq + 1000 * number for number in range(1, TICKS + 1)
    ]
    assert {sample.interval_ns for sample in samples[1:]} == {NS_PER_SECOND}
