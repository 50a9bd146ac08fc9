"""Incidents from a simulated GPU's fault to the bus, through the whole agent."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from typing_extensions import override

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Consumer, Subscription
from gpuledger.clock import NS_PER_SECOND
from gpuledger.codec import decoder_of
from gpuledger.records import Incident, NodeSample, Severity
from gpuledger.runtime import Readiness
from gpuledger_agent.context import run_agent
from gpuledger_agent.settings import AgentSettings, IncidentsSettings
from gpuledger_agent.source_selection import play
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import SimulatedNode, Simulation
from tests.default_topics import INCIDENTS, SAMPLES
from tests.hanging import HANG_SECONDS
from tests.unit.agent.core.incidents.builders import EPOCH_NS, pausing

FAULT_SECONDS = 20.0
CONTENT: dict[str, Any] = {
    "name": "faults",
    "nodes": [{"name": "node-a", "gpus": {"model": "NVIDIA H100 80GB HBM3", "count": 2}}],
    "pods": [
        {
            "namespace": "research", "name": "notebook-0", "node": "node-a",
            "containers": [{"name": "main", "devices": [{"gpu": 0}]}],
        }
    ],
    "host_processes": [
        {"node": "node-a", "command": "/opt/train --fast", "gpus": [1], "memory_bytes": 1 << 30}
    ],
    "incidents": [
        {"node": "node-a", "gpu": 1, "at_seconds": FAULT_SECONDS, "xid": 48},
        {"node": "node-a", "gpu": 1, "at_seconds": FAULT_SECONDS + 0.1, "event": "fatal_poison"},
        {
            "node": "node-a", "gpu": 0, "at_seconds": FAULT_SECONDS + 0.2, "xid": 154,
            "reported_by": "kmsg", "text": "GPU recovery action changed from 0x0 (None) to 0x2 (x)",
        },
    ],
}  # fmt: skip


class MovedClock(ManualClock):
    """A clock whose sleepers wake when a test advances it."""

    def __init__(self) -> None:
        super().__init__(start_ns=EPOCH_NS)
        self._wakings: list[tuple[int, asyncio.Event]] = []

    @override
    async def sleep(self, seconds: float) -> None:
        awake = asyncio.Event()
        self._wakings.append((self.time_ns() + round(seconds * NS_PER_SECOND), awake))
        await awake.wait()

    async def move(self, seconds: float) -> None:
        """Advance, and let the sleepers that are due run."""
        self.advance(seconds)
        due = [waking for waking in self._wakings if waking[0] <= self.time_ns()]
        self._wakings = [one for one in self._wakings if one not in due]
        for _, awake in due:
            awake.set()
        await asyncio.sleep(0)


@pytest.fixture
def clock() -> MovedClock:
    return MovedClock()


@pytest.fixture
def node(clock: MovedClock) -> SimulatedNode:
    simulation = Simulation(parse_scenario(CONTENT), epoch_ns=EPOCH_NS, clock=clock)
    return simulation.node("node-a")


class Agent:
    """The agent of a played node, and its published incidents, while the test advances the time."""

    def __init__(self, clock: MovedClock, consumer: Consumer, waits: asyncio.Event) -> None:
        self._clock = clock
        self._consumer = consumer
        self._waits = waits
        self._samples: list[NodeSample] = []
        self.incidents: list[Incident] = []

    @property
    def is_ready(self) -> bool:
        """Whether it waits for events, and knows the GPUs' processes and allocations."""
        return self._waits.is_set() and any(
            sample.processes and sample.allocations for sample in self._samples
        )

    async def until(self, done: Callable[[], bool], *, step_seconds: float) -> None:
        """Advance the time step by step until `done` returns true."""
        async with asyncio.timeout(HANG_SECONDS):
            while not done():
                await self._clock.move(step_seconds)
                batches = await self._consumer.poll(timeout_seconds=0.01, max_records=100)
                for partition, records in batches.items():
                    for record in records:
                        self._take(partition.topic, record.value)

    def _take(self, topic: str, value: bytes | None) -> None:
        if topic == INCIDENTS.name:
            incident = decoder_of(topic, Incident).decode(value or b"")
            # The agent also reports that a GPU is well at its start.
            if not incident.present_at_start:
                self.incidents.append(incident)
        else:
            self._samples.append(decoder_of(topic, NodeSample).decode(value or b""))


@asynccontextmanager
async def running(
    node: SimulatedNode, clock: MovedClock, *, incidents: IncidentsSettings | None = None
) -> AsyncIterator[Agent]:
    waits, bus = asyncio.Event(), MemoryBus()
    node.nvml.events.pause = pausing(waits)
    running = asyncio.create_task(
        run_agent(
            host=replace(play(node), open_kmsg=node.open_kmsg),
            bus=bus,
            settings=AgentSettings(
                node_name="node-a",
                incidents=incidents or IncidentsSettings(),
                # In each tick, because an incident from a reading is found no sooner than it is
                # read.
                readings_seconds=1.0,
            ),
            readiness=Readiness(),
        )
    )
    subscription = Subscription(group="test", topics=[INCIDENTS.name, SAMPLES.name])
    try:
        async with bus.consumer(subscription) as consumer:
            yield Agent(clock, consumer, waits)
    finally:
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()


async def test_a_fault_is_published_once_with_the_processes_on_the_gpu(
    node: SimulatedNode, clock: MovedClock
) -> None:
    async with running(node, clock) as agent:
        await agent.until(lambda: agent.is_ready, step_seconds=0.02)
        assert clock.time_ns() < EPOCH_NS + FAULT_SECONDS * NS_PER_SECOND
        await agent.until(lambda: len(agent.incidents) == 3, step_seconds=0.25)
        until_ns = clock.time_ns() + 2 * NS_PER_SECOND
        await agent.until(lambda: clock.time_ns() > until_ns, step_seconds=0.25)

    by_what = {(incident.kind, incident.xid): incident for incident in agent.incidents}
    assert by_what.keys() == {("xid", 48), ("poison_fatal", None), ("xid", 154)}
    assert len(agent.incidents) == 3
    first, requested = by_what["xid", 48], by_what["xid", 154]
    assert [process.command for process in first.processes] == ["train"]
    assert (first.gpu_uuid, first.severity) == (node.gpus[1].facts.uuid, Severity.CRITICAL)
    assert (requested.source, requested.action, requested.processes) == ("kmsg", "RESTART_BM", [])
    assert requested.gpu_uuid == node.gpus[0].facts.uuid
    assert first.allocations is None
    assert [(one.namespace, one.pod) for one in requested.allocations or []] == [
        ("research", "notebook-0")
    ]


async def test_a_slowdown_is_published_after_the_seconds_in_the_setting(clock: MovedClock) -> None:
    ailment = {"throttle": "power_brake", "start_seconds": 2}
    gpus = {"model": "NVIDIA H100 80GB HBM3", "ailments": [ailment]}
    content = {"name": "braked", "nodes": [{"name": "node-a", "gpus": gpus}]}
    simulation = Simulation(parse_scenario(content), epoch_ns=EPOCH_NS, clock=clock)
    settings = IncidentsSettings(slowdown_seconds=3)
    async with running(simulation.node("node-a"), clock, incidents=settings) as agent:
        await agent.until(lambda: bool(agent.incidents), step_seconds=0.25)

    (braked,) = agent.incidents
    assert (braked.kind, braked.source) == ("power_brake_slowdown", "agent")
    assert 4 <= (braked.time_ns - EPOCH_NS) / NS_PER_SECOND <= 8
