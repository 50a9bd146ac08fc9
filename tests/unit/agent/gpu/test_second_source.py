"""A vendor is one class behind the seam: another source makes the same books, without NVML."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Subscription
from gpuledger.clock import NS_PER_SECOND
from gpuledger.codec import decoder_of
from gpuledger.records import GpuBooks, Incident, Inventory, NodeSample
from gpuledger.runtime import Readiness
from gpuledger_agent.context import Host, run_agent
from gpuledger_agent.core.incidents import Detection
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_agent.gpu.protocol import GpuLostError, GpuSource
from gpuledger_agent.settings import AgentSettings
from gpuledger_enricher.join.booking.books import book_tick
from gpuledger_simulator.scenario.load import load_scenario
from gpuledger_simulator.simulation import SimulatedNode, Simulation
from tests.default_topics import INCIDENTS, INVENTORY, SAMPLES
from tests.hanging import HANG_SECONDS
from tests.simulated_source import DirectSource
from tests.unit.agent.builders import EPOCH_NS, RingingClock

SCENARIOS = Path(__file__).parents[4] / "scenarios"
SECONDS = 20.0
RECORDS = {SAMPLES.name: NodeSample, INVENTORY.name: Inventory, INCIDENTS.name: Incident}
T = TypeVar("T", NodeSample, Inventory, Incident)


def direct(node: SimulatedNode, simulation: Simulation) -> DirectSource:
    (spec,) = (spec for spec in simulation.scenario.nodes if spec.name == node.name)
    return DirectSource(
        node,
        epoch_ns=EPOCH_NS,
        period_ns=round(simulation.scenario.sample_period_seconds * NS_PER_SECOND),
        uptime_ns=round(spec.uptime_seconds * NS_PER_SECOND),
    )


def by_nvml(node: SimulatedNode, _: Simulation) -> NvmlSession:
    return NvmlSession(node.nvml, monotonic_ns=node.clock.monotonic_ns)


class Node:
    """A node of a scenario, whose GPUs come from the source that a test chooses."""

    def __init__(
        self, scenario: str, name: str, make: Callable[[SimulatedNode, Simulation], GpuSource]
    ) -> None:
        self.clock = RingingClock(rings_after_seconds=SECONDS)
        simulation = Simulation(
            load_scenario(SCENARIOS / scenario), epoch_ns=EPOCH_NS, clock=self.clock
        )
        node = simulation.node(name)
        self.source = make(node, simulation)
        self.bus, self.readiness = MemoryBus(), Readiness()
        self._host = Host(gpus=self.source, procfs=node.procfs, clock=node.clock)
        self._settings = AgentSettings(node_name=name)

    async def run(self, *, until: type | None = None) -> None:
        """Run the agent until the time is over, and a record of that kind is published."""
        agent = asyncio.create_task(
            run_agent(
                host=self._host,
                bus=self.bus,
                settings=self._settings,
                readiness=self.readiness,
            )
        )
        try:
            async with asyncio.timeout(HANG_SECONDS):
                await self.clock.rung.wait()
                while until and not await self.published(until):
                    pass
        finally:
            agent.cancel()
            await asyncio.gather(agent, return_exceptions=True)

    async def published(self, kind: type[T]) -> list[T]:
        """Return the records of a kind, in their order."""
        (topic,) = (topic for topic, record in RECORDS.items() if record is kind)
        decoder = decoder_of(topic, kind)
        found: list[T] = []
        async with self.bus.consumer(Subscription(group="test", topics=[topic])) as consumer:
            while batches := await consumer.poll(timeout_seconds=0.05, max_records=500):
                for records in batches.values():
                    found += [decoder.decode(record.value) for record in records]
        return found


async def booked(
    scenario: str, name: str, make: Callable[[SimulatedNode, Simulation], GpuSource]
) -> list[tuple[int, GpuBooks]]:
    """Return what the ticks of a node are booked as, with their seq."""
    node = Node(scenario, name, make)
    await node.run()
    assert node.readiness.is_ready(), node.readiness.report()
    samples = await node.published(NodeSample)
    assert len(samples) >= SECONDS
    return [(sample.seq, books) for sample in samples for books in book_tick(sample)]


@pytest.mark.parametrize(
    ("scenario", "name"),
    [
        ("quickstart.yaml", "gpu-node-1"),
        ("quickstart.yaml", "gpu-node-2"),
        ("sharing.yaml", "mps-node"),
    ],
)
async def test_a_node_is_booked_the_same_whichever_source_its_gpus_come_from(
    scenario: str, name: str
) -> None:
    directly, through_nvml = [
        [(seq, books.reading.uuid, books.entries) for seq, books in found]
        for found in (await booked(scenario, name, direct), await booked(scenario, name, by_nvml))
    ]
    assert directly == through_nvml


async def test_instances_are_booked_their_memory_whichever_source_they_come_from() -> None:
    """The second source has no counters of the chip, by which NVML tells how busy they are."""
    directly, through_nvml = [
        [
            (seq, books.reading.uuid, books.reading.mig_profile, entry.container,
             entry.memory_bytes)
            for seq, books in await booked("sharing.yaml", "mig-node", make)
            if books.reading.parent_uuid
            for entry in books.entries
        ]
        for make in (direct, by_nvml)
    ]  # fmt: skip
    assert directly == through_nvml
    assert any(container for _, _, _, container, _ in directly)


async def test_what_the_driver_is_and_cannot_do_is_in_the_inventory() -> None:
    node = Node("quickstart.yaml", "gpu-node-1", direct)
    await node.run()
    (inventory,) = await node.published(Inventory)
    assert inventory.driver_version == "direct 1.0"
    assert [gpu.index for gpu in inventory.gpus] == [0, 1]
    reported = [
        (capability.call, capability.supported) for capability in inventory.gpus[0].capabilities
    ]
    assert reported == [("driver_events", False)]


async def test_a_gpu_that_its_source_calls_lost_costs_no_other_one_its_ticks() -> None:
    node = Node("quickstart.yaml", "gpu-node-1", direct)
    assert isinstance(node.source, DirectSource)
    sick, well = node.source.gpus
    sick.error = GpuLostError("it does not answer")
    await node.run()
    samples = await node.published(NodeSample)
    assert {gpu.uuid for sample in samples for gpu in sample.gpus if not gpu.silent} == {well.uuid}
    incidents = await node.published(Incident)
    assert [(one.kind, one.gpu_uuid) for one in incidents] == [("gpu_lost", sick.uuid)]
    assert not node.readiness.check("gpus").is_ok


async def test_a_fault_that_its_source_reports_is_an_incident() -> None:
    node = Node("quickstart.yaml", "gpu-node-1", direct)
    assert isinstance(node.source, DirectSource)
    node.source.faults.put(
        Detection(
            kind="poison_fatal",
            gpu_uuid=node.source.gpus[1].uuid,
            time_ns=EPOCH_NS,
            source="direct",
        )
    )
    await node.run(until=Incident)
    (incident,) = await node.published(Incident)
    assert (incident.kind, incident.source, incident.gpu_index) == ("poison_fatal", "direct", 1)
