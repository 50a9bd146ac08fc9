"""The queue is bounded, the order is kept, and nothing counts as sent before it is."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, cast

import pytest
from prometheus_client import REGISTRY
from typing_extensions import override

from gpuledger.bus.limits import MAX_MESSAGE_BYTES, size_bytes
from gpuledger.bus.protocol import Bus, Consumer, Message, Producer, Subscription
from gpuledger.codec import decoder_of
from gpuledger.errors import (
    BusUnavailableError,
    MessageTooLargeError,
    TimestampRefusedError,
    TopicsError,
)
from gpuledger.keys import NodeId, key_in
from gpuledger.records import (
    DeviceAllocation,
    GpuDetails,
    GpuReading,
    Incident,
    Inventory,
    NodeReadings,
    NodeSample,
    ProcessChange,
    ProcessRecord,
    Severity,
)
from gpuledger.records.bounds import MAX_WORD_LENGTH
from gpuledger.runtime import Backoff, Check
from gpuledger.topics import partition_of_node
from gpuledger_agent.core.tick import NodeTick
from gpuledger_agent.metrics import (
    PUBLISH_FAILURES,
    QUEUE_TICKS,
    TICKS_DROPPED,
    count_published_from_zero,
)
from gpuledger_agent.publish.message_bundle import (
    BundledMessage,
    BundleQueue,
    MessageBundle,
    QueuedBundle,
    bundle_incident,
    bundle_inventory,
    bundle_tick,
)
from gpuledger_agent.publish.publisher import SamplePublisher, shut_down
from gpuledger_agent.publish.send_queue import SendQueue
from gpuledger_simulator.clock import ManualClock
from tests.default_topics import BY_NAME, INCIDENTS, INVENTORY, PROCESSES, READINGS, SAMPLES, TOPICS
from tests.hanging import HANG_SECONDS
from tests.metric_values import value_of

NODE = "node-1"
PARTITION = partition_of_node(key_in("default", NODE), partitions=12)
count_published_from_zero(TOPICS)


def counted(name: str, **labels: str) -> float:
    """Return the value of one of the agent's counters."""
    value = REGISTRY.get_sample_value(f"gpuledger_agent_{name}_total", labels)
    assert value is not None, f"{name} is missing at the start"
    return value


class FakeBus:
    """A bus that raises the given errors."""

    def __init__(self) -> None:
        self.topics = TOPICS
        self.refusals: list[Exception] = []
        self.published: list[tuple[str, int, list[bytes | None]]] = []
        self.reject_after_request: list[Exception] = []
        self.producers = 0

    async def partitions(self, topic: str) -> int:
        self._refuse()
        self.refusals, self.reject_after_request = self.reject_after_request, []
        return 12

    @asynccontextmanager
    async def producer(self) -> AsyncIterator[Producer]:
        self.producers += 1
        yield self

    def consumer(self, subscription: Subscription) -> AbstractAsyncContextManager[Consumer]:
        raise NotImplementedError

    async def publish(self, topic: str, partition: int, messages: Sequence[Message]) -> None:
        if topic == PROCESSES.name or not self.published:
            self._refuse()
        self.published.append((topic, partition, [message.value for message in messages]))

    def values(self, topic: str) -> list[bytes | None]:
        return [value for name, _, values in self.published if name == topic for value in values]

    def _refuse(self) -> None:
        if self.refusals:
            raise self.refusals.pop(0)


def bundle(number: int, processes: int = 0) -> MessageBundle:
    message = Message(
        key=key_in("default", NODE).encode(), value=b"%d" % number, timestamp_ms=number
    )
    process = BundledMessage(PROCESSES.name, message)
    return (BundledMessage(SAMPLES.name, message), *((process,) * processes))


def send_queue_in_memory(max_ticks: int = 9) -> SendQueue:
    return SendQueue(
        queue=BundleQueue(max_bundles=max_ticks), spool=None, check=Check(), spill_after_seconds=0
    )


def publisher_of(
    bus: FakeBus, send_queue: SendQueue, check: Check | None = None, *, now_ms: int = 0
) -> SamplePublisher:
    return SamplePublisher(
        node=NodeId("default", NODE),
        bus=cast("Bus", bus),
        send_queue=send_queue,
        check=check or Check(),
        backoff=Backoff(first_seconds=0.0001, max_seconds=0.0001),
        catch_up_factor=50,
        clock=ManualClock(start_ns=now_ms * 1_000_000),
    )


async def publish_all(bus: FakeBus, send_queue: SendQueue, check: Check | None = None) -> None:
    publisher = publisher_of(bus, send_queue, check)
    publishing = asyncio.create_task(publisher.run())
    await shut_down(publisher, send_queue, publishing, seconds=5)
    assert not send_queue.bundles_in_memory


def test_a_tick_is_published_under_its_node_and_its_own_time() -> None:
    sample = NodeSample(
cluster="default",
        node=NODE, boot_id="b", seq=1, time_ns=2_000_000_001, interval_ns=1, gpus=[],
        containers=[], processes=[], allocations=[],
    )  # fmt: skip
    record = ProcessRecord(
cluster="default",
        node=NODE, boot_id="b", pid=7, time_ns=3_000_000_001, change=ProcessChange.SEEN,
        gpu_uuids=["GPU-0"],
    )  # fmt: skip
    readings = NodeReadings(
cluster="default",
        node=NODE, boot_id="b", seq=1, time_ns=2_000_000_001, interval_ns=1,
        gpus=[GpuDetails(uuid="GPU-0", performance_state=0)],
    )  # fmt: skip
    bundle = bundle_tick(
        NodeTick(sample=sample, readings=readings, processes=[record]), topics=TOPICS
    )
    assert [(topic, one.key, one.timestamp_ms) for topic, one, _ in bundle] == [
        (SAMPLES.name, b"default/node-1", 2000),
        (READINGS.name, b"default/node-1", 2000),
        (PROCESSES.name, b"default/node-1", 3000),
    ]
    reported = (sample, readings, record)
    for (topic, message, _), one in zip(bundle, reported, strict=True):
        assert decoder_of(topic, BY_NAME[topic].record).decode(message.value) == one


def test_empty_readings_are_not_published() -> None:
    identity: dict[str, Any] = {"cluster": "default", "node": NODE, "boot_id": "b", "seq": 1,
        "time_ns": 1, "interval_ns": 1, "gpus": []
    }  # fmt: skip
    sample = NodeSample(**identity, containers=[], processes=[], allocations=[])
    tick = NodeTick(sample=sample, readings=NodeReadings(**identity), processes=[])
    assert [topic for topic, *_ in bundle_tick(tick, topics=TOPICS)] == [SAMPLES.name]


def test_incidents_and_inventories_are_published_under_their_node_and_own_time() -> None:
    incident = Incident(
cluster="default",
        node=NODE, boot_id="b", gpu_uuid="GPU-0", time_ns=4_000_000_001, kind="xid", source="nvml",
        severity=Severity.WARNING, message="m", processes=[],
    )  # fmt: skip
    inventory = Inventory(cluster="default", node=NODE, boot_id="b", time_ns=5_000_000_001, gpus=[])
    ((topic, message, _),) = bundle_incident(incident, topics=TOPICS)
    assert (topic, message.key, message.timestamp_ms) == (INCIDENTS.name, b"default/node-1", 4000)
    assert decoder_of(INCIDENTS.name, Incident).decode(message.value) == incident
    ((topic, message, _),) = bundle_inventory(inventory, topics=TOPICS)
    assert (topic, message.key, message.timestamp_ms) == (INVENTORY.name, b"default/node-1", 5000)
    assert decoder_of(INVENTORY.name, Inventory).decode(message.value) == inventory


def test_a_full_queue_drops_the_oldest_tick_and_counts_it() -> None:
    dropped, waiting = value_of(TICKS_DROPPED), value_of(QUEUE_TICKS)
    queue = BundleQueue(max_bundles=3)
    for number in range(5):
        queue.put(QueuedBundle(0.0, bundle(number)))
    assert len(queue) == 3
    assert value_of(QUEUE_TICKS) - waiting == 3
    taken = queue.take(max_bundles=9)
    assert [one.bundle[0].message.value for one in taken] == [b"2", b"3", b"4"]
    assert value_of(TICKS_DROPPED) - dropped == 2
    assert value_of(QUEUE_TICKS) == waiting


async def test_ticks_and_process_records_go_to_the_nodes_partition_in_order() -> None:
    bus, send_queue = FakeBus(), send_queue_in_memory(999)
    for number in range(100):
        send_queue.put(bundle(number, processes=number % 2))
    await publish_all(bus, send_queue)
    assert bus.values(SAMPLES.name) == [b"%d" % number for number in range(100)]
    assert bus.values(PROCESSES.name) == [b"%d" % number for number in range(1, 100, 2)]
    assert {partition for _, partition, _ in bus.published} == {PARTITION}
    assert len(bus.published) == 4


@pytest.mark.parametrize("error", [BusUnavailableError("away"), TopicsError("no topic")])
@pytest.mark.parametrize("refusals", [1, 2, 7])
async def test_a_bus_that_fails_is_retried_and_nothing_is_lost_or_reordered(
    error: Exception, refusals: int
) -> None:
    bus, send_queue, check = FakeBus(), send_queue_in_memory(), Check()
    bus.refusals = [error] * refusals
    for number in range(3):
        send_queue.put(bundle(number, processes=1))
    await publish_all(bus, send_queue, check)
    assert bus.values(SAMPLES.name) == bus.values(PROCESSES.name) == [b"0", b"1", b"2"]
    assert bus.producers == refusals + 1
    assert check.is_ok


async def test_brokers_that_answer_but_reject_all_records_do_not_pass_the_check() -> None:
    """For example if too few replicas are in sync, or one of the topics is missing."""
    bus, send_queue, shown = FakeBus(), send_queue_in_memory(), list[bool]()
    check = Check(on_change=lambda one: shown.append(one.is_ok))
    truth, refused = bus.publish, [BusUnavailableError("too few replicas are in sync")] * 7

    async def publish(topic: str, partition: int, messages: Sequence[Message]) -> None:
        if topic == PROCESSES.name and refused:
            raise refused.pop()
        await truth(topic, partition, messages)

    bus.publish = publish  # type: ignore[method-assign]  # it rejects one topic
    send_queue.put(bundle(0, processes=1))
    await publish_all(bus, send_queue, check)
    assert bus.producers == 8
    assert shown == [False, True]


async def test_brokers_that_answer_pass_the_check_if_nothing_waits() -> None:
    bus, send_queue, check = FakeBus(), send_queue_in_memory(), Check()
    bus.refusals = [BusUnavailableError("away")] * 3
    publishing = asyncio.create_task(publisher_of(bus, send_queue, check).run())
    async with asyncio.timeout(HANG_SECONDS):
        while not check.is_ok:  # noqa: ASYNC110  # a few turns of the loop
            await asyncio.sleep(0)
    publishing.cancel()
    assert (bus.producers, bus.published) == (4, [])


async def test_acknowledged_messages_are_not_sent_again_if_the_rest_fails() -> None:
    bus, send_queue = FakeBus(), send_queue_in_memory()
    bus.published.append(("before", 0, []))  # so that only the process records fail
    bus.reject_after_request = [BusUnavailableError("away")]
    send_queue.put(bundle(0, processes=1))
    await publish_all(bus, send_queue)
    assert bus.values(SAMPLES.name) == bus.values(PROCESSES.name) == [b"0"]
    assert bus.producers == 2


async def test_a_tick_and_its_processes_are_sent_once_even_if_its_readings_fail() -> None:
    """For example if the readings' topic is missing after an upgrade."""
    bus, send_queue, check = FakeBus(), send_queue_in_memory(), Check()
    truth, refused = bus.publish, [TopicsError(f"{READINGS.name} does not exist")] * 3

    async def publish(topic: str, partition: int, messages: Sequence[Message]) -> None:
        if topic == READINGS.name and refused:
            raise refused.pop()
        await truth(topic, partition, messages)

    bus.publish = publish  # type: ignore[method-assign]  # without a topic at first
    message = Message(key=key_in("default", NODE).encode(), value=b"0", timestamp_ms=0)
    published = counted("records_published", topic=READINGS.name)
    topics = (SAMPLES.name, READINGS.name, PROCESSES.name)
    send_queue.put(tuple(BundledMessage(topic, message) for topic in topics))
    await publish_all(bus, send_queue, check)
    assert [topic for topic, _, _ in bus.published] == [SAMPLES.name, PROCESSES.name, READINGS.name]
    assert counted("records_published", topic=READINGS.name) == published + 1
    assert bus.producers == 4
    assert check.is_ok


async def test_the_time_to_publish_at_shutdown_is_limited() -> None:
    bus, send_queue, check = FakeBus(), send_queue_in_memory(), Check()
    bus.refusals = [BusUnavailableError("no broker at localhost:9092")] * 10**6
    send_queue.put(bundle(0))
    publisher = publisher_of(bus, send_queue, check)
    publishing = asyncio.create_task(publisher.run())
    await shut_down(publisher, send_queue, publishing, seconds=0.05)
    assert publishing.cancelled()
    assert send_queue.bundles_in_memory == 1
    assert (check.is_ok, check.detail) == (
        False,
        "no broker at localhost:9092; samples wait: 1 in memory, 0 on disk",
    )


async def test_a_record_that_no_broker_accepts_does_not_block_the_next_ones() -> None:
    refused = counted("messages_rejected", reason="too_large")
    bus, send_queue = FakeBus(), send_queue_in_memory()
    huge = Message(key=b"k", value=b"x" * MAX_MESSAGE_BYTES, timestamp_ms=0)
    send_queue.put((BundledMessage(SAMPLES.name, huge), BundledMessage(PROCESSES.name, huge)))
    send_queue.put(bundle(1))
    await publish_all(bus, send_queue)
    assert bus.values(SAMPLES.name) == [b"1"]
    assert counted("messages_rejected", reason="too_large") - refused == 2


async def test_only_records_that_this_broker_rejects_are_left_out() -> None:
    refused = counted("messages_rejected", reason="too_large")
    bus, send_queue = FakeBus(), send_queue_in_memory()
    truth = bus.publish

    async def publish(topic: str, partition: int, messages: Sequence[Message]) -> None:
        if any(message.value == b"1" for message in messages):
            raise MessageTooLargeError("larger than the topic's max.message.bytes")
        await truth(topic, partition, messages)

    bus.publish = publish  # type: ignore[method-assign]  # with its own limit
    for number in range(3):
        send_queue.put(bundle(number))
    await publish_all(bus, send_queue)
    assert bus.values(SAMPLES.name) == [b"0", b"2"]
    assert counted("messages_rejected", reason="too_large") - refused == 1


DAY_MS = 86_400_000
NOW_MS = 1_900_000_000_000


class DatedBus(FakeBus):
    """A bus that, like brokers, rejects records stamped more than a day ahead of its clock."""

    now_ms = NOW_MS

    @override
    async def publish(self, topic: str, partition: int, messages: Sequence[Message]) -> None:
        if any(message.timestamp_ms > self.now_ms + DAY_MS for message in messages):
            raise TimestampRefusedError("refused a record as too far ahead of its own clock")
        await super().publish(topic, partition, messages)


def stamped(value: bytes, time_ms: int) -> MessageBundle:
    message = Message(key=key_in("default", NODE).encode(), value=value, timestamp_ms=time_ms)
    return (BundledMessage(SAMPLES.name, message),)


@pytest.mark.parametrize(
    ("what", "node_now_ms", "published", "left_out"),
    [
        ("the clock that ran ahead is right again", NOW_MS, [b"1", b"2"], 1),
        # Both clocks were wrong once, which does not affect records with a correct stamp.
        ("the clock is in 1970 now", 1000, [b"1", b"2"], 1),
        ("the clock is a day behind now", NOW_MS - DAY_MS, [b"1", b"2"], 1),
    ],
)
async def test_after_a_wrong_clock_only_records_that_the_broker_rejects_are_left_out(
    what: str, node_now_ms: int, published: list[bytes], left_out: int
) -> None:
    before = counted("messages_rejected", reason="future")
    bus, send_queue = DatedBus(), send_queue_in_memory()
    send_queue.put(stamped(b"1", NOW_MS - 5000))
    send_queue.put(stamped(b"ahead", NOW_MS + 7 * DAY_MS))
    send_queue.put(stamped(b"2", NOW_MS))
    publisher = publisher_of(bus, send_queue, now_ms=node_now_ms)
    publishing = asyncio.create_task(publisher.run())
    await shut_down(publisher, send_queue, publishing, seconds=5)
    assert not send_queue.bundles_in_memory, what
    assert bus.values(SAMPLES.name) == published
    assert counted("messages_rejected", reason="future") - before == left_out


class OneClientBus(DatedBus):
    """A bus whose client ends with a rejection, which fails its other requests in flight."""

    def __init__(self) -> None:
        super().__init__()
        self._clients = 0

    @override
    async def publish(self, topic: str, partition: int, messages: Sequence[Message]) -> None:
        client = self._clients
        # Requests sent together are in flight when the first of them is answered.
        await asyncio.sleep(0)
        if client != self._clients:
            raise BusUnavailableError("given up")
        try:
            await super().publish(topic, partition, messages)
        except TimestampRefusedError:
            self._clients += 1
            raise


async def test_a_rejection_on_one_topic_is_not_a_failure_of_the_others() -> None:
    before = value_of(PUBLISH_FAILURES)
    bus, send_queue = OneClientBus(), send_queue_in_memory()
    for number, time_ms in ((1, NOW_MS), (2, NOW_MS + 7 * DAY_MS), (3, NOW_MS)):
        (sample,) = stamped(b"%d" % number, time_ms)
        process = sample.message._replace(value=b"p")
        send_queue.put((sample, BundledMessage(PROCESSES.name, process)))
    publisher = publisher_of(bus, send_queue, now_ms=NOW_MS)
    publishing = asyncio.create_task(publisher.run())
    await shut_down(publisher, send_queue, publishing, seconds=5)
    assert bus.values(SAMPLES.name) == [b"1", b"3"]
    assert bus.values(PROCESSES.name) == [b"p", b"p"]
    assert value_of(PUBLISH_FAILURES) == before


async def test_retries_of_one_rejected_record_do_not_repeat_or_recount_earlier_ones() -> None:
    """However often it is retried, for example for hours while the broker's clock is behind."""
    refused = counted("messages_rejected", reason="too_large")
    bus, send_queue = DatedBus(), send_queue_in_memory()
    for number in (1, 2):
        send_queue.put(stamped(b"%d" % number, NOW_MS))
    send_queue.put(stamped(b"x" * MAX_MESSAGE_BYTES, NOW_MS))
    send_queue.put(stamped(b"waits", NOW_MS + 2 * DAY_MS))
    send_queue.put(stamped(b"behind it", NOW_MS))
    publisher = publisher_of(bus, send_queue, now_ms=NOW_MS + 2 * DAY_MS)
    publishing = asyncio.create_task(publisher.run())
    while bus.producers < 9:  # noqa: ASYNC110  # a few turns of the loop
        await asyncio.sleep(0)
    assert bus.values(SAMPLES.name) == [b"1", b"2"]
    bus.now_ms = NOW_MS + 2 * DAY_MS
    await shut_down(publisher, send_queue, publishing, seconds=5)
    assert bus.values(SAMPLES.name) == [b"1", b"2", b"waits", b"behind it"]
    assert counted("messages_rejected", reason="too_large") - refused == 1


async def test_a_record_ahead_of_only_the_brokers_clock_waits_until_the_clocks_agree() -> None:
    before = counted("messages_rejected", reason="future")
    bus, send_queue, check = DatedBus(), send_queue_in_memory(), Check()
    bus.now_ms = NOW_MS - 7 * DAY_MS
    send_queue.put(stamped(b"1", NOW_MS))
    publisher = publisher_of(bus, send_queue, check, now_ms=NOW_MS)
    publishing = asyncio.create_task(publisher.run())
    while "too far ahead" not in check.detail:  # noqa: ASYNC110  # a few turns of the loop
        await asyncio.sleep(0)
    bus.now_ms = NOW_MS
    await shut_down(publisher, send_queue, publishing, seconds=5)
    assert bus.values(SAMPLES.name) == [b"1"]
    assert counted("messages_rejected", reason="future") == before


async def test_a_topic_that_this_version_does_not_know_is_published_too() -> None:
    bus, send_queue = FakeBus(), send_queue_in_memory()
    message = Message(key=b"k", value=b"of a newer agent's spool", timestamp_ms=0)
    send_queue.put((BundledMessage("gpuledger.tomorrow.v1", message),))
    await publish_all(bus, send_queue)
    assert bus.values("gpuledger.tomorrow.v1") == [message.value]


def test_a_value_longer_than_a_record_allows_is_cut_and_counted() -> None:
    """A driver may return anything, and the join would reject the whole tick."""
    name = "gpuledger_agent_values_cut_total"
    before = REGISTRY.get_sample_value(name, {"field": "GpuReading.model"}) or 0.0
    identity: dict[str, Any] = {"cluster": "default", "node": NODE, "boot_id": "b", "seq": 1,
        "time_ns": 1, "interval_ns": 1
    }  # fmt: skip
    gpus = [GpuReading(uuid="GPU-0", index=0, model="H" * 10_000)]
    sample = NodeSample(**identity, gpus=gpus, containers=[], processes=[], allocations=[])
    readings = NodeReadings(**identity, gpus=[])

    ((_, message, _),) = bundle_tick(
        NodeTick(sample=sample, readings=readings, processes=[]), topics=TOPICS
    )

    sent = decoder_of(SAMPLES.name, NodeSample).decode(message.value)
    assert sent.gpus[0].model == "H" * MAX_WORD_LENGTH
    assert REGISTRY.get_sample_value(name, {"field": "GpuReading.model"}) == before + 1


def test_rows_beyond_the_size_of_a_message_are_left_out_counted_and_named_by_the_check() -> None:
    name, field = "gpuledger_agent_values_cut_total", {"field": "NodeSample.allocations"}
    before = REGISTRY.get_sample_value(name, field) or 0.0
    check = Check()
    identity: dict[str, Any] = {"cluster": "default", "node": NODE, "boot_id": "b", "seq": 1,
        "time_ns": 1, "interval_ns": 1
    }  # fmt: skip
    readings = NodeReadings(**identity, gpus=[])
    gpus = [GpuReading(uuid="GPU-0", index=0)]

    def sent(count: int) -> NodeSample:
        rows = [
            DeviceAllocation(
                gpu_uuid="GPU-0",
                device_id="GPU-0",
                resource_name="nvidia.com/gpu",
                namespace="n" * 63,
                pod="p" * 253,
                container=f"{number}",
            )
            for number in range(count)
        ]
        sample = NodeSample(**identity, gpus=gpus, containers=[], processes=[], allocations=rows)
        tick = NodeTick(sample=sample, readings=readings, processes=[])
        ((_, message, _),) = bundle_tick(tick, topics=TOPICS, check=check)
        assert size_bytes(message.key, message.value) <= MAX_MESSAGE_BYTES
        found: NodeSample = decoder_of(SAMPLES.name, NodeSample).decode(message.value)
        return found

    small = sent(10)
    assert (len(small.allocations), small.allocations_unknown, check.is_ok) == (10, None, True)
    large = sent(4_000)
    cut = 4_000 - len(large.allocations)
    assert 0 < cut < 3_000
    assert large.allocations_unknown
    assert f"{cut} of NodeSample.allocations" in check.detail
    assert check.has_failed
    assert REGISTRY.get_sample_value(name, field) == before + cut
    sent(1)
    assert check.is_ok
