"""An agent that stops because no GPU works publishes the reason first."""

import pytest
from typing_extensions import override

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Subscription
from gpuledger.codec import decoder_of
from gpuledger.records import Incident
from gpuledger.runtime import Readiness
from gpuledger_agent.context import Host, run_agent
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_agent.gpu.watchdog import NothingWorksError
from gpuledger_agent.settings import AgentSettings
from gpuledger_simulator.clock import ManualClock
from tests.default_topics import INCIDENTS
from tests.fakes.nvml import Altered, FakeProcfs, play_node


async def incidents_on(bus: MemoryBus) -> list[Incident]:
    decoder = decoder_of(INCIDENTS.name, Incident)
    async with bus.consumer(Subscription(group="test", topics=[INCIDENTS.name])) as consumer:
        batches = await consumer.poll(timeout_seconds=0.05, max_records=500)
        return [decoder.decode(one.value) for batch in batches.values() for one in batch]


async def test_the_reason_for_the_exit_is_published_before_it() -> None:
    class LosingClock(ManualClock):
        @override
        async def sleep(self, seconds: float) -> None:
            if self.monotonic_ns() > 5e9:
                library.lost.add(0)
            await super().sleep(seconds)

    clock = LosingClock(start_ns=10**18)
    node, bus = play_node(clock), MemoryBus()
    library = Altered(node.nvml)
    with pytest.raises(NothingWorksError):
        await run_agent(
            host=Host(
                gpus=NvmlSession(library, monotonic_ns=clock.monotonic_ns),
                procfs=FakeProcfs(),
                clock=clock,
            ),
            bus=bus,
            # Shorter than a settings file may set.
            settings=AgentSettings(node_name="node-a", watchdog_seconds=0.3),
            readiness=Readiness(),
        )
    reported = [(one.kind, one.gpu_uuid) for one in await incidents_on(bus)]
    uuid = node.gpus[0].facts.uuid
    assert reported[-2:] == [("gpu_lost", uuid), ("agent_ended", uuid)]
