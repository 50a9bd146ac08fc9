"""One lost message loses no state, no second is booked twice, and no list stops an agent."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, cast

import pytest

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Bus
from gpuledger.errors import UserError
from gpuledger.runtime import Readiness
from gpuledger.runtime.tasks import end_tasks
from gpuledger_agent.context import run_agent
from gpuledger_agent.exposition.dcgm_fields import Skipped, parse_counters
from gpuledger_agent.settings import AgentSettings, SpoolSettings
from gpuledger_agent.source_selection import play
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import Simulation
from tests.default_topics import INVENTORY, SAMPLES
from tests.hanging import HANG_SECONDS
from tests.unit.agent.publish.builders import FickleBus
from tests.unit.agent.test_service import EPOCH_NS, SleepersClock, read_all
from tests.unit.enricher.join.builders import T_NS, Given
from tests.unit.enricher.join.ticks import SECOND_NS

NODE: Final = "gpu-worker-pool-a-7f9c2.example.internal"


@asynccontextmanager
async def agent_on(
    bus: Bus, scenario: Mapping[str, Any], *, played_seconds: float, queue_samples: int = 600
) -> AsyncIterator[None]:
    """Run the agent of a node after this many seconds of its time."""
    clock = SleepersClock(sleepers=1, rings_after_seconds=played_seconds)
    node = Simulation(parse_scenario(scenario), epoch_ns=EPOCH_NS, clock=clock).node(NODE)
    running = run_agent(
        host=play(node),
        bus=bus,
        settings=AgentSettings(
            node_name=NODE, spool=SpoolSettings(directory=""), queue_samples=queue_samples
        ),
        readiness=Readiness(),
    )
    task = asyncio.create_task(running)
    try:
        await clock.rung.wait()
        yield
    finally:
        await end_tasks(task)


def scenario_of(gpus: int, *pods: Mapping[str, Any]) -> dict[str, Any]:
    group = {"model": "NVIDIA L40S", "count": gpus}
    return {"name": "state", "nodes": [{"name": NODE, "gpus": group}], "pods": list(pods)}


async def test_a_node_publishes_its_inventory_even_if_kafka_was_unavailable_at_startup() -> None:
    """For longer than the queue can hold."""
    bus = FickleBus()
    bus.is_away = True
    async with agent_on(cast("Bus", bus), scenario_of(1), played_seconds=60, queue_samples=20):
        bus.is_away = False
        topics = Counter[str]()
        async with asyncio.timeout(HANG_SECONDS):
            # Long after the first record that is repeated.
            while topics[SAMPLES.name] < 30 and not topics[INVENTORY.name]:
                await asyncio.sleep(0.01)
                topics = Counter(topic for topic, _ in bus.published)
    assert topics[INVENTORY.name] > 0


async def test_a_node_keeps_its_samples_whatever_the_number_of_shares() -> None:
    """As at sites that divide a GPU into shares by memory."""
    per_gpu = 450
    pods = [
        {
            "namespace": "machine-learning-research",
            "name": f"inference-deployment-6d5f7c9b8d-x{gpu}",
            "node": NODE,
            "containers": [
                {
                    "name": "model-server",
                    "devices": [
                        {"gpu": gpu, "replica": share, "resource": "nvidia.com/gpu.shared"}
                        for share in range(per_gpu)
                    ],
                }
            ],
        }
        for gpu in range(8)
    ]
    bus = MemoryBus()
    async with agent_on(bus, scenario_of(8, *pods), played_seconds=5):
        pass
    samples, _ = await read_all(bus)
    assert samples
    holding = {one.pod for one in samples[-1].allocations}
    assert len(holding) == len(pods)


def test_a_dcgm_name_of_a_newer_version_is_skipped_and_reported() -> None:
    lines = [
        "DCGM_FI_DEV_SM_CLOCK_HERTZ, gauge, SM clock.",
        "DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL, counter, Energy.",
        "DCGM_FI_DEV_BAR1_USED_BYTES, gauge, BAR1 in use.",
        "DCGM_FI_DEV_GPU_UTIL, gauge, Utilization.",
    ]
    skipped: list[Skipped] = []
    refused, shown = "", list[str]()
    try:
        found = parse_counters(lines, name="counters.csv", skip=skipped.append)
        shown = [one.field.old for one in found]
    except UserError as error:
        refused = str(error)
    assert not refused
    assert "DCGM_FI_DEV_GPU_UTIL" in shown
    assert "DCGM_FI_DEV_SM_CLOCK_HERTZ" in {one.name for one in skipped}


OTHER_BOOT: Final = "0b0b0b0b-2222-3333-4444-555555555555"
SECONDS: Final = 20


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(None, id="one agent"),
        pytest.param({}, id="two agents on one machine"),
        pytest.param({"boot_id": OTHER_BOOT, "seq": 5_000_000}, id="two machines of one name"),
    ],
)
def test_no_second_of_a_gpu_is_booked_twice(other: Mapping[str, Any] | None) -> None:
    given = Given()
    booked_ns = Counter[str]()
    for second in range(SECONDS):
        seq, time_ns = 1000 * (second + 1), T_NS + second * SECOND_NS
        events = given.offer(seq=seq, time_ns=time_ns)
        if other is not None:
            later = {"seq": seq + 400 + other.get("seq", 0), "time_ns": time_ns + 4 * 10**8}
            events += given.offer(**(dict(other) | later))
        for event in events:
            for books in event.gpus:
                booked_ns[books.reading.uuid] += event.interval_ns
    # The first and the last tick may extend beyond.
    assert SECONDS - 1 <= booked_ns["GPU-a"] / SECOND_NS <= SECONDS + 1


def test_a_sample_covers_no_more_than_the_time_since_the_previous_one() -> None:
    given = Given()
    events = [
        event
        for second in range(SECONDS)
        for event in given.offer(
            seq=1000 * (second + 1),
            time_ns=T_NS + second * SECOND_NS,
            interval_ns=30 * SECOND_NS,
        )
    ]
    covered_seconds = sum(event.interval_ns for event in events) / SECOND_NS
    assert covered_seconds <= SECONDS + 30
