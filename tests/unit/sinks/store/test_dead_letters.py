"""A rejected event is on the bus before the table passes it, whenever the process dies."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import write_deltalake
from typing_extensions import override

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Message, Producer, TopicPartition
from gpuledger.errors import BusUnavailableError
from gpuledger.runtime import Readiness
from gpuledger_sinks.loop import run_sink
from gpuledger_sinks.registry import STORE
from gpuledger_sinks.settings import StoreSettings
from tests.default_topics import DEAD_LETTERS, EVENTS, REPLAY
from tests.unit.sinks.builders import (
    ManualClock,
    committed,
    dead_letters,
    entry,
    event,
    eventually,
    place_of,
    publish,
    running,
)

PARTITION = place_of("node-a")


class RefusingBus(MemoryBus):
    """A bus that rejects dead letters a number of times."""

    def __init__(self, *, refusals: int) -> None:
        super().__init__([replace(EVENTS, partitions=2), DEAD_LETTERS, REPLAY])
        self.refusals = refusals

    @override
    @asynccontextmanager
    async def producer(self) -> AsyncIterator[Producer]:
        async with super().producer() as producer:
            yield _RefusingProducer(producer, self)

    def records(self) -> int:
        """Return the number of dead letters on the bus."""
        return self._logs[TopicPartition(DEAD_LETTERS.name, 0)].end_offset


class _RefusingProducer:
    def __init__(self, inner: Producer, on: RefusingBus) -> None:
        self._inner, self._on = inner, on

    async def publish(self, topic: str, partition: int, messages: Sequence[Message]) -> None:
        if topic == DEAD_LETTERS.name and self._on.refusals:
            self._on.refusals -= 1
            raise BusUnavailableError("no broker answers")
        await self._inner.publish(topic, partition, messages)


@pytest.mark.parametrize("refusals", [0, 1, 3])
async def test_a_dead_letter_is_on_the_bus_before_the_rows_after_it_are_committed(
    refusals: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and offsets are one commit: after it, no sink reads the event again."""
    on = RefusingBus(refusals=refusals)
    dead_letters_at_append: list[int] = []

    def writing(*args: Any, **options: Any) -> None:  # noqa: ANN401  # deltalake's own
        dead_letters_at_append.append(on.records())
        write_deltalake(*args, **options)

    monkeypatch.setattr("gpuledger_sinks.store.table.write_deltalake", writing)
    invalid = event(0, entries=[entry(allocation=3)])
    await publish(on, invalid, b"{", event(1, entries=[entry()]))
    settings = StoreSettings(uri=str(tmp_path), flush_seconds=0.0)
    readiness = Readiness()

    async with running(
        run_sink(STORE, bus=on, settings=settings, readiness=readiness, clock=ManualClock())
    ):
        await eventually(lambda: committed(on, STORE.group, PARTITION) == 3)

    assert dead_letters_at_append == [2]
    assert sorted(dead_letter.offset for dead_letter in await dead_letters(on)) == [0, 1]
