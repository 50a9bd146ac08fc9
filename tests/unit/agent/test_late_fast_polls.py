"""Fast polls that return after the agent has stopped waiting for them."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from random import Random
from typing import Any, Final

import pytest
from typing_extensions import override

from gpuledger.clock import NS_PER_SECOND
from gpuledger.keys import NodeId
from gpuledger.records import NodeSample
from gpuledger.runtime import Backoff, Check
from gpuledger.topics import Topics
from gpuledger_agent.core.fast_polls import OthersScope
from gpuledger_agent.core.raw import ClockReading, FastPoll, RawGpuSample, SampleCursor
from gpuledger_agent.core.tick import NodeTick
from gpuledger_agent.gpu.driver import Driver
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_agent.loop import InventoryTracker, Outputs, SampleLoop
from gpuledger_agent.monitor import IncidentMonitor
from gpuledger_agent.sampling import Sampler
from gpuledger_agent.settings import AgentSettings
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.simulation import SimulatedNode
from tests.ticks import query_all, take_fast_polls, tick_of
from tests.truth_runs import RUN_SECONDS, Lives, errors_of, play_lives

BURSTS: Final[Lives] = [(0.0, 999.0, 0.3, 0.5), (0.0, 999.0, 0.15, 0.35)]


class LateDriver(Driver):
    """A driver whose fast polls return after the agent stopped waiting, but before the tick."""

    late: Sequence[FastPoll] = ()

    @override
    async def fast_poll(self, cursors: Mapping[str, SampleCursor | None]) -> Sequence[FastPoll]:
        self.late = [*self.late, *await super().fast_poll(cursors)]
        return ()

    @override
    def take_late_polls(self) -> Sequence[FastPoll]:
        late, self.late = self.late, ()
        return late


class KeptSampler(Sampler):
    """Keeps its ticks, until there are enough."""

    def __init__(self, node: SimulatedNode, *, count: int) -> None:
        super().__init__(node=NodeId("default", node.name), procfs=node.procfs)
        self.made: list[NodeSample] = []
        self.has_all = asyncio.Event()
        self._wanted = count

    @override
    def sample(self, raw: Sequence[RawGpuSample], **named: Any) -> NodeTick | None:
        tick = super().sample(raw, **named)
        self.made += [tick.sample] if tick else []
        if len(self.made) == self._wanted:
            self.has_all.set()
        return tick


async def run_loop(node: SimulatedNode) -> list[NodeSample]:
    """Return the ticks of the agent's own loop over a driver with late fast polls."""
    settings = AgentSettings(node_name=node.name)
    sampler = KeptSampler(node, count=round(RUN_SECONDS))
    source = NvmlSession(node.nvml, monotonic_ns=node.clock.monotonic_ns)
    outputs = Outputs(send_queue=None, node_state=None, topics=Topics())
    driver = LateDriver(
        source, clock=node.clock, check=Check(), deadline_seconds=5.0, backoff=Backoff()
    )
    loop = SampleLoop(
        driver=driver,
        sampler=sampler,
        inventory=InventoryTracker(node=settings.node, boot_id="boot"),
        monitor=IncidentMonitor(
            node=settings.node,
            boot_id="boot",
            source=source,
            clock=node.clock,
            publish=outputs.report_incident,
        ),
        allocations=None,
        outputs=outputs,
        clock=node.clock,
        procfs_check=Check(),
        mig_check=Check(),
        samples_check=Check(),
        settings=settings,
    )
    running = asyncio.create_task(loop.run())
    await sampler.has_all.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    driver.close()
    return sampler.made


def test_energy_from_a_late_fast_poll_is_in_the_tick_that_covers_it() -> None:
    run = play_lives(
        BURSTS,
        {},
        sampling_interval_seconds=1.0,
        random=Random(6),  # noqa: S311  # a scenario, not a secret
        watched_by=lambda node, _: asyncio.run(run_loop(node)),
    )
    assert errors_of(run, sampling_interval_seconds=1.0).largest.millijoules <= 0.005


def watch_behind(node: SimulatedNode, clock: ManualClock, *, uses_late: bool) -> list[NodeSample]:
    """Return the ticks of an agent whose every second fast poll returns after the next tick.

    With `uses_late` off, their results are discarded.
    """
    sampler = Sampler(node=NodeId("default", node.name), procfs=node.procfs)
    gpus = NvmlSession(node.nvml, monotonic_ns=node.clock.monotonic_ns).open()

    def poll_all() -> list[FastPoll]:
        at = ClockReading.read(node.clock)
        cursors = sampler.fast_poll_cursors(OthersScope.ALL, now_ns=at.monotonic_ns)
        return [gpu.fast_poll(cursors[gpu.uuid], at=at) for gpu in gpus if gpu.uuid in cursors]

    late: list[FastPoll] = []
    made = []
    for _ in range(round(RUN_SECONDS)):
        if tick := tick_of(sampler, gpus, node.clock):
            made.append(tick.sample)
        sampler.take_fast_polls(late if uses_late else ())
        clock.advance(0.4)
        sampler.take_fast_polls(poll_all())
        clock.advance(0.5)
        late = poll_all()
        clock.advance(0.1)
    return made


@pytest.mark.parametrize("processes", ["mean", "mean_of_used", "windows"])
def test_a_fast_poll_that_returns_after_its_tick_is_not_counted_twice(processes: str) -> None:
    busy = [
        [
            {uid: of_pod.busy_ns for uid, of_pod in own.items()}
            for own in play_lives(
                BURSTS,
                {"processes": processes, "window_seconds": 0.3},
                sampling_interval_seconds=1.0,
                random=Random(6),  # noqa: S311  # a scenario, not a secret
                watched_by=partial(watch_behind, uses_late=uses_late),
            ).booked()
        ]
        for uses_late in (True, False)
    ]
    assert busy[0] == busy[1]


def watch_late(
    node: SimulatedNode, clock: ManualClock, *, delay_seconds: float
) -> list[NodeSample]:
    """Return the ticks of an agent that in some ticks queries the GPUs with this delay."""
    sampler = Sampler(node=NodeId("default", node.name), procfs=node.procfs)
    gpus = NvmlSession(node.nvml, monotonic_ns=node.clock.monotonic_ns).open()
    made = []
    for number in range(round(RUN_SECONDS)):
        at, seen = ClockReading.read(node.clock), sampler.begin_tick()
        waited_seconds = delay_seconds if number % 20 in range(5, 15) else 0.0
        clock.advance(waited_seconds)
        answers = [query_all(gpu, seen.get(gpu.uuid, SampleCursor())) for gpu in gpus]
        if tick := sampler.sample(answers, at=at):
            made.append(tick.sample)
        left_ns = round((1.0 - waited_seconds) * NS_PER_SECOND)
        take_fast_polls(sampler, gpus, clock, node.clock, left_ns)
    return made


@pytest.mark.parametrize("processes", ["mean", "newest", "windows"])
@pytest.mark.parametrize("delay_seconds", [0.03, 0.075, 0.15, 0.4])
def test_pods_have_their_shares_even_if_gpus_answer_late(
    processes: str, delay_seconds: float
) -> None:
    run = play_lives(
        BURSTS,
        {"processes": processes},
        sampling_interval_seconds=1.0,
        random=Random(6),  # noqa: S311  # a scenario, not a secret
        watched_by=partial(watch_late, delay_seconds=delay_seconds),
    )
    assert errors_of(run, sampling_interval_seconds=1.0).largest.busy_ns <= 0.01
