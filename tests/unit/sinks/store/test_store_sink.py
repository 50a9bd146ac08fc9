"""The store sink over the bus in memory: each entry once, whatever is repeated or lost."""

import asyncio
import base64
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import write_deltalake
from structlog.testing import capture_logs
from typing_extensions import override

from gpuledger.bus.protocol import (
    Message,
    Producer,
    TopicPartition,
)
from gpuledger.codec import encode
from gpuledger.errors import BusUnavailableError
from gpuledger.records import Category, GpuEvent
from gpuledger.runtime import Readiness
from gpuledger_sinks.registry import STORE
from gpuledger_sinks.store.table import EntriesTable, StaleTableError
from tests.default_topics import DEAD_LETTERS, EVENTS
from tests.unit.sinks.builders import (
    PARTITIONS,
    SECOND_NS,
    START_NS,
    ManualClock,
    bus,
    committed,
    dead_letters,
    entry,
    event,
    eventually,
    place_of,
    publish,
    running,
    set_back,
    settlement,
)
from tests.unit.sinks.store.storing import (
    AT,
    STREAM,
    KeepingBus,
    a_row,
    commits_of_rows,
    holds_rows,
    is_committed,
    keeping,
    lose,
    offsets,
    query,
    store,
)


async def test_a_query_sums_the_usage_of_the_events(tmp_path: Path) -> None:
    on = bus()
    await publish(on, *(event(tick, entries=[entry(busy_ns=250_000_000)]) for tick in range(8)))

    async with running(store(tmp_path, on)):
        await eventually(is_committed(on, 8))

    sql = "select namespace, pod, sum(busy_seconds), count(*) from {entries} group by all"
    assert query(tmp_path, sql) == [("research", "train-0", 2.0, 8)]


async def test_a_query_sums_late_adjustments_for_processes_that_ended(tmp_path: Path) -> None:
    """On the day of their ticks; the sum over all categories is unchanged."""
    on, midnight_ns = bus(), START_NS - START_NS % (86_400 * SECOND_NS) + 86_400 * SECOND_NS
    nobodys = entry(Category.UNATTRIBUTED, busy_ns=500_000_000)
    settled = settlement(250_000_000, until_time_ns=midnight_ns - SECOND_NS)
    await publish(on, event(entries=[nobodys], time_ns=midnight_ns, late_adjustments=[settled]))

    async with running(store(tmp_path, on)):
        await eventually(is_committed(on, 1))

    sql = "select category, event_date::varchar, sum(busy_seconds) from {entries} group by all"
    assert query(tmp_path, f"{sql} order by all") == [
        ("pod", "2026-09-21", 0.25),
        ("unattributed", "2026-09-21", -0.25),
        ("unattributed", "2026-09-22", 0.5),
    ]


async def test_unwritten_rows_are_written_when_the_sink_ends(tmp_path: Path) -> None:
    on = bus()
    await publish(on, event(0, entries=[entry()]), event(1, entries=[entry()]))
    async with running(store(tmp_path, on, flush_seconds=3600.0, readiness=(at := Readiness()))):
        await eventually(holds_rows(at))

    assert offsets(tmp_path) == [0, 1]
    assert committed(on, STORE.group, AT) == 2


async def test_stored_rows_are_not_added_again_if_the_commit_in_kafka_was_lost(
    tmp_path: Path,
) -> None:
    on = bus()
    await publish(on, event(0, entries=[entry()]), event(1, entries=[entry()]))
    async with running(store(tmp_path, on)):
        await eventually(is_committed(on, 2))
    await set_back(on, STORE.group, {AT: 0})
    await publish(on, event(2, entries=[entry()]))

    async with running(store(tmp_path, on)):
        await eventually(is_committed(on, 3))

    assert offsets(tmp_path) == [0, 1, 2]


async def test_a_commit_in_kafka_ahead_of_the_table_loses_nothing(tmp_path: Path) -> None:
    on = bus()
    await publish(on, event(0, entries=[entry()]), event(1, entries=[entry()]))
    async with running(store(tmp_path / "other", on)):
        await eventually(is_committed(on, 2))

    async with running(store(tmp_path / "new", on)):
        await eventually(lambda: EntriesTable(store_uri=str(tmp_path / "new")).load([STREAM]))

    assert offsets(tmp_path / "new") == [0, 1]


async def test_a_tick_published_twice_is_one_row(tmp_path: Path) -> None:
    on = bus()
    await publish(on, *(event(tick, entries=[entry()]) for tick in (0, 1, 0, 1, 2)))

    async with running(store(tmp_path, on)):
        await eventually(is_committed(on, 5))

    assert offsets(tmp_path) == [0, 1, 4]


@pytest.mark.parametrize(
    ("bad", "reason", "detail"),
    [
        (b"{", "undecodable", "gpuledger.events.v1"),
        (event(1, entries=[entry(), entry(allocation=3)]), "invalid", "allocation: position 3"),
    ],
)
async def test_an_event_that_cannot_be_stored_is_a_dead_letter_as_a_whole_and_the_stream_continues(
    bad: bytes | GpuEvent, reason: str, detail: str, tmp_path: Path
) -> None:
    on = bus()
    await publish(on, event(0, entries=[entry()]), bad, event(2, entries=[entry()]))

    async with running(store(tmp_path, on)):
        await eventually(is_committed(on, 3))

    assert offsets(tmp_path) == [0, 2]
    (dead_letter,) = await dead_letters(on)
    assert (dead_letter.topic, dead_letter.partition, dead_letter.offset) == (*AT, 1)
    assert (dead_letter.reason, dead_letter.consumer) == (reason, STORE.group)
    assert detail in dead_letter.detail
    assert base64.b64decode(dead_letter.value_base64 or "") == (
        bad if isinstance(bad, bytes) else encode(bad)
    )


async def test_two_sinks_share_the_partitions_and_repeat_nothing(tmp_path: Path) -> None:
    on = bus()
    nodes = [f"node-{number}" for number in range(6)]
    assert len({place_of(node) for node in nodes}) == 2
    async with running(store(tmp_path, on)), running(store(tmp_path, on)):
        for tick in range(10):
            await publish(on, *(event(tick, node=node, entries=[entry()]) for node in nodes))
        rows = 60
        sql = "select count(*), count(distinct (kafka_partition, kafka_offset)) from {entries}"
        await eventually(
            lambda: (
                EntriesTable(store_uri=str(tmp_path)).load([STREAM])
                and query(tmp_path, sql) == [(rows, rows)]
            )
        )


def test_a_writer_that_lost_its_partition_is_rejected(tmp_path: Path) -> None:
    zombie, owner = (EntriesTable(store_uri=str(tmp_path)) for _ in range(2))
    zombie.load([STREAM])
    owner.load([STREAM])
    owner.append(a_row(0), {STREAM: 0}, time_ms=0)

    with pytest.raises(StaleTableError):
        zombie.append(a_row(0), {STREAM: 0}, time_ms=0)

    assert offsets(tmp_path) == [0]
    assert zombie.load([STREAM]) == {STREAM: 0}


def test_rows_are_rejected_if_others_were_appended_since_they_were_read(tmp_path: Path) -> None:
    """Even if a later update has loaded the table again: a thread may start late."""
    zombie, owner = (EntriesTable(store_uri=str(tmp_path)) for _ in range(2))
    zombie.load([STREAM])
    after = zombie.last_offsets([STREAM])
    owner.load([STREAM])
    owner.append(a_row(0), {STREAM: 0}, time_ms=0)
    zombie.load([STREAM])

    with pytest.raises(StaleTableError):
        zombie.append([*a_row(0), *a_row(1)], {STREAM: 1}, time_ms=0, after=after)

    assert offsets(tmp_path) == [0]


async def test_the_next_offset_is_read_only_after_the_previous_write_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, begun = threading.Event(), threading.Event()

    def waiting(*args: Any, **options: Any) -> None:  # noqa: ANN401  # deltalake's own
        begun.set()
        goes_on.wait()
        write_deltalake(*args, **options)

    monkeypatch.setattr("gpuledger_sinks.store.table.write_deltalake", waiting)
    on, clock = keeping(), ManualClock()
    await publish(on, event(0, entries=[entry()]))
    async with running(store(tmp_path, on, clock=clock)):
        await eventually(begun.is_set)
        # The consumer is reopened while a write of the previous one is in progress.
        before = on.newest
        before.fails = 8
        await eventually(lambda: on.newest is not before)
        await publish(on, event(1, entries=[entry()]))
        asyncio.get_running_loop().call_later(0.3, goes_on.set)
        await eventually(is_committed(on, 2))

    assert offsets(tmp_path) == [0, 1]


async def test_rows_not_written_before_a_partition_is_lost_are_read_again_for_all_others(
    tmp_path: Path,
) -> None:
    on = keeping()
    goes, stays = (
        next(f"n{n}" for n in range(99) if place_of(f"n{n}").partition == at) for at in (0, 1)
    )
    async with running(store(tmp_path, on)):
        await publish(on, event(0, node=stays, entries=[entry()]))
        await eventually(lambda: committed(on, STORE.group, place_of(stays)) == 1)
    async with running(store(tmp_path, on, flush_seconds=1.0, readiness=(at := Readiness()))):
        await publish(on, event(1, node=stays, entries=[entry()]))
        await eventually(holds_rows(at))
        undo = lose(tmp_path)
        with capture_logs() as logged:
            on.newest.gives_up.append(place_of(goes))
            await eventually(lambda: "commit_skipped" in {line["event"] for line in logged})
        undo()
        await eventually(lambda: committed(on, STORE.group, place_of(stays)) == 2)

    assert offsets(tmp_path) == [0, 1]


class BusWithoutDeadLetters(KeepingBus):
    """A bus that rejects dead letters until the newest consumer has lost a partition."""

    def __init__(self, *, gives_up: TopicPartition, refusals: int) -> None:
        super().__init__([replace(EVENTS, partitions=PARTITIONS), DEAD_LETTERS])
        self.gives_up, self.refusals = gives_up, refusals

    @override
    @asynccontextmanager
    async def producer(self) -> AsyncIterator[Producer]:
        async with super().producer() as producer:
            yield _ProducerWithoutDeadLetters(producer, self)


class _ProducerWithoutDeadLetters:
    def __init__(self, inner: Producer, on: BusWithoutDeadLetters) -> None:
        self._inner, self._on = inner, on

    async def publish(self, topic: str, partition: int, messages: Sequence[Message]) -> None:
        if topic == DEAD_LETTERS.name and self._on.refusals:
            self._on.refusals -= 1
            self._on.newest.gives_up = [self._on.gives_up] if self._on.refusals else []
            raise BusUnavailableError("there is no such topic")
        await self._inner.publish(topic, partition, messages)


async def test_dead_letters_are_not_doubled_if_their_partition_is_read_again_after_another_is_lost(
    tmp_path: Path,
) -> None:
    other = TopicPartition(EVENTS.name, (AT.partition + 1) % PARTITIONS)
    on = BusWithoutDeadLetters(gives_up=other, refusals=2)
    await publish(on, event(0, entries=[entry()]), b"{", event(2, entries=[entry()]))

    async with running(store(tmp_path, on, clock=ManualClock(), flush_seconds=60.0, flush_rows=3)):
        await eventually(lambda: not on.refusals)
        await publish(on, event(3, entries=[entry()]), event(4, entries=[entry()]))
        await eventually(is_committed(on, 5))

    assert offsets(tmp_path) == [0, 2, 3, 4]
    assert [dead_letter.offset for dead_letter in await dead_letters(on)] == [1]


async def test_rows_are_written_at_the_latest_when_they_reach_a_size(tmp_path: Path) -> None:
    """Even within a poll; each commit has the offsets of its rows."""
    on = bus()
    await publish(on, *(event(tick, entries=[entry()]) for tick in range(5)))

    async with running(store(tmp_path, on, flush_seconds=3600.0, flush_bytes=5_000)):
        await eventually(is_committed(on, 4))

    assert offsets(tmp_path) == [0, 1, 2, 3, 4]
    assert commits_of_rows(tmp_path) == [2, 2, 1]
