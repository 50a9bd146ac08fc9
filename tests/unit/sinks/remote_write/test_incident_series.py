"""The incident series of the remote-write sink: each counted once, after a 0, despite crashes."""

import math
from collections.abc import Iterable

import pytest
from prometheus_client import REGISTRY

from gpuledger.bus.memory import MemoryBus
from gpuledger.clock import NS_PER_HOUR
from gpuledger.errors import BusUnavailableError, FencedError
from gpuledger.ledger.families import INCIDENTS, XID_ERRORS
from gpuledger_sinks.registry import REMOTE_WRITE
from tests.default_topics import ATTRIBUTED_INCIDENTS
from tests.unit.sinks.builders import (
    BUS_TOPICS,
    GPU,
    NODE,
    SECOND_NS,
    START_NS,
    ManualClock,
    bus,
    committed,
    event,
    eventually,
    place_of,
    publish,
    running,
)
from tests.unit.sinks.receiver import Answer, Received, receiving
from tests.unit.sinks.remote_write.happened import incident, publish_incidents
from tests.unit.sinks.remote_write.oracle import parse_compressed
from tests.unit.sinks.remote_write.sending import dropped, is_committed, sink
from tests.unit.sinks.remote_write.torn_transactions import TornBus

(KIND,), (XID,) = INCIDENTS.metrics, XID_ERRORS.metrics
INCIDENTS_AT = place_of(NODE, ATTRIBUTED_INCIDENTS.name)
FIRST_MS = START_NS // 1_000_000


def reported(
    received: Iterable[Received], name: str = XID.name, **labels: str
) -> list[tuple[float, float]]:
    """Return the samples of such a series: seconds after the first tick, and value."""
    return [
        ((one.time_ms - FIRST_MS) / 1000, one.value)
        for request in received
        for one in parse_compressed(request.body)
        if one.name == name and all(one.label(label) == value for label, value in labels.items())
    ]


def is_counted(on: MemoryBus, number: int) -> bool:
    return committed(on, REMOTE_WRITE.group, INCIDENTS_AT) == number


async def test_an_xid_is_sent_after_a_0_and_every_kind_of_the_gpu_starts_at_0() -> None:
    on = bus()
    async with receiving() as receiver, running(sink(on, receiver)):
        await publish(on, event(0), event(10))
        await eventually(is_committed(on, 2))
        await publish_incidents(on, incident(10_500))
        await eventually(lambda: is_counted(on, 1))
        await publish(on, event(11))
        await eventually(is_committed(on, 3))
    assert reported(receiver.received, xid="79", gpu_uuid=GPU) == [(10.001, 0), (11, 1)]
    assert reported(receiver.received, KIND.name, kind="xid") == [(10, 0), (11, 1)]
    assert reported(receiver.received, KIND.name, kind="gpu_lost") == [(10, 0), (11, 0)]


async def test_an_incident_that_is_delivered_twice_is_counted_once() -> None:
    on, before = bus(), dropped("duplicate")
    one, another = incident(1), incident(2)
    async with receiving() as receiver:
        async with running(sink(on, receiver)):
            await publish(on, event(0))
            # Otherwise the next sink might send it; incidents then wait for their time.
            await eventually(is_committed(on, 1))
            await publish_incidents(on, one, another, one)
            await eventually(lambda: is_counted(on, 3))
        # The next sink recognizes them, too.
        async with running(sink(on, receiver)):
            await publish_incidents(on, another)
            await eventually(lambda: is_counted(on, 4))
            await publish(on, event(1))
            await eventually(is_committed(on, 2))
    assert reported(receiver.received)[-1] == (1, 2)
    assert dropped("duplicate") == before + 2


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("error", [BusUnavailableError("no answer"), FencedError("shut out")])
async def test_an_uncommitted_incident_is_not_sent_and_is_counted_once(
    error: Exception, *, is_done: bool
) -> None:
    on = TornBus(BUS_TOPICS)
    on.errors, on.is_done_all_the_same = [error] * 2, is_done
    await publish_incidents(on, incident(1), incident(2, xid=31))
    async with receiving() as receiver, running(sink(on, receiver)):
        await eventually(lambda: is_counted(on, 2))
        await publish(on, event(0), event(1))
        await eventually(is_committed(on, 2))
    for xid in ("79", "31"):
        values = [value for _, value in reported(receiver.received, xid=xid)]
        assert set(values) == {0, 1}
        assert values == sorted(values)


async def test_counters_continue_after_partitions_have_moved() -> None:
    on = bus()
    async with receiving() as receiver, running(sink(on, receiver)):
        await publish_incidents(on, incident(1))
        await publish(on, event(0))
        await eventually(is_committed(on, 1))
        async with running(sink(on, receiver)), running(sink(on, receiver)):
            await publish_incidents(on, incident(1_001))
            await eventually(lambda: is_counted(on, 2))
            await publish(on, event(1))
            await eventually(is_committed(on, 2))
        await publish_incidents(on, incident(1_002))
        await eventually(lambda: is_counted(on, 3))
        await publish(on, event(2))
        await eventually(is_committed(on, 3))
    values = [value for _, value in reported(receiver.received)]
    assert values == sorted(values)
    assert (values[0], values[-1]) == (0, 3)


async def test_a_receiver_that_rejects_incident_counters_costs_no_tick() -> None:
    on = bus()
    dead_letters_before = dead_letters()

    def answer(body: bytes) -> Answer:
        names = {one.name for one in parse_compressed(body)}
        return Answer(400, "no such series here") if KIND.name in names else Answer(204)

    async with receiving(by_body=answer) as receiver, running(sink(on, receiver)):
        await publish(on, event(0), event(10), event(20))
        await eventually(is_committed(on, 3))
    assert dead_letters() == dead_letters_before
    sent = [parse_compressed(request.body) for request in receiver.received]
    taken = [found for found in sent if KIND.name not in {one.name for one in found}]
    ticks = [one.time_ms for found in taken for one in found if one.name == "gpuledger_gpu_up"]
    assert {FIRST_MS, FIRST_MS + 10_000, FIRST_MS + 20_000} <= set(ticks)


def dead_letters() -> float:
    return sum(
        sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == "gpuledger_dead_letters_total"
    )


async def test_a_new_group_does_not_count_old_incidents() -> None:
    on, before = bus(), dropped("too_old")
    long_ago = incident(1, time_ns=START_NS - 2 * NS_PER_HOUR)
    await publish_incidents(on, long_ago, incident(2))
    async with receiving() as receiver, running(sink(on, receiver)):
        await eventually(lambda: is_counted(on, 2))
        await publish(on, event(0))
        await eventually(is_committed(on, 1))
        # From then on all are counted, because late ones are news.
        late = incident(3, time_ns=START_NS - 2 * NS_PER_HOUR)
        await publish_incidents(on, late)
        await eventually(lambda: is_counted(on, 3))
        await publish(on, event(1))
        await eventually(is_committed(on, 2))
    assert [value for _, value in reported(receiver.received)] == [0, 1, 2]
    assert dropped("too_old") == before + 1


async def test_the_incident_series_of_a_node_end_with_the_node() -> None:
    on, clock = bus(), ManualClock()
    async with receiving() as receiver, running(sink(on, receiver, clock=clock)):
        await publish_incidents(on, incident(1))
        await publish(on, event(0))
        await eventually(is_committed(on, 1))
        clock.now_ns += 61 * SECOND_NS
        await eventually(lambda: math.isnan(reported(receiver.received)[-1][1]))


async def test_the_first_incident_after_a_group_has_started_counts_however_late_it_is() -> None:
    on, clock = bus(), ManualClock()
    async with receiving() as receiver:
        async with running(sink(on, receiver, clock=clock)):
            await publish(on, *map(event, range(3)))
            await eventually(is_committed(on, 3))
        clock.now_ns += 2 * NS_PER_HOUR
        await publish_incidents(on, incident(60_000))
        async with running(sink(on, receiver, clock=clock)):
            await eventually(lambda: is_counted(on, 1))
            await publish(on, event(7200))
            await eventually(is_committed(on, 4))
    assert reported(receiver.received)[-1] == (7200, 1)
