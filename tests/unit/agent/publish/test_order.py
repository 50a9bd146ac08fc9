"""Whatever happens to broker and process, the order on the bus is the order in time.

Outages, lost acknowledgements, crashes and restarts come in any order.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.bus.protocol import Bus
from gpuledger.clock import NS_PER_SECOND
from gpuledger.keys import NodeId
from gpuledger.runtime import Backoff, Check
from gpuledger_agent.publish.message_bundle import BundleQueue
from gpuledger_agent.publish.publisher import SamplePublisher, shut_down
from gpuledger_agent.publish.send_queue import SendQueue
from gpuledger_agent.publish.spool import Spool
from tests.default_topics import PROCESSES, SAMPLES
from tests.examples import examples
from tests.hanging import HANG_SECONDS
from tests.unit.agent.publish.builders import (
    BOOT,
    NODE,
    FickleBus,
    FlakyDisk,
    ImmediateDisk,
    bundle_of,
    settings_in,
)

AFTER_SECONDS = 5.0

bus_step = st.tuples(st.sampled_from(["away", "away", "deaf", "back"]), st.just(0))
step = st.one_of(
    st.tuples(st.just("ticks"), st.integers(1, 9)),
    bus_step,
    st.tuples(st.just("ticks"), st.integers(1, 3)),
    bus_step,
    st.tuples(st.just("crash"), st.just(0)),
    st.tuples(st.just("restart"), st.just(0)),
)


class Node:
    """The publishing part of a node's agent; only its files survive a crash."""

    def __init__(
        self, folder: Path, bus: FickleBus, *, max_bundles: int = 10_000, **spool: float
    ) -> None:
        self.folder = folder
        self.bus = bus
        self.disk = FlakyDisk()
        self.max_bundles = max_bundles
        self.spool_settings = spool
        self.time_seconds = 0.0
        self.made = 0
        self.lost: set[int] = set()
        self.start()

    def start(self) -> None:
        self.spool = Spool(
            settings_in(self.folder, **self.spool_settings),
            node=NodeId("default", NODE),
            boot_id=BOOT,
            boottime_ns=lambda: round(self.time_seconds * NS_PER_SECOND),
            connect=self.disk.connect,
        )
        self.send_queue = SendQueue(
            queue=BundleQueue(max_bundles=self.max_bundles),
            spool=self.spool,
            check=Check(),
            spill_after_seconds=AFTER_SECONDS,
            disk=ImmediateDisk(),
            now_seconds=lambda: self.time_seconds,
        )
        self.publisher = SamplePublisher(
            node=NodeId("default", NODE),
            bus=cast("Bus", self.bus),
            send_queue=self.send_queue,
            check=Check(),
            backoff=Backoff(first_seconds=1e-6, max_seconds=1e-6),
            catch_up_factor=1e12,
        )
        self.tasks = [
            asyncio.create_task(self.publisher.run()),
            asyncio.create_task(self.send_queue.run()),
        ]

    async def ticks(self, count: int) -> None:
        for _ in range(count):
            self.send_queue.put(bundle_of(self.made))
            self.made += 1
            self.time_seconds += 1
            await settle()

    async def crash(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)
        # Memory may contain bundles younger than this, but none that are older.
        self.lost |= set(range(self.made - int(AFTER_SECONDS) - 1, self.made))
        await self.send_queue.close()
        self.start()

    async def restart(self) -> None:
        await shut_down(self.publisher, self.send_queue, *self.tasks, seconds=0)
        assert not self.send_queue.bundles_in_memory
        self.start()

    async def end(self) -> None:
        self.bus.is_away = self.bus.is_deaf = False
        await settle()
        async with asyncio.timeout(HANG_SECONDS):
            await self.send_queue.wait_drained()
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)
        await self.send_queue.close()


async def settle() -> None:
    for _ in range(12):
        await asyncio.sleep(0)


async def live(node: Node, steps: Sequence[tuple[str, int]]) -> None:
    for what, number in steps:
        match what:
            case "ticks":
                await node.ticks(number)
            case "crash":
                await node.crash()
            case "restart":
                await node.restart()
            case _:
                node.bus.is_away, node.bus.is_deaf = what == "away", what == "deaf"
    await node.end()


@examples(200)
@given(steps=st.lists(step, min_size=3, max_size=30))
def test_records_are_published_in_order_of_time_and_only_a_crash_loses_the_latest_ones(
    tmp_path_factory: pytest.TempPathFactory, steps: Sequence[tuple[str, int]]
) -> None:
    bus = FickleBus()

    async def run() -> Node:
        node = Node(tmp_path_factory.mktemp("spool"), bus)
        await live(node, steps)
        return node

    node = asyncio.run(run())
    samples, processes = bus.numbers(SAMPLES.name), bus.numbers(PROCESSES.name)
    assert samples == sorted(samples)
    assert processes == sorted(processes)
    assert set(range(node.made)) - set(samples) <= node.lost
    assert {number for number in range(node.made) if number % 3 == 0} - set(processes) <= node.lost
    assert set(bus.published) <= {
        (topic, message.value)
        for number in range(node.made)
        for topic, message, _ in bundle_of(number)
    }
    assert node.spool.is_empty
