"""Processes that use a GPU only between two ticks."""

from typing import Any

import pytest

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Subscription
from gpuledger.codec import decoder_of
from gpuledger.keys import NodeId
from gpuledger.records import NodeSample, ProcessChange, ProcessRecord
from gpuledger_agent.core.raw import ClockReading, SampleCursor
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_agent.sampling import Sampler
from gpuledger_agent.settings import AgentSettings
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import Simulation
from tests.default_topics import PROCESSES, SAMPLES
from tests.ticks import play, query_all, take_fast_polls
from tests.unit.agent.builders import EPOCH_NS, short_lives, watch

# Ticks come 0.25 s after the start and then every second: this one ends before the third.
BETWEEN_TICKS = (2.4, 3.0)


async def reported(bus: MemoryBus) -> list[ProcessRecord]:
    """Return the exits on the bus."""
    async with bus.consumer(Subscription(group="test", topics=[PROCESSES.name])) as consumer:
        batches = await consumer.poll(timeout_seconds=0.05, max_records=500)
        decode = decoder_of(PROCESSES.name, ProcessRecord).decode
        records = [decode(one.value) for batch in batches.values() for one in batch]
        return [record for record in records if record.change is ProcessChange.ENDED]


async def ticks_on(bus: MemoryBus) -> list[NodeSample]:
    """Return the ticks on the bus."""
    async with bus.consumer(Subscription(group="test", topics=[SAMPLES.name])) as consumer:
        batches = await consumer.poll(timeout_seconds=0.05, max_records=500)
        decode = decoder_of(SAMPLES.name, NodeSample).decode
        return [decode(one.value) for batch in batches.values() for one in batch]


@pytest.mark.parametrize("fast_poll_interval_seconds", [0.1, 0.5, 60.0])
async def test_a_process_that_no_tick_lists_is_found_by_a_fast_poll(
    fast_poll_interval_seconds: float,
) -> None:
    settings = AgentSettings(
        node_name="gpu-a", fast_poll_interval_seconds=fast_poll_interval_seconds
    )
    (end,) = await reported(await watch(short_lives([BETWEEN_TICKS]), settings, seconds=6))
    assert end.busy_ns == pytest.approx(0.48e9, abs=0.1e9)
    assert end.container_id is not None


async def test_a_process_is_reported_and_booked_by_the_tick_that_covers_its_end() -> None:
    settings = AgentSettings(node_name="gpu-a")
    bus = await watch(short_lives([BETWEEN_TICKS]), settings, seconds=6)
    ((tick, end),) = [
        (tick, end) for tick in await ticks_on(bus) for end in tick.ended_processes or ()
    ]
    assert end.busy_ns == pytest.approx(0.48e9, abs=0.1e9)
    # What fast polls saw is already in the ticks; only the rest is a late adjustment.
    assert end.sampled_busy_ns == pytest.approx(end.busy_ns, abs=0.1e9)
    assert tick.containers[end.container or 0].pod_uid is not None
    assert end.from_time_ns <= EPOCH_NS + 2.4e9 < EPOCH_NS + 3.0e9 <= end.until_time_ns
    assert end.until_time_ns <= tick.time_ns
    assert tick.time_ns - tick.interval_ns <= EPOCH_NS + 3.2e9


def test_only_one_tick_reports_the_end_of_a_process_that_ended_before_a_fast_poll() -> None:
    """In the next one it was on the GPU for no part of the covered time, and has no claim."""
    clock = ManualClock(start_ns=EPOCH_NS)
    scenario = parse_scenario(short_lives([(5.0, 33.5)], accounting="off"))
    node = Simulation(scenario, epoch_ns=EPOCH_NS, clock=clock).node("gpu-a")
    ticks = play(node, clock, [0.5, *[10.0] * 5])
    listed = [[one.ended for one in tick.sample.processes] for tick in ticks]
    assert listed == [[], [None], [None], [None], [True], []]


async def test_without_accounts_a_fast_poll_finds_it_if_processes_came_or_went_recently() -> None:
    settings = AgentSettings(node_name="gpu-a")
    scenario = short_lives([(0.5, 1.6), BETWEEN_TICKS], accounting="off")
    bus = await watch(scenario, settings, seconds=6)
    ticks = await ticks_on(bus)
    seen = [one for tick in ticks for one in tick.processes if one.sm_utilization_ratio]
    assert len({one.pid for one in seen}) == 2
    assert all(one.container is not None for one in seen)
    assert [end for tick in ticks for end in tick.ended_processes or ()] == []


async def test_a_process_on_several_gpus_has_one_lifetime_with_its_use_of_all() -> None:
    scenario: Any = short_lives([BETWEEN_TICKS])
    scenario["nodes"][0]["gpus"]["count"] = 4
    (process,) = scenario["pods"][0]["containers"][0]["processes"]
    process["gpus"] = [0, 1, 2, 3]
    (end,) = await reported(await watch(scenario, AgentSettings(node_name="gpu-a"), seconds=6))
    assert len(end.gpu_uuids) == len(end.totals or ()) == 4
    assert end.busy_ns == pytest.approx(4 * 0.48e9, abs=0.3e9)


def test_a_process_that_ends_before_proc_is_read_is_known_from_a_fast_poll() -> None:
    clock = ManualClock(start_ns=EPOCH_NS)
    scenario = parse_scenario(short_lives([(0.5, 1.6), (2.2, 2.9)], accounting="off"))
    (node,) = Simulation(scenario, epoch_ns=EPOCH_NS, clock=clock).nodes.values()
    sampler = Sampler(node=NodeId("default", node.name), procfs=node.procfs)
    gpus = NvmlSession(node.nvml, monotonic_ns=node.clock.monotonic_ns).open()
    samples = []
    for _ in range(6):
        take_fast_polls(sampler, gpus, clock, node.clock, 750_000_000)
        at, cursors = ClockReading.read(node.clock), sampler.begin_tick()
        answers = [query_all(gpu, cursors.get(gpu.uuid, SampleCursor())) for gpu in gpus]
        # Other GPUs take some time to answer.
        clock.advance(0.25)
        if tick := sampler.sample(answers, at=at):
            samples.append(tick.sample)
    pods = [
        tick.containers[one.container or 0].pod_uid
        for tick in samples
        for one in tick.processes
        if one.sm_utilization_ratio
    ]
    assert len(pods) > 3
    assert None not in pods
    assert all(one.started_boottime_ns for tick in samples for one in tick.processes)
