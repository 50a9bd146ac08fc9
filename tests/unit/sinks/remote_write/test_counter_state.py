"""The state of counters on the bus: a sink continues from the commit of its predecessor."""

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Message, TopicPartition
from gpuledger.codec import decoder_of
from gpuledger.errors import BusUnavailableError, FencedError
from gpuledger.ledger.usage import COUNTERS
from gpuledger.records import (
    Category,
    Entry,
    EventContainer,
    GpuEvent,
    NodeCounters,
    PodDescription,
    PodState,
)
from gpuledger.runtime import Readiness
from gpuledger_sinks.registry import REMOTE_WRITE
from tests.unit.sinks.builders import (
    BUS_TOPICS,
    NODE,
    PARTITIONS,
    SECOND_NS,
    START_NS,
    ManualClock,
    books,
    bus,
    committed,
    entry,
    event,
    eventually,
    place_of,
    publish,
    reading,
    running,
)
from tests.unit.sinks.receiver import Received, Receiver, receiving
from tests.unit.sinks.remote_write import sending
from tests.unit.sinks.remote_write.oracle import parse_compressed
from tests.unit.sinks.remote_write.torn_transactions import TimedBus, TornBus

AT = place_of(NODE)
STATE = TopicPartition(bus().topics.counters.name, AT.partition)
BUSY = COUNTERS.metrics[0].name


def sink(
    on: MemoryBus,
    receiver: Receiver,
    **changes: Any,  # noqa: ANN401  # as `sending` takes them
) -> asyncio.Future[None]:
    return sending.sink(on, receiver, **{"interval_seconds": 5, **changes})


def busy_seconds(received: Sequence[Received]) -> list[tuple[int, float]]:
    """Return the samples of the container's counter: seconds after the first tick, and value."""
    first_ms = START_NS // 1_000_000
    return [
        ((one.time_ms - first_ms) // 1000, one.value)
        for request in received
        for one in parse_compressed(request.body)
        if one.name == BUSY and one.label("category") == "pod"
    ]


def is_committed(on: MemoryBus, offset: int, group: str = REMOTE_WRITE.group) -> Callable[[], bool]:
    return lambda: committed(on, group, AT) == offset


async def state(on: MemoryBus) -> list[tuple[str, NodeCounters | None]]:
    """Return the keys and records of the state topic, in their order."""
    decode = decoder_of(STATE.topic, NodeCounters).decode
    found = []
    async with on.reader() as reader:
        span = (await reader.spans(STATE.topic))[STATE]
        async for records in reader.read(STATE, span):
            found += [
                ((one.key or b"").decode(), None if one.value is None else decode(one.value))
                for one in records
            ]
    return found


async def test_the_committed_offset_is_before_the_open_interval() -> None:
    on = bus()
    await publish(on, *(event(tick) for tick in range(1, 9)))
    async with receiving() as receiver, running(sink(on, receiver)):
        # The sixth tick closes the interval of ticks 1 to 5.
        await eventually(is_committed(on, 5))
        assert busy_seconds(receiver.received) == [(0, 0.0), (5, 2.5)]
    ((key, counted),) = await state(on)
    assert key == f"{REMOTE_WRITE.group}/default/{NODE}"
    assert counted is not None
    assert [boot.seq for boot in counted.boots] == [event(5).seq]


async def test_the_next_sink_continues_counters_and_counts_each_tick_once() -> None:
    on = bus()
    await publish(on, *(event(tick) for tick in range(1, 9)))
    async with receiving() as receiver:
        async with running(sink(on, receiver)):
            await eventually(is_committed(on, 5))
        before = len(receiver.received)
        await publish(on, *(event(tick) for tick in range(9, 12)))
        async with running(sink(on, receiver)):
            await eventually(is_committed(on, 10))
    assert busy_seconds(receiver.received[before:]) == [(10, 5.0)]


async def test_counters_continue_if_names_have_their_maximum_length() -> None:
    on = bus()
    allocated_to = [
        PodDescription(state=PodState.NAMED, namespace="n" * 63, name="p" * 253),
    ]
    entries = [entry(), entry(Category.IDLE, allocation=0, allocated_ns=SECOND_NS)]
    ticks = [event(tick, entries=entries, allocated_to=allocated_to) for tick in range(1, 12)]
    await publish(on, *ticks[:8])
    async with receiving() as receiver:
        async with running(sink(on, receiver)):
            await eventually(is_committed(on, 5))
        before = len(receiver.received)
        await publish(on, *ticks[8:])
        async with running(sink(on, receiver)):
            await eventually(is_committed(on, 10))
    assert busy_seconds(receiver.received[before:]) == [(10, 5.0)]


async def test_a_node_with_more_usage_waiting_for_names_than_fits_is_counted_without_names() -> (
    None
):
    on = bus()
    refs = [
        EventContainer(container_id=f"{number:064}", pod=number, name=None)
        for number in range(3000)
    ]
    pods = [
        PodDescription(uid=f"{number:036}", state=PodState.PENDING) for number in range(len(refs))
    ]
    entries = [
        Entry(category=Category.POD, container=number, busy_ns=SECOND_NS // 10)
        for number in range(len(refs))
    ]
    of_gpus = [
        books(reading(uuid=f"GPU-{gpu:036}"), *entries[750 * gpu : 750 * (gpu + 1)])
        for gpu in range(4)
    ]
    changes: dict[str, Any] = {"gpus": of_gpus, "pods": pods, "containers": refs}
    await publish(on, *(event(tick, **changes) for tick in range(1, 7)))
    async with receiving() as receiver, running(sink(on, receiver)):
        await eventually(is_committed(on, 5), within_seconds=120)
    ((_, counted),) = await state(on)
    assert counted is not None
    assert counted.waiting is None


GAUGES = [
    "gpuledger_pod_gpu_busy_ratio",
    "gpuledger_pod_gpu_busy_max_ratio",
    "gpuledger_pod_gpu_memory_bytes",
    "gpuledger_pod_gpu_power_watts",
]


@pytest.mark.parametrize("is_gone", [True, False])
@pytest.mark.parametrize("name", GAUGES)
async def test_the_next_interval_ends_the_gauges_of_a_pod_that_ended_while_no_sink_ran(
    name: str, *, is_gone: bool
) -> None:
    on = bus()
    later: dict[str, Any] = {"entries": [entry(Category.IDLE)], "pods": []} if is_gone else {}
    await publish(on, *(event(tick) for tick in range(1, 6)), event(6, **later))
    async with receiving() as receiver:
        async with running(sink(on, receiver)):
            await eventually(is_committed(on, 5))
        before = len(receiver.received)
        await publish(on, *(event(tick, **later) for tick in range(7, 12)))
        async with running(sink(on, receiver)):
            await eventually(is_committed(on, 10))
    sent = [one for request in receiver.received[before:] for one in parse_compressed(request.body)]
    (found,) = [one for one in sent if one.name == name and one.label("pod") == "train-0"]
    assert math.isnan(found.value) == is_gone
    first = [one for one in parse_compressed(receiver.received[0].body) if one.name == name]
    assert {one.labels for one in first} == {found.labels}


@pytest.mark.parametrize("is_gone", [True, False])
async def test_the_next_interval_ends_the_gauges_of_a_job_that_ended_while_no_sink_ran(
    *, is_gone: bool
) -> None:
    on, name = bus(), "gpuledger_category_gpu_busy_ratio"
    job: dict[str, Any] = {"entries": [entry(Category.JOB, job_id="7"), entry(Category.IDLE)]}
    later: dict[str, Any] = {"entries": [entry(Category.IDLE)]} if is_gone else job
    await publish(on, *(event(tick, **job) for tick in range(1, 6)), event(6, **later))
    async with receiving() as receiver:
        async with running(sink(on, receiver)):
            await eventually(is_committed(on, 5))
        before = len(receiver.received)
        await publish(on, *(event(tick, **later) for tick in range(7, 12)))
        async with running(sink(on, receiver)):
            await eventually(is_committed(on, 10))
    sent = [one for request in receiver.received[before:] for one in parse_compressed(request.body)]
    (found,) = [one for one in sent if one.name == name and one.label("job_id") == "7"]
    assert math.isnan(found.value) == is_gone


async def test_another_group_counts_separately() -> None:
    on = bus()
    await publish(on, *(event(tick) for tick in range(1, 7)))
    async with receiving() as first, receiving() as second:
        async with running(sink(on, first)), running(sink(on, second, group="gpuledger-eu")):
            await eventually(is_committed(on, 5))
            await eventually(is_committed(on, 5, "gpuledger-eu"))
        assert busy_seconds(first.received) == busy_seconds(second.received) != []
    assert {key.partition("/")[0] for key, _ in await state(on)} == {
        REMOTE_WRITE.group,
        "gpuledger-eu",
    }


async def test_an_interval_without_a_later_tick_closes_after_a_while() -> None:
    on, clock = bus(), ManualClock()
    await publish(on, event(1), event(2))
    async with receiving() as receiver, running(sink(on, receiver, clock=clock)):
        await eventually(lambda: REMOTE_WRITE.group is not None)
        while not receiver.received:
            clock.now_ns += SECOND_NS
            await asyncio.sleep(0.01)
        await eventually(is_committed(on, 2))
        assert busy_seconds(receiver.received)[:2] == [(0, 0.0), (2, 1.0)]


async def test_an_unreadable_state_record_affects_only_its_node() -> None:
    on, other = bus(), next(n for n in map(str, range(99)) if n != NODE and is_beside(n))
    for node, value in ((NODE, b"{"), (other, None)):
        await write_state(on, f"{REMOTE_WRITE.group}/default/{node}", value)
    await publish(on, *(event(tick, node=node) for tick in range(1, 7) for node in (NODE, other)))
    with capture_logs() as logs:
        async with receiving() as receiver, running(sink(on, receiver)):
            await eventually(lambda: (committed(on, REMOTE_WRITE.group, AT) or 0) >= 10)
    assert [line["event"] for line in logs].count("counters_skipped") == 1
    assert {value for _, value in busy_seconds(receiver.received)} == {0.0, 2.5}


def is_beside(node: str) -> bool:
    return place_of(node) == AT


async def write_state(on: MemoryBus, key: str, value: bytes | None) -> None:
    async with on.producer() as producer:
        await producer.publish(*STATE, [Message(key=key.encode(), value=value, timestamp_ms=0)])


@pytest.mark.parametrize("key", ["gpuledger-remote-write/x/y/z", "other/default/n", "nothing", ""])
async def test_records_of_other_groups_are_skipped(key: str) -> None:
    on = bus()
    await write_state(on, key, b"{")
    await publish(on, *(event(tick) for tick in range(1, 7)))
    async with receiving() as receiver, running(sink(on, receiver)):
        await eventually(is_committed(on, 5))
    assert busy_seconds(receiver.received) == [(0, 0.0), (5, 2.5)]


async def test_counters_of_nodes_that_are_long_gone_are_removed() -> None:
    on, clock = bus(), ManualClock()
    gone = next(n for n in map(str, range(99)) if is_beside(n))
    async with receiving() as receiver:
        for committed_offset, tick in enumerate((event(0, node=gone), event(1)), start=1):
            await publish(on, tick)
            async with running(sink(on, receiver, clock=clock, interval_seconds=0)):
                await eventually(is_committed(on, committed_offset))
            clock.now_ns += 3 * 86_400 * SECOND_NS
        await publish(on, event(2))
        async with running(sink(on, receiver, clock=clock, interval_seconds=0)):
            await eventually(is_committed(on, 3))
    assert (f"{REMOTE_WRITE.group}/default/{gone}", None) in await state(on)


@pytest.mark.parametrize("days", [-20_000, -3, 3, 3_000])
async def test_counters_of_a_node_with_a_wrong_clock_continue_independently_of_others(
    days: int,
) -> None:
    on = TimedBus(BUS_TOPICS)
    wrong = next(n for n in map(str, range(99)) if is_beside(n))
    shift_ns = days * 86_400 * SECOND_NS
    max_future = {"max_future_seconds": 1e12}

    def ticks(*numbers: int) -> list[GpuEvent]:
        found = []
        for number in numbers:
            of_wrong = event(number, node=wrong)
            found += [event(number), replace(of_wrong, time_ns=of_wrong.time_ns + shift_ns)]
        return found

    received = []
    for numbers in ((1, 2, 3), (4, 5, 6)):
        await publish(on, *ticks(*numbers))
        async with receiving() as receiver:
            async with running(sink(on, receiver, interval_seconds=0, **max_future)):
                await eventually(is_committed(on, 2 * numbers[-1]))
            received += receiver.received
    assert sorted(value for _, value in busy_seconds(received))[-2:] == [3.0, 3.0]


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("error", [BusUnavailableError("no answer"), FencedError("shut out")])
async def test_an_uncommitted_batch_is_processed_again_and_counted_once(
    error: Exception, *, is_done: bool
) -> None:
    on = TornBus(BUS_TOPICS)
    on.errors, on.is_done_all_the_same = [error] * 2, is_done
    await publish(on, *(event(tick) for tick in range(1, 7)))
    async with receiving() as receiver, running(sink(on, receiver)):
        await eventually(is_committed(on, 5))
        await publish(on, *(event(tick) for tick in range(7, 12)))
        await eventually(is_committed(on, 10))
        await eventually(lambda: (10, 5.0) in busy_seconds(receiver.received))
    assert set(busy_seconds(receiver.received)) == {(0, 0.0), (5, 2.5), (10, 5.0)}
    assert not on.errors or is_done


async def test_a_sink_waits_for_its_state_topic_and_reports_this() -> None:
    counters = bus().topics.counters.name
    on = MemoryBus([topic for topic in BUS_TOPICS if topic.name != counters])
    readiness = Readiness()
    await publish(on, *(event(tick) for tick in range(1, 7)))
    async with receiving() as receiver, running(sink(on, receiver, readiness=readiness)):
        check = readiness.check("remote_write.counters")
        await eventually(lambda: check.has_failed)
        assert counters in check.detail
        on.create([topic for topic in BUS_TOPICS if topic.name == counters])
        await eventually(is_committed(on, 5))
        assert not check.has_failed
    assert busy_seconds(receiver.received) == [(0, 0.0), (5, 2.5)]


async def test_a_sink_without_a_partition_is_ready() -> None:
    on, readiness = bus(), Readiness()
    async with receiving() as receiver, AsyncExitStack() as stack:
        for _ in range(PARTITIONS):
            _ = await stack.enter_async_context(running(sink(on, receiver)))
        _ = await stack.enter_async_context(running(sink(on, receiver, readiness=readiness)))
        check = readiness.check("remote_write.kafka")
        await eventually(lambda: "more members than partitions" in check.detail)
        assert readiness.check("remote_write.counters").is_ok


async def test_a_node_whose_clock_does_not_advance_blocks_no_offset() -> None:
    on = bus()
    stuck = next(n for n in map(str, range(99)) if is_beside(n))
    for tick in range(60):
        await publish(on, event(tick), event(tick, node=stuck, time_ns=START_NS))
    async with receiving() as receiver, running(sink(on, receiver)):
        await eventually(lambda: (committed(on, REMOTE_WRITE.group, AT) or 0) >= 90)


async def test_a_state_that_is_written_again_is_not_removed_as_outdated() -> None:
    on, clock = bus(), ManualClock()
    back = next(n for n in map(str, range(99)) if is_beside(n))
    async with receiving() as receiver:
        for tick in (event(0, node=back), event(1), event(2, node=back)):
            await publish(on, tick)
            before = committed(on, REMOTE_WRITE.group, AT) or 0
            async with running(sink(on, receiver, clock=clock, interval_seconds=0)):
                await eventually(is_committed(on, before + 1))
            clock.now_ns += 3 * 86_400 * SECOND_NS
    newest = dict(await state(on))
    assert newest[f"{REMOTE_WRITE.group}/default/{back}"] is not None


async def test_if_the_newest_state_of_a_node_is_unreadable_no_older_one_is_used() -> None:
    on = bus()
    await publish(on, *(event(tick) for tick in range(1, 7)))
    async with receiving() as receiver:
        async with running(sink(on, receiver)):
            await eventually(is_committed(on, 5))
        await write_state(on, f"{REMOTE_WRITE.group}/default/{NODE}", b"{")
        before = len(receiver.received)
        await publish(on, *(event(tick) for tick in range(7, 12)))
        async with running(sink(on, receiver)):
            await eventually(is_committed(on, 10))
    assert busy_seconds(receiver.received[before:])[-1] == (10, 2.5)
