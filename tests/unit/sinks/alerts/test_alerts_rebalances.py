"""Alerts of partitions that are lost and gained: the next owner sends the unsent ones."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Subscription
from gpuledger_sinks.registry import ALERTS
from tests.default_topics import ATTRIBUTED_INCIDENTS, EVENTS
from tests.unit.sinks.alerts.alerting import GatedClock, WaitingClock, publish_incidents, sink, xids
from tests.unit.sinks.builders import (
    NODE,
    SECOND_NS,
    START_NS,
    bus,
    committed,
    eventually,
    place_of,
    running,
)
from tests.unit.sinks.receiver import Answer, receiving


@asynccontextmanager
async def another_member(on: MemoryBus) -> AsyncIterator[None]:
    """Let another member join the group and take its share without processing it."""

    async def polls() -> None:
        topics = (EVENTS.name, ATTRIBUTED_INCIDENTS.name)
        async with on.consumer(
            Subscription(group=ALERTS.group, stage=ALERTS.name, topics=topics)
        ) as consumer:
            while True:
                await consumer.poll(timeout_seconds=0.01, max_records=1)
                if consumer.assignment():
                    joined.set()

    joined = asyncio.Event()
    async with running(polls()):
        await joined.wait()
        yield


NODES = [next(f"n{n}" for n in range(99) if place_of(f"n{n}").partition == at) for at in (0, 1)]
"""A node of each partition: of the first, which stays, and of the other, which is lost."""


STAYS, GOES = NODES


def assignments(logged: Sequence[Mapping[str, Any]]) -> int:
    return [line["event"] for line in logged].count("partitions_assigned")


@pytest.mark.parametrize("node", NODES)
async def test_alerts_that_no_alertmanager_accepted_are_sent_after_any_rebalance(node: str) -> None:
    on, clock, is_away = bus(), GatedClock(), {True}
    at = place_of(node, ATTRIBUTED_INCIDENTS.name)
    await publish_incidents(on, 79, node=node)
    async with receiving(by_body=lambda _: Answer(503 if is_away else 200)) as receiver:
        with capture_logs() as logged:
            async with running(sink(on, receiver, clock=clock)):
                await eventually(lambda: clock.slept)
                async with another_member(on):
                    await eventually(lambda: assignments(logged) == 2)
                    seen = len(receiver.received)
                    clock.gate.set()
                    await eventually(lambda: len(receiver.received) > seen + 5)
                    assert committed(on, ALERTS.group, at) is None
        is_away.clear()
        seen = len(receiver.received)
        async with running(sink(on, receiver)):
            await eventually(lambda: xids(receiver, since=seen) == {"79"})


async def test_all_incidents_of_a_topic_recreated_during_an_outage_are_sent() -> None:
    on, clock, is_away = bus(), GatedClock(), {True}
    at = place_of(NODE, ATTRIBUTED_INCIDENTS.name)
    await publish_incidents(on, 1, 2, 3, 4, 5)
    async with receiving(by_body=lambda _: Answer(503 if is_away else 200)) as receiver:
        with capture_logs() as logged:
            async with running(sink(on, receiver, clock=clock)):
                await eventually(lambda: clock.slept)
                on.recreate(ATTRIBUTED_INCIDENTS.name)
                await publish_incidents(on, 11, 12)
                await eventually(lambda: assignments(logged) == 2)
                is_away.clear()
                clock.gate.set()
                await eventually(lambda: committed(on, ALERTS.group, at))
                await eventually(lambda: "12" in xids(receiver))
        await publish_incidents(on, 21, 22, 23)
        async with running(sink(on, receiver)):
            await eventually(lambda: committed(on, ALERTS.group, at) == 5)

    assert xids(receiver) >= {"11", "12", "21", "22", "23"}


async def test_alerts_of_a_lost_partition_are_not_sent_again() -> None:
    on, clock = bus(), WaitingClock(START_NS + SECOND_NS)
    await publish_incidents(on, 48, node=STAYS)
    await publish_incidents(on, 79, node=GOES)
    async with receiving() as receiver, running(sink(on, receiver, clock=clock)):
        await eventually(lambda: xids(receiver) == {"48", "79"})
        async with another_member(on):
            seen = len(receiver.received)
            await publish_incidents(on, 49, node=STAYS)
            await eventually(lambda: len(receiver.received) > seen)
            clock.advance(61)
            await eventually(lambda: len(receiver.received) > seen + 1)

    assert xids(receiver, since=seen) == {"49"}
