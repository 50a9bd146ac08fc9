"""The newest inventory of a node is published, even if memory and disk cannot hold all samples."""

import asyncio
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from typing_extensions import override

from gpuledger_agent.publish.message_bundle import MessageBundle
from tests.default_topics import INVENTORY
from tests.examples import examples
from tests.unit.agent.publish.builders import FickleBus, bundle_of
from tests.unit.agent.publish.test_order import Node

MAX_BUNDLES = 8

step = st.tuples(
    st.sampled_from(
        ["ticks", "ticks", "inventory", "away", "deaf", "back", "broken", "repaired", "crash"]
    ),
    st.integers(1, 2 * MAX_BUNDLES),
)


def inventory_of(number: int) -> MessageBundle:
    return (bundle_of(number)[0]._replace(topic=INVENTORY.name),)


class NodeWithInventory(Node):
    """A node whose inventory changes, with room for a few samples in memory and on disk."""

    def __init__(self, folder: Path, bus: FickleBus, *, max_bytes: int) -> None:
        self.inventories = 0
        super().__init__(
            folder, bus, max_bundles=MAX_BUNDLES, max_bytes=max_bytes, max_age_seconds=20
        )

    @override
    def start(self) -> None:
        super().start()
        self.change_inventory()

    def change_inventory(self) -> None:
        self.inventories += 1
        self.send_queue.put_inventory(inventory_of(self.inventories))

    @override
    async def end(self) -> None:
        self.disk.error = None
        self.bus.is_away = self.bus.is_deaf = False
        # The disk is due to be used again after the delay for its failures.
        self.time_seconds += 1000
        await self.ticks(1)
        await super().end()

    async def live(self, steps: Sequence[tuple[str, int]]) -> None:
        for what, number in steps:
            match what:
                case "ticks":
                    await self.ticks(number)
                case "inventory":
                    self.change_inventory()
                case "broken" | "repaired":
                    self.disk.error = sqlite3.SQLITE_IOERR if what == "broken" else None
                case "crash":
                    await self.crash()
                case _:
                    self.bus.is_away, self.bus.is_deaf = what == "away", what == "deaf"
            assert self.send_queue.bundles_in_memory <= 60 + MAX_BUNDLES
        await self.end()


@examples(200)
@given(steps=st.lists(step, min_size=3, max_size=30), max_bytes=st.sampled_from([0, 300, 2**20]))
@example(steps=[("away", 1), ("ticks", 40)], max_bytes=0)
@example(steps=[("away", 1), ("ticks", 40)], max_bytes=2**20)
def test_the_newest_inventory_is_published_last(
    tmp_path_factory: pytest.TempPathFactory, steps: Sequence[tuple[str, int]], max_bytes: int
) -> None:
    bus = FickleBus()

    async def run() -> NodeWithInventory:
        node = NodeWithInventory(tmp_path_factory.mktemp("spool"), bus, max_bytes=max_bytes)
        await node.live(steps)
        return node

    node = asyncio.run(run())
    numbers = bus.numbers(INVENTORY.name)
    assert numbers == sorted(numbers)
    _, last = [message for message in bus.published if message[0] == INVENTORY.name][-1]
    assert int(last) == numbers[-1] == node.inventories


async def test_an_acknowledged_inventory_is_not_sent_again(tmp_path: Path) -> None:
    bus = FickleBus()
    node = NodeWithInventory(tmp_path, bus, max_bytes=2**20)
    await node.ticks(30)
    await node.end()
    assert [topic for topic, _ in bus.published].count(INVENTORY.name) == 1
