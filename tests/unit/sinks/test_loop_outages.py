"""The consume loop without brokers, topics or permissions, and its checks."""

from collections.abc import (
    AsyncIterator,
    Mapping,
)
from contextlib import asynccontextmanager

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs
from typing_extensions import override

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.memory_consumer import MemoryConsumer
from gpuledger.bus.protocol import (
    Consumer,
    Polled,
    Subscription,
    TopicPartition,
)
from gpuledger.errors import BusUnavailableError
from gpuledger.records import GpuEvent
from gpuledger.runtime import Check, CheckSeverity, Readiness
from gpuledger.topics import Topic
from tests.default_topics import DEAD_LETTERS, EVENTS
from tests.unit.sinks.builders import (
    BUS_TOPICS,
    PARTITIONS,
    SECOND_NS,
    START_NS,
    ManualClock,
    bus,
    event,
    eventually,
    publish,
    running,
)
from tests.unit.sinks.consuming import AT, Recorder, consuming, flaky, is_committed


@pytest.mark.parametrize(
    ("failures", "opened"),
    [({"poll": 3}, 1), ({"commit": 3}, 1), ({"poll": 8}, 2), ({"commit": 8}, 2)],
)
async def test_a_failing_bus_is_retried_and_finally_reopened(
    failures: dict[str, int], opened: int
) -> None:
    on, sink, clock, check = flaky(**failures), Recorder(), ManualClock(), Check()
    await publish(on, event(0), event(1))
    async with running(consuming(on, sink, clock=clock, check=check)):
        await eventually(is_committed(on, 2))
        await eventually(lambda: check.is_ok)

    assert on.opened == opened
    assert len(clock.slept) == sum(failures.values())
    assert clock.slept[1] > clock.slept[0]


async def test_the_check_of_the_bus_recovers_while_the_receiver_is_still_unavailable() -> None:
    on, sink, clock, check = flaky(), Recorder(), ManualClock(), Check()
    await publish(on, event(0))
    sink.gate.clear()
    async with running(consuming(on, sink, check=check, clock=clock)):
        await eventually(lambda: sink.entered and check.is_ok)
        for _ in range(9):
            on.newest.failures = {"poll": 1}
            await eventually(lambda: check.has_failed or not on.newest.failures["poll"])
            await eventually(lambda: check.is_ok)

    # Failures that are far apart are no reason to reopen the consumer.
    assert on.opened == 1


async def test_the_check_keeps_failing_if_only_commits_fail() -> None:
    on, sink, reported = flaky(commit=5), Recorder(), list[bool]()
    watched = Check(on_change=lambda each: reported.append(each.is_ok))
    await publish(on, event(0))
    async with running(consuming(on, sink, check=watched)):
        await eventually(is_committed(on, 1))
        await eventually(lambda: watched.is_ok)

    assert reported[-2:] == [False, True]
    assert reported.count(False) == 1


async def test_a_missing_topic_is_named_and_waited_for() -> None:
    on, sink, clock, check = MemoryBus([EVENTS]), Recorder(), ManualClock(), Check()
    async with running(consuming(on, sink, clock=clock, check=check)):
        await eventually(lambda: "gpuledger.dead-letters.v1" in check.detail)
        assert not check.is_ok
        on.create([DEAD_LETTERS])
        await eventually(lambda: check.is_ok)


async def test_a_member_without_a_partition_is_ready_and_reports_this() -> None:
    on = MemoryBus([Topic(name=EVENTS.name, record=GpuEvent, key="node", partitions=1)])
    on.create([DEAD_LETTERS])
    checks = [Check(), Check()]
    async with (
        running(consuming(on, Recorder(), check=checks[0])),
        running(consuming(on, Recorder(), check=checks[1])),
    ):
        await eventually(
            lambda: (
                sorted(check.detail for check in checks)
                == [
                    "1 partitions assigned, 0 s behind",
                    "no partition assigned: the group has more members than partitions",
                ]
            )
        )
        assert all(check.is_ok for check in checks)


async def test_an_outage_of_the_bus_is_logged_when_it_begins_and_when_it_ends() -> None:
    on, sink, readiness = flaky(poll=7), Recorder(), Readiness()
    await publish(on, event(0))
    with capture_logs() as logged:
        async with running(consuming(on, sink, check=readiness.check("t.kafka"))):
            await eventually(is_committed(on, 1))

    reported = [line["event"] for line in logged if line["log_level"] != "info" or "check" in line]
    assert reported == ["check_failed", "check_recovered"]


async def test_the_detail_of_a_healthy_sink_is_current() -> None:
    on, sink, clock, check = bus(), Recorder(), ManualClock(), Check()
    async with running(consuming(on, sink, clock=clock, check=check)):
        await eventually(lambda: check.is_ok)
        assert check.detail == f"{PARTITIONS} partitions assigned, 0 s behind"
        sink.gate.clear()
        await publish(on, event(0))
        await eventually(lambda: sink.entered == 1)
        clock.now_ns += 42 * SECOND_NS
        assert check.detail == f"{PARTITIONS} partitions assigned, 42 s behind"
        sink.gate.set()
        await eventually(lambda: check.detail.endswith(", 0 s behind"))


async def test_removed_unread_records_stay_in_the_check_of_gaps_and_the_sink_is_ready() -> None:
    on, sink, readiness = bus(), Recorder(), Readiness()
    gaps = readiness.check("t.gaps", severity=CheckSeverity.WARNING)
    how = {"check": readiness.check("t.kafka"), "gaps": gaps}
    await publish(on, *map(event, range(4)))
    async with running(consuming(on, sink, **how)):
        await eventually(is_committed(on, 4))
        assert gaps.detail == "no record was missed"
    await publish(on, *map(event, range(4, 9)))
    on.remove_before(AT, 7)

    async with running(consuming(on, sink, **how)):
        await eventually(is_committed(on, 9))
        assert readiness.is_ready()
        assert "from offset 4: 3 offsets (retention)" in gaps.detail
        await publish(on, event(10))
        await eventually(is_committed(on, 10))
        assert not gaps.is_ok

    assert [offset for _, offset in sink.taken] == [0, 1, 2, 3, 7, 8, 9]


async def test_a_commit_that_fails_until_the_group_is_polled_is_retried_after_a_poll() -> None:
    class Polls(MemoryConsumer):
        has_polled = True

        @override
        async def poll(self, *, timeout_seconds: float, max_records: int) -> Polled:
            self.has_polled = True
            return await super().poll(timeout_seconds=timeout_seconds, max_records=max_records)

        @override
        async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
            if refused[0] < 3 or not self.has_polled:
                refused[0] += 1
                self.has_polled = False
                raise BusUnavailableError("the group is rebalancing")
            await super().commit(offsets)

    class PollingBus(MemoryBus):
        opened = 0

        @override
        @asynccontextmanager
        async def consumer(self, subscription: Subscription) -> AsyncIterator[Consumer]:
            async with super().consumer(subscription) as consumer:
                consumer.__class__ = Polls
                self.opened += 1
                yield consumer

    refused = [0]
    on, sink = PollingBus(), Recorder()
    on.create(BUS_TOPICS)
    await publish(on, event(0))
    async with running(consuming(on, sink)):
        await eventually(is_committed(on, 1))

    assert (refused, on.opened) == ([3], 1)


async def test_a_sink_falls_behind_while_its_empty_polls_are_not_answered() -> None:
    class Silent(MemoryConsumer):
        @override
        def is_answered(self) -> bool:
            return not is_away[0]

    class SilentBus(MemoryBus):
        @override
        @asynccontextmanager
        async def consumer(self, subscription: Subscription) -> AsyncIterator[Consumer]:
            async with super().consumer(subscription) as consumer:
                consumer.__class__ = Silent
                yield consumer

    is_away = [False]
    on, clock, check = SilentBus(), ManualClock(), Check()
    on.create(BUS_TOPICS)
    async with running(consuming(on, Recorder(), clock=clock, check=check)):
        await eventually(lambda: check.is_ok)
        is_away[0] = True
        clock.advance(540)
        await eventually(lambda: check.detail.endswith(", 540 s behind"))
        is_away[0] = False
        await eventually(lambda: check.detail.endswith(", 0 s behind"))


async def test_a_sink_that_starts_during_an_outage_falls_behind_from_its_start() -> None:
    class AwayBus(MemoryBus):
        is_away = True

        @override
        @asynccontextmanager
        async def consumer(self, subscription: Subscription) -> AsyncIterator[Consumer]:
            if self.is_away:
                raise BusUnavailableError("no broker")
            async with super().consumer(subscription) as consumer:
                yield consumer

    on, clock = AwayBus(), ManualClock()
    on.create(BUS_TOPICS)
    async with running(consuming(on, Recorder(), clock=clock)):
        # The pauses between its attempts move the clock.
        await eventually(lambda: clock.now_ns - START_NS > 600 * SECOND_NS)
        lag = REGISTRY.get_sample_value("gpuledger_sink_lag_seconds", {"sink": "recorder"})
        assert lag == (clock.now_ns - START_NS) / SECOND_NS
