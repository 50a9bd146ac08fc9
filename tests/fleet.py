"""Plays a fleet through agents, the join and the store sink, as fast as possible.

Unlike in a month, GPUs move to another node, and kubelets do not answer for a while.
"""

from contextlib import AsyncExitStack
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Final

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Record, Subscription
from gpuledger.clock import NS_PER_SECOND, Clock
from gpuledger_agent.context import Host
from gpuledger_agent.host.kubelet.allocations import Kubelet
from gpuledger_agent.host.kubelet.messages import KubeletError
from gpuledger_agent.settings import (
    AgentSettings,
    AllocationsSettings,
    KubeletSettings,
    SpoolSettings,
)
from tests.default_topics import INVENTORY, SAMPLES
from tests.fleet_scenario import EPOCH_NS, Fleet, Life
from tests.month import Centre, GatedClock, PlayedNode, pod_records_of, storing

TICK_SECONDS: Final = 10.0
VALID_SECONDS: Final = 60.0
"""Time for which the kubelet's last answer counts."""


class UnansweringKubelet:
    """A kubelet that does not answer for a while."""

    def __init__(self, kubelet: Kubelet, clock: Clock, times: Life) -> None:
        self._kubelet, self._clock, self._times = kubelet, clock, times

    async def list_pods(self) -> bytes:
        """Return the kubelet's answer, or raise `KubeletError`."""
        self._raise_if_unavailable()
        return await self._kubelet.list_pods()

    async def list_allocatable(self) -> bytes:
        """Return the kubelet's answer, or raise `KubeletError`."""
        self._raise_if_unavailable()
        return await self._kubelet.list_allocatable()

    def _raise_if_unavailable(self) -> None:
        begin, end = self._times
        if begin <= (self._clock.time_ns() - EPOCH_NS) / NS_PER_SECOND < end:
            raise KubeletError("deadline")


async def play_fleet(fleet: Fleet, store: Path) -> None:
    """Play the fleet into a store."""
    async with AsyncExitStack() as stack:
        records: list[Record] = []
        for name in fleet.lives:
            records += await _play_node(fleet, name, stack)
        bus = MemoryBus()
        pods = sorted(pod_records_of(fleet.simulate()), key=attrgetter("created_time_ns"))
        await stack.enter_async_context(storing(bus, store))
        await Centre(bus=bus, pods=pods).take(records)


async def _play_node(fleet: Fleet, name: str, stack: AsyncExitStack) -> list[Record]:
    """Return what the node's agent publishes."""
    begin_seconds, end_seconds = fleet.lives[name]
    clock, bus = GatedClock(start_ns=EPOCH_NS), MemoryBus()
    clock.advance(begin_seconds)
    reading = Subscription(group="fleet", topics=[SAMPLES.name, INVENTORY.name])

    def change(host: Host) -> Host:
        times = fleet.unanswered.get(name)
        if times is None or host.kubelet is None:
            return host
        return replace(host, kubelet=UnansweringKubelet(host.kubelet, host.clock, times))

    node = PlayedNode(
        simulation=fleet.simulate(clock),
        clock=clock,
        bus=bus,
        consumer=await stack.enter_async_context(bus.consumer(reading)),
        settings=AgentSettings(
            node_name=name,
            sampling_interval_seconds=TICK_SECONDS,
            # In the machine's time, not the played one: threads answer late on a busy machine.
            gpu_timeout_seconds=60.0,
            queue_samples=10_000,
            spool=SpoolSettings(directory="", catch_up_factor=1000),
            kubelet=KubeletSettings(cache_ttl_seconds=VALID_SECONDS),
            allocations=AllocationsSettings(sources=("hami", "gpushare", "kai")),
        ),
        change_host=change,
    )
    stack.push_async_callback(node.end)
    records = await node.run_to(EPOCH_NS + round(end_seconds * NS_PER_SECOND))
    await node.end()
    while batches := await node.consumer.poll(timeout_seconds=0.05, max_records=500):
        records += [one for of_partition in batches.values() for one in of_partition]
    return records
