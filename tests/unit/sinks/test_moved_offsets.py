"""Offsets of a sink that another program has set while the sink was not running."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import TopicPartition
from gpuledger.runtime import Readiness
from gpuledger_sinks.loop import run_sink
from gpuledger_sinks.registry import ALERTS, REMOTE_WRITE, ROWS, STORE, SinkKind
from gpuledger_sinks.settings import RowsSettings
from tests.default_topics import ATTRIBUTED_INCIDENTS
from tests.unit.sinks.alerts import alerting
from tests.unit.sinks.builders import (
    NODE,
    ManualClock,
    bus,
    committed,
    event,
    eventually,
    place_of,
    publish,
    running,
)
from tests.unit.sinks.receiver import receiving
from tests.unit.sinks.remote_write import sending
from tests.unit.sinks.store import storing

AT, AT_INCIDENTS = place_of(NODE), place_of(NODE, ATTRIBUTED_INCIDENTS.name)
NONE_MISSED = "no record was missed"


@asynccontextmanager
async def sinking(kind: SinkKind, on: MemoryBus, folder: Path) -> AsyncIterator[Readiness]:
    """Run a sink of this kind."""
    readiness = Readiness()
    async with receiving() as receiver:
        works: dict[str, Callable[[], Awaitable[None]]] = {
            REMOTE_WRITE.name: lambda: sending.sink(on, receiver, readiness=readiness),
            ALERTS.name: lambda: alerting.sink(on, receiver, readiness=readiness),
            STORE.name: lambda: storing.store(folder, on, readiness=readiness),
            ROWS.name: lambda: run_sink(
                ROWS, bus=on, settings=RowsSettings(), readiness=readiness, clock=ManualClock()
            ),
        }
        async with running(works[kind.name]()):
            yield readiness


async def is_committed(on: MemoryBus, kind: SinkKind, at: TopicPartition, offset: int) -> None:
    """Wait until the sink itself has committed this offset."""
    await eventually(
        lambda: committed(on, kind.group, at) == offset and not on.is_moved(kind.group, at)
    )


def gaps(kind: SinkKind, readiness: Readiness) -> str:
    return readiness.check(f"{kind.name}.gaps").detail


async def publish_some(on: MemoryBus, at: TopicPartition, count: int, *, first: int = 0) -> None:
    if at == AT:
        await publish(on, *(event(tick) for tick in range(first, first + count)))
    else:
        await alerting.publish_incidents(on, *range(70 + first, 70 + first + count))


@pytest.mark.parametrize(
    ("kind", "at", "missed"),
    [
        (REMOTE_WRITE, AT, "from offset 2 to offset 4: 2 offsets (moved"),
        (ROWS, AT, "before offset 4: an unknown number of records (moved"),
        (ALERTS, AT_INCIDENTS, "before offset 4: an unknown number of records (moved"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
async def test_an_offset_that_was_moved_forward_is_a_gap_once(
    tmp_path: Path, kind: SinkKind, at: TopicPartition, missed: str
) -> None:
    on = bus()
    await publish_some(on, at, 2)
    async with sinking(kind, on, tmp_path):
        await is_committed(on, kind, at, 2)
    await publish_some(on, at, 2, first=2)
    on.move_offset(kind.group, at, 4)

    async with sinking(kind, on, tmp_path) as readiness:
        await is_committed(on, kind, at, 4)
        assert missed in gaps(kind, readiness)
    async with sinking(kind, on, tmp_path) as readiness:
        await publish_some(on, at, 1, first=4)
        await is_committed(on, kind, at, 5)
        assert gaps(kind, readiness) == NONE_MISSED


async def test_the_store_skips_nothing_because_it_continues_after_its_own_rows(
    tmp_path: Path,
) -> None:
    on = bus()
    await publish_some(on, AT, 2)
    async with sinking(STORE, on, tmp_path):
        await is_committed(on, STORE, AT, 2)
    for offset in (4, 0):
        await publish_some(on, AT, 2, first=2 if offset else 4)
        on.move_offset(STORE.group, AT, offset)
        async with sinking(STORE, on, tmp_path) as readiness:
            await is_committed(on, STORE, AT, 4 if offset else 6)
            assert gaps(STORE, readiness) == NONE_MISSED
    assert storing.offsets(tmp_path) == sorted([*range(6), *range(6)])


async def test_counters_skip_what_they_include_if_an_offset_was_moved_back(tmp_path: Path) -> None:
    on = bus()
    await publish_some(on, AT, 3)
    async with sinking(REMOTE_WRITE, on, tmp_path):
        await is_committed(on, REMOTE_WRITE, AT, 3)
    on.move_offset(REMOTE_WRITE.group, AT, 1)
    before = sending.dropped("duplicate")

    async with sinking(REMOTE_WRITE, on, tmp_path) as readiness:
        await is_committed(on, REMOTE_WRITE, AT, 3)
        assert gaps(REMOTE_WRITE, readiness) == NONE_MISSED
    assert sending.dropped("duplicate") == before + 2


async def test_a_new_group_of_remote_write_begins_where_its_offset_was_set_without_a_gap(
    tmp_path: Path,
) -> None:
    """docs/guides/kubernetes.md describes this for a second receiver."""
    on = bus()
    await publish_some(on, AT, 3)
    on.move_offset(REMOTE_WRITE.group, AT, 2)

    async with sinking(REMOTE_WRITE, on, tmp_path) as readiness:
        await is_committed(on, REMOTE_WRITE, AT, 3)
        assert gaps(REMOTE_WRITE, readiness) == NONE_MISSED
