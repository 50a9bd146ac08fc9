"""Publish like real agents: a tick per second each, one per batch, again until acknowledged.

A node's next tick waits for the acknowledgement of the previous one. A tick that is published again
after a failure may be on the topic twice, as with a real agent: the join has to handle that.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from benchmarks.ticks import SEQ_PER_TICK, Fleet, TickTemplate, node_name, template_of
from gpuledger.bus.protocol import Message
from gpuledger.errors import BusUnavailableError
from gpuledger.keys import key_in
from gpuledger.topics import partition_of_node
from tests.default_topics import SAMPLES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuledger.bus.protocol import Bus, Producer
    from tests.chaos.tally import Tally

_POLL_SECONDS: Final = 0.05
# One batch being sent and one ready: more waiting batches would only wake each other up.
_LANES_A_PARTITION: Final = 2
_RETRY_SECONDS: Final = (0.2, 1.0)
_NS_PER_SECOND: Final = 1_000_000_000


@dataclass(kw_only=True)
class Agent:
    """One node: its tick without `seq` and time, and the number of its next tick."""

    node: str
    boot_id: str
    template: TickTemplate
    partition: int
    phase_seconds: float
    """The offset of its ticks within each second."""
    number: int = 0

    def message(self, *, started_ns: int) -> Message:
        """Return the next tick."""
        time_ns = started_ns + int((self.number + self.phase_seconds) * _NS_PER_SECOND)
        value = self.template.at(seq=self.number * SEQ_PER_TICK, time_ns=time_ns)
        return Message(key_in("default", self.node).encode(), value, time_ns // 1_000_000)


def make_agents(fleet: Fleet, *, uids: Sequence[str], partitions: int) -> list[Agent]:
    """Return an agent for each pod UID: all processes of a node belong to its one pod.

    Every other container's cgroup names no UID, so that only its container id leads to the pod.
    """
    return [
        _agent(fleet, number, uid, phase_seconds=number / len(uids), partitions=partitions)
        for number, uid in enumerate(uids)
    ]


def _agent(fleet: Fleet, number: int, uid: str, *, phase_seconds: float, partitions: int) -> Agent:
    tick = fleet.tick(number, 0)
    containers = [
        replace(container, pod_uid=None if partition % 2 else uid)
        for partition, container in enumerate(tick.containers)
    ]
    tick = replace(tick, containers=containers, interval_ns=_NS_PER_SECOND)
    return Agent(
        node=tick.node,
        boot_id=tick.boot_id,
        template=template_of(tick),
        partition=partition_of_node(key_in("default", node_name(number)), partitions=partitions),
        phase_seconds=phase_seconds,
    )


class Publishing:
    """All agents of a run over one connection, in enough lanes to keep it busy."""

    def __init__(self, *, bus: Bus, agents: Sequence[Agent], tally: Tally, seconds: float) -> None:
        self._bus = bus
        self._agents = agents
        self._tally = tally
        self._seconds = seconds
        self._started = 0.0
        self._started_ns = 0

    async def run(self) -> None:
        """Publish all ticks of the run; return when the last one is acknowledged."""
        self._started, self._started_ns = time.monotonic(), time.time_ns()
        lanes: dict[int, list[Agent]] = {}
        for agent in self._agents:
            lanes.setdefault(agent.partition, []).append(agent)
        async with self._bus.producer() as producer, asyncio.TaskGroup() as group:
            for lane in lanes.values():
                for first in range(_LANES_A_PARTITION):
                    group.create_task(self._publish_lane(producer, lane[first::_LANES_A_PARTITION]))

    async def _publish_lane(self, producer: Producer, lane: Sequence[Agent]) -> None:
        """Cycle through the agents of a lane; each agent that is behind gets a turn per cycle."""
        while left := [agent for agent in lane if self._due_seconds(agent) < self._seconds]:
            elapsed_seconds = time.monotonic() - self._started
            due = [agent for agent in left if self._due_seconds(agent) <= elapsed_seconds]
            for agent in due:
                if not await self._publish(producer, agent):
                    await asyncio.sleep(random.uniform(*_RETRY_SECONDS))  # noqa: S311 - a jitter
                    break
            if not due:
                await asyncio.sleep(_POLL_SECONDS)

    async def _publish(self, producer: Producer, agent: Agent) -> bool:
        message = agent.message(started_ns=self._started_ns)
        try:
            await producer.publish(SAMPLES.name, agent.partition, [message])
        except BusUnavailableError:
            return False
        self._tally.acknowledge(agent.node, agent.number)
        agent.number += 1
        return True

    def _due_seconds(self, agent: Agent) -> float:
        return agent.number + agent.phase_seconds
