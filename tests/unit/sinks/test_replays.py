"""Replayed events reach only the receiver of the sink that rejected them, once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable
from msgspec import json

from gpuledger.bus.protocol import Message, TopicPartition
from gpuledger.codec import encode
from gpuledger.keys import node_key
from gpuledger.ledger.families import INCIDENTS
from gpuledger.ledger.rows import EntryRow
from gpuledger.ledger.usage import COUNTERS
from gpuledger.records import ReplayedEvent
from gpuledger.runtime import Readiness
from gpuledger.store.commits import describe, valid_through_us
from gpuledger.store.query import count_rows
from gpuledger.topics import replay_group
from gpuledger_sinks.loop import run_sink
from gpuledger_sinks.registry import REMOTE_WRITE, ROWS, STORE, SinkKind
from gpuledger_sinks.settings import (
    RemoteWriteSettings,
    RowsSettings,
    StoreSettings,
)
from gpuledger_sinks.store.table import UsageTable
from tests.default_topics import EVENTS, REPLAY
from tests.default_topics import ROWS as ROWS_TOPIC
from tests.unit.sinks.builders import (
    NODE,
    SECOND_NS,
    START_NS,
    ManualClock,
    bus,
    committed,
    dead_letters,
    event,
    eventually,
    place_of,
    publish,
    running,
)
from tests.unit.sinks.receiver import Answer, Receiver, receiving
from tests.unit.sinks.remote_write.oracle import parse_compressed
from tests.unit.sinks.store.storing import offsets
from tests.unit.sinks.store.test_rollups import row

if TYPE_CHECKING:
    from pathlib import Path

    from gpuledger.bus.memory import MemoryBus
    from gpuledger.records import GpuEvent

TOO_LONG = Answer(400, "label too long", {"Content-Type": "text/plain"})
LATE = Answer(400, "out of order sample", {"Content-Type": "text/plain"})


async def replay(on: MemoryBus, *events: GpuEvent, group: str, first_offset: int = 0) -> None:
    """Write events to the replay topic, with offsets starting at `first_offset`."""
    async with on.producer() as producer:
        for place, each in enumerate(events):
            partition = place_of(each.node).partition
            replayed = ReplayedEvent(
                consumer=group, partition=partition, offset=first_offset + place, event=each
            )
            message = Message(node_key(each).encode(), encode(replayed), START_NS // 10**6)
            await producer.publish(REPLAY.name, partition, [message])


async def run_until_replayed(
    on: MemoryBus, kind: SinkKind, settings: object, *, group: str | None = None, ends: int
) -> None:
    """Run a sink until it has processed a number of records of the replay topic."""
    at = TopicPartition(REPLAY.name, place_of(NODE).partition)
    work = run_sink(
        kind, bus=on, settings=settings, readiness=Readiness(), clock=ManualClock(), group=group
    )
    async with running(work):
        await eventually(lambda: committed(on, replay_group(group or kind.group), at) == ends)


def to(receiver: Receiver, **changes: Any) -> RemoteWriteSettings:  # noqa: ANN401  # settings
    given: dict[str, Any] = {
        "url": f"{receiver.url}/write",
        "interval_seconds": 0,
        "protocol": "1.0",
    }
    return RemoteWriteSettings(**given | changes)


async def test_a_sink_processes_records_that_name_its_group_and_skips_the_others() -> None:
    on = bus()
    await replay(on, event(0), group="their-group")
    await replay(on, event(1), group=REMOTE_WRITE.group)
    async with receiving() as receiver:
        await run_until_replayed(on, REMOTE_WRITE, to(receiver), ends=2)
        assert len(receiver.received) == 1
        await run_until_replayed(on, REMOTE_WRITE, to(receiver), group="their-group", ends=2)
        assert len(receiver.received) == 2

    assert await dead_letters(on) == []
    assert committed(on, REMOTE_WRITE.group, place_of(NODE)) is None


async def test_a_replayed_event_has_the_gauges_that_the_sink_would_have_sent() -> None:
    sent: dict[str, Any] = {"pod_labels": ["team"]}
    async with receiving() as receiver:
        on = bus()
        await replay(on, event(0), group=REMOTE_WRITE.group)
        await run_until_replayed(on, REMOTE_WRITE, to(receiver, **sent), ends=1)
        replayed = [one for got in receiver.received for one in parse_compressed(got.body)]
    async with receiving() as receiver:
        on = bus()
        await publish(on, event(0))
        work = run_sink(
            REMOTE_WRITE,
            bus=on,
            settings=to(receiver, **sent),
            readiness=Readiness(),
            clock=ManualClock(),
        )
        async with running(work):
            await eventually(lambda: committed(on, REMOTE_WRITE.group, place_of(NODE)) == 1)
        at_once = [one for got in receiver.received for one in parse_compressed(got.body)]

    # Counters have advanced since, and lack nothing.
    of_use = {metric.name for metric in (*COUNTERS.metrics, *INCIDENTS.metrics)}
    assert sorted(replayed) == sorted(one for one in at_once if one.name not in of_use)


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        # The client repeats the request after one without samples, which is accepted.
        ((TOO_LONG, Answer(204), TOO_LONG), "rejected"),
        ((LATE,), "out_of_order"),
    ],
)
async def test_an_event_that_is_rejected_again_is_a_dead_letter_of_the_same_record(
    answers: tuple[Answer, ...], reason: str
) -> None:
    on = bus()
    await replay(on, event(0), event(1), group=REMOTE_WRITE.group, first_offset=40)
    async with receiving(*answers) as receiver:
        await run_until_replayed(on, REMOTE_WRITE, to(receiver), ends=2)

    (dead_letter,) = await dead_letters(on)
    assert (dead_letter.topic, dead_letter.partition, dead_letter.offset) == (*place_of(NODE), 40)
    assert (dead_letter.consumer, dead_letter.reason) == (REMOTE_WRITE.group, reason)
    assert dead_letter.value_base64 is not None


async def test_ticks_beyond_the_sinks_own_limits_are_rejected_without_being_sent() -> None:
    on = bus()
    await replay(
        on,
        event(1000),
        event(time_ns=START_NS - 1000 * SECOND_NS),
        group=REMOTE_WRITE.group,
    )
    async with receiving() as receiver:
        await run_until_replayed(on, REMOTE_WRITE, to(receiver, max_age_seconds=300), ends=2)

    assert receiver.received == []
    assert [dead_letter.reason for dead_letter in await dead_letters(on)] == ["future", "too_old"]


async def test_an_unavailable_receiver_is_waited_for() -> None:
    on = bus()
    await replay(on, event(0), group=REMOTE_WRITE.group)
    async with receiving(Answer(503), Answer(503)) as receiver:
        await run_until_replayed(on, REMOTE_WRITE, to(receiver), ends=1)

    assert len(receiver.received) == 3
    assert await dead_letters(on) == []


async def test_a_replayed_tick_ends_no_series_of_its_node() -> None:
    """One between other ticks, with a pod that they lack, and vice versa."""
    on = bus()
    await replay(on, event(0), event(5, entries=[], pods=[]), group=REMOTE_WRITE.group)
    async with receiving() as receiver:
        await run_until_replayed(on, REMOTE_WRITE, to(receiver), ends=2)

    sent = [one for got in receiver.received for one in parse_compressed(got.body)]
    assert [one for one in sent if one.value != one.value] == []  # a stale marker


async def test_rows_are_written_to_the_rows_topic() -> None:
    on = bus()
    await replay(on, event(0), event(1000), group=ROWS.group)
    await run_until_replayed(on, ROWS, RowsSettings(), ends=2)

    kept = on.kept(ROWS_TOPIC.name)
    assert {json.decode(one.value or b"", type=EntryRow).seq for one in kept} == {1000}
    assert [one.partition for one in kept] == [place_of(NODE).partition] * 2
    # The second one is too far in the future to be written.
    assert [dead_letter.reason for dead_letter in await dead_letters(on)] == ["future"]


async def test_the_store_has_each_event_once_however_often_it_is_replayed(tmp_path: Path) -> None:
    on = bus()
    settings = StoreSettings(uri=str(tmp_path), entries=True)
    await replay(on, event(0), event(0), group=STORE.group)
    await replay(on, event(0), event(1), group=STORE.group)
    await run_until_replayed(on, STORE, settings, ends=4)
    await replay(on, event(0), event(1), group=STORE.group)
    await run_until_replayed(on, STORE, settings, ends=6)

    # Two rows per event.
    assert offsets(tmp_path) == [0] * 2 + [1] * 2
    assert count_rows(str(tmp_path), name="usage") == 4


async def test_replayed_rows_do_not_change_the_completeness_of_a_store(tmp_path: Path) -> None:
    on, uri = bus(), str(tmp_path)
    table = UsageTable(store_uri=uri)
    table.load(["s"])
    marks = {"0": 7_000_000, "1": 5_000_000}
    commit_info = describe(valid_through=marks)
    table.append([row(1, 1, offset=0)], {"s": 0}, time_ms=1, commit_info=commit_info)
    await replay(on, event(0), group=STORE.group)
    await run_until_replayed(on, STORE, StoreSettings(uri=uri), ends=1)

    assert count_rows(uri, name="usage") == 3
    assert valid_through_us(DeltaTable(f"{uri}/usage").history(1)) == marks


async def test_an_event_of_a_day_that_is_not_stored_is_rejected_and_the_others_are_stored(
    tmp_path: Path,
) -> None:
    on = bus()
    ten_years_ns = 10 * 366 * 86_400 * SECOND_NS
    await replay(on, event(0), event(time_ns=START_NS - ten_years_ns), group=STORE.group)
    settings = StoreSettings(uri=str(tmp_path), entries=True)
    await run_until_replayed(on, STORE, settings, ends=2)

    assert offsets(tmp_path) == [0, 0]
    (dead_letter,) = await dead_letters(on)
    assert (dead_letter.topic, dead_letter.offset, dead_letter.reason) == (
        EVENTS.name,
        1,
        "too_old",
    )
