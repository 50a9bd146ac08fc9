"""Samples that waited while the node's clock was set are delivered with the right times."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from gpuledger.bus.protocol import Bus, Message
from gpuledger.clock import (
    NS_PER_DAY,
    NS_PER_HOUR,
    NS_PER_MINUTE,
    NS_PER_MS,
    NS_PER_SECOND,
    boot_time_ns,
)
from gpuledger.codec import decoder_of, encode
from gpuledger.errors import TimestampRefusedError
from gpuledger.keys import NodeId
from gpuledger.records import (
    Incident,
    Inventory,
    NodeReadings,
    NodeSample,
    ProcessExit,
    Severity,
)
from gpuledger.runtime import Backoff, Check
from gpuledger_agent.core.tick import NodeTick
from gpuledger_agent.loop import Outputs
from gpuledger_agent.metrics import MESSAGES_REJECTED, SPOOL_DROPPED
from gpuledger_agent.publish.clock_steps import shift_times, step_between
from gpuledger_agent.publish.message_bundle import BundleQueue
from gpuledger_agent.publish.publisher import SamplePublisher, shut_down
from gpuledger_agent.publish.send_queue import SendQueue
from gpuledger_agent.publish.spool import Spool
from gpuledger_simulator.clock import ManualClock
from tests.default_topics import INCIDENTS, INVENTORY, SAMPLES, TOPICS
from tests.hanging import HANG_SECONDS
from tests.metric_values import value_of
from tests.unit.agent.publish.builders import (
    BOOT,
    EARLIER_BOOT,
    NODE,
    FickleBus,
    ImmediateDisk,
    settings_in,
)

START_NS = 1_900_000_000 * NS_PER_SECOND
UP_NS = 5000 * NS_PER_SECOND
SAMPLE_COUNT = 150
"""More than two batches."""


class SetClock(ManualClock):
    """A clock that a test sets, as NTP does."""

    def __init__(self) -> None:
        super().__init__(start_ns=START_NS)
        self.ahead_ns = 0

    @override
    def time_ns(self) -> int:
        return super().time_ns() + self.ahead_ns

    @override
    def boottime_ns(self) -> int:
        return super().boottime_ns() + UP_NS


class DatedBus(FickleBus):
    """A bus that, like brokers, rejects timestamps more than a day ahead of its own clock."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock
        self.stamps_ms: list[int] = []

    @override
    async def publish(self, topic: str, partition: int, messages: Sequence[Message]) -> None:
        self._raise_if(self.is_away)
        latest_ms = (ManualClock.time_ns(self._clock) + NS_PER_DAY) // NS_PER_MS
        if any(message.timestamp_ms > latest_ms for message in messages):
            raise TimestampRefusedError("refused a record as too far ahead of its own clock")
        self.stamps_ms += [message.timestamp_ms for message in messages]
        await super().publish(topic, partition, messages)


class Agent:
    """The outputs of a node's agent; only its files survive its end."""

    def __init__(
        self, folder: Path, bus: FickleBus, clock: SetClock, *, boot_id: str = BOOT
    ) -> None:
        self.clock = clock
        node = NodeId("default", NODE)
        self.send_queue = SendQueue(
            queue=BundleQueue(max_bundles=1000),
            spool=Spool(
                settings_in(folder, max_age_seconds=2 * UP_NS // NS_PER_SECOND),
                node=node,
                boot_id=boot_id,
                boottime_ns=clock.boottime_ns,
            ),
            check=Check(),
            spill_after_seconds=5,
            disk=ImmediateDisk(),
            now_seconds=lambda: clock.monotonic_ns() / NS_PER_SECOND,
        )
        self._publisher = SamplePublisher(
            node=node,
            bus=cast("Bus", bus),
            send_queue=self.send_queue,
            check=Check(),
            backoff=Backoff(first_seconds=1e-6, max_seconds=1e-6),
            catch_up_factor=1e12,
            clock=clock,
        )
        self.outputs = Outputs(
            send_queue=self.send_queue, node_state=None, topics=TOPICS, clock=clock
        )
        self._tasks = [
            asyncio.create_task(self._publisher.run()),
            asyncio.create_task(self.send_queue.run()),
        ]

    async def sample(self, count: int) -> None:
        for _ in range(count):
            self.clock.advance(1)
            self.outputs.report_silence(tick_at(self.clock))
            for _ in range(5):
                await asyncio.sleep(0)

    async def drain(self) -> None:
        async with asyncio.timeout(HANG_SECONDS):
            await self.send_queue.wait_drained()

    async def end(self) -> None:
        await shut_down(self._publisher, self.send_queue, *self._tasks, seconds=0)


def tick_at(clock: SetClock) -> NodeTick:
    time_ns, seq = clock.time_ns(), clock.boottime_ns() // NS_PER_MS
    sample = NodeSample(
        cluster="default", node=NODE, boot_id=BOOT, seq=seq, time_ns=time_ns,
        interval_ns=NS_PER_SECOND, gpus=[], containers=[], processes=[], allocations=[],
        ended_processes=[
            ProcessExit(
                gpu=0, pid=7, started_boottime_ns=9, lifetime_ns=1, busy_ns=1, sampled_busy_ns=0,
                reserved_busy_ns=0, from_seq=1, from_time_ns=time_ns - NS_PER_MINUTE, until_seq=seq,
                until_time_ns=time_ns,
            )
        ],
    )  # fmt: skip
    readings = NodeReadings(
        cluster="default", node=NODE, boot_id=BOOT, seq=seq, time_ns=time_ns,
        interval_ns=NS_PER_SECOND, gpus=[],
    )  # fmt: skip
    at_boot_ns = boot_time_ns(clock)
    return NodeTick(sample=sample, readings=readings, processes=[], boot_time_ns=at_boot_ns)


def samples_on(bus: FickleBus) -> list[NodeSample]:
    decode = decoder_of(SAMPLES.name, NodeSample).decode
    return [decode(value) for topic, value in bus.published if topic == SAMPLES.name]


def lost() -> float:
    reasons = ("bytes", "age", "damaged", "late")
    rejected: float = value_of(MESSAGES_REJECTED.labels(reason="future"))
    return rejected + sum(value_of(SPOOL_DROPPED.labels(reason=reason)) for reason in reasons)


@pytest.mark.parametrize("restart", ["no restart", "a restart"])
@pytest.mark.parametrize(
    "ahead_ns",
    [
        pytest.param(NS_PER_DAY + NS_PER_HOUR, id="more than a day ahead"),
        pytest.param(NS_PER_HOUR, id="an hour ahead"),
        pytest.param(-START_NS + 1000 * NS_PER_SECOND, id="in 1970"),
    ],
)
async def test_a_clock_that_is_set_right_during_an_outage_loses_no_sample(
    tmp_path: Path, ahead_ns: int, restart: str
) -> None:
    clock, before = SetClock(), lost()
    bus = DatedBus(clock)
    clock.ahead_ns, bus.is_away = ahead_ns, True
    agent = Agent(tmp_path, bus, clock)
    await agent.sample(SAMPLE_COUNT)
    if restart == "a restart":
        await agent.end()
        agent = Agent(tmp_path, bus, clock)
    clock.ahead_ns = 0
    await agent.sample(3)
    bus.is_away = False
    await agent.drain()
    await agent.end()
    samples = samples_on(bus)
    seconds = [START_NS + number * NS_PER_SECOND for number in range(1, SAMPLE_COUNT + 4)]
    assert [one.time_ns for one in samples] == seconds
    assert bus.stamps_ms == [second // NS_PER_MS for second in seconds]
    # Order and age follow the time since boot, which no clock changes.
    assert [one.seq * NS_PER_MS - UP_NS + START_NS for one in samples] == seconds
    exits = [one.ended_processes[0] for one in samples if one.ended_processes]
    assert [one.until_time_ns for one in exits] == seconds
    assert {one.until_time_ns - one.from_time_ns for one in exits} == {NS_PER_MINUTE}
    assert lost() == before


async def test_incidents_and_inventories_that_waited_have_the_right_time_too(
    tmp_path: Path,
) -> None:
    clock = SetClock()
    bus = DatedBus(clock)
    clock.ahead_ns, bus.is_away = 2 * NS_PER_DAY, True
    agent = Agent(tmp_path, bus, clock)
    incident = Incident(
        cluster="default", node=NODE, boot_id=BOOT, gpu_uuid="GPU-a", time_ns=clock.time_ns(),
        kind="xid", source="nvml", severity=Severity.CRITICAL, message="m", processes=[],
    )  # fmt: skip
    agent.outputs.report_incident(incident)
    inventory = Inventory(
        cluster="default", node=NODE, boot_id=BOOT, time_ns=clock.time_ns(), gpus=[]
    )
    agent.outputs.report_inventory(inventory)
    await agent.sample(20)
    clock.ahead_ns, bus.is_away = 0, False
    await agent.drain()
    await agent.end()
    values = dict(bus.published)
    assert values[INCIDENTS.name] == encode(msgspec.structs.replace(incident, time_ns=START_NS))
    assert values[INVENTORY.name] == encode(msgspec.structs.replace(inventory, time_ns=START_NS))


async def test_a_clock_that_is_set_between_two_attempts_does_not_lose_the_batch_in_flight(
    tmp_path: Path,
) -> None:
    clock, before = SetClock(), lost()
    bus = DatedBus(clock)
    clock.ahead_ns = NS_PER_DAY + NS_PER_HOUR
    agent = Agent(tmp_path, bus, clock)
    # The broker rejects them until the clock is right.
    await agent.sample(3)
    assert not bus.published
    clock.ahead_ns = 0
    await agent.drain()
    await agent.end()
    assert [one.time_ns - START_NS for one in samples_on(bus)] == [
        second * NS_PER_SECOND for second in (1, 2, 3)
    ]
    assert lost() == before


async def test_times_of_an_earlier_boot_stay_as_they_are(tmp_path: Path) -> None:
    clock = SetClock()
    bus = DatedBus(clock)
    clock.ahead_ns, bus.is_away = -NS_PER_HOUR, True
    agent = Agent(tmp_path, bus, clock, boot_id=EARLIER_BOOT)
    await agent.sample(9)
    await agent.end()
    clock.ahead_ns, bus.is_away = 0, False
    agent = Agent(tmp_path, bus, clock)
    await agent.sample(1)
    await agent.drain()
    await agent.end()
    times_ns = [one.time_ns - START_NS for one in samples_on(bus)]
    assert times_ns == [
        *(second * NS_PER_SECOND - NS_PER_HOUR for second in range(1, 10)),
        10 * NS_PER_SECOND,
    ]


@given(st.integers(-(10**18), 10**18), st.integers(-(10**5), 10**5))
def test_a_step_is_in_whole_milliseconds_and_small_steps_are_left(
    step_ns: int, noise_ns: int
) -> None:
    found = step_between(START_NS, START_NS + step_ns + noise_ns)
    assert found % NS_PER_MS == 0
    assert abs(found - step_ns - noise_ns) <= NS_PER_MS // 2 or found == 0
    assert step_between(None, START_NS) == 0


@given(st.integers(-(10**12), 10**12))
def test_a_shift_and_its_reverse_leave_a_message_unchanged(by_ms: int) -> None:
    clock = SetClock()
    sample = tick_at(clock).sample
    message = Message(key=b"k", value=encode(sample), timestamp_ms=START_NS // NS_PER_MS)
    by_ns = by_ms * NS_PER_MS
    shifted = shift_times(message, by_ns)
    assert shifted.timestamp_ms == message.timestamp_ms + by_ms
    assert shift_times(shifted, -by_ns) == message
