"""What the doctor concludes from watermarks, inventories, samples and events."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import pytest

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Message
from gpuledger.codec import encode
from gpuledger.completeness import message_of
from gpuledger.keys import NodeId, key_in
from gpuledger.records import GpuFacts, Inventory, UnresponsiveNode, Watermark
from gpuledger.topics import partition_of_node
from gpuledger_cli.cluster import LastInventory
from gpuledger_cli.doctor.record_checks import (
    COVERAGE_NS,
    Fleet,
    check_clocks,
    check_coverage,
    check_nodes,
    covered_in,
    judge_clocks,
    judge_coverage,
    judge_nodes,
    judge_own_clock,
    judge_podwatch,
)
from gpuledger_cli.doctor.verdicts import Status
from tests.default_topics import EVENTS, INVENTORY, PODS, SAMPLES, WATERMARKS
from tests.unit.enricher.join.ticks import sample
from tests.unit.sinks.builders import (
    NODE,
    PARTITIONS,
    SECOND_NS,
    START_NS,
    books,
    bus,
    event,
    place_of,
    publish,
    reading,
)

if TYPE_CHECKING:
    from gpuledger.bus.inspection import Inspector

A, B, C = (NodeId("default", f"node-{letter}") for letter in "abc")
NOW_NS = START_NS


def watermark(
    partition: int = 0, *, ago_seconds: int = 0, component: str = "podwatch", **changes: object
) -> Watermark:
    values: dict[str, object] = {
        "component": component,
        "cluster": "default",
        "partition": partition,
        "complete_until_ns": NOW_NS - ago_seconds * SECOND_NS,
        "topic": PODS.name if component == "podwatch" else EVENTS.name,
        "next_offset": 0,
        "publisher": "podwatch@a",
    }
    return Watermark(**(values | changes))  # type: ignore[arg-type]  # the names are a Watermark's


@pytest.mark.parametrize(
    ("watermarks", "problem"),
    [
        ([watermark(0), watermark(1, ago_seconds=59)], ""),
        ([], "podwatch has published nothing"),
        ([watermark(0)], "1 of 2 partitions"),
        ([watermark(0), watermark(1, ago_seconds=61)], "1 of 2 partitions"),
        (
            [watermark(0), watermark(1, publisher="podwatch@b")],
            "several podwatch leaders publish: podwatch@a, podwatch@b",
        ),
        (
            [watermark(0), watermark(1), watermark(0, cluster="old", ago_seconds=9999)],
            "cluster old",
        ),
    ],
)
def test_podwatch_must_have_one_leader_and_recent_watermarks_of_each_partition(
    watermarks: list[Watermark], problem: str
) -> None:
    found = judge_podwatch(watermarks, partitions=2, now_ns=NOW_NS)
    faults = [one for one in found if one.status is not Status.OK]
    assert bool(faults) == bool(problem)
    assert all(problem in one.finding and one.action for one in faults)


def last(gpu_count: int = 8) -> LastInventory:
    inventory = Inventory(cluster="c", node="n", boot_id="b", time_ns=1, gpus=[])
    return LastInventory(partition=0, inventory=inventory, gpu_count=gpu_count)


@pytest.mark.parametrize(
    ("inventories", "ticked", "problem"),
    [
        ({A: 8, B: 8}, [A, B], ""),
        ({A: 8, B: 0}, [A], ""),  # retired
        ({}, [], "no agent has published"),
        (
            {A: 8, B: 8},
            [A],
            "no sample for two minutes from 1 of 2 nodes: node-b (since 2026-",
        ),
        ({A: 8}, [A, C], "samples, but no inventory, from 1 node, so"),
    ],
)
def test_each_node_with_gpus_must_send_samples_and_each_node_that_does_must_have_an_inventory(
    inventories: Mapping[NodeId, int], ticked: list[NodeId], problem: str
) -> None:
    silent = [UnresponsiveNode(node="node-b", since_time_ns=NOW_NS)]
    found = judge_nodes(
        {node: last(count) for node, count in inventories.items()},
        ticked,
        [watermark(component="join", unresponsive=silent)],
    )
    faults = [one for one in found if one.status is not Status.OK]
    assert bool(faults) == bool(problem)
    assert all(problem in one.finding and one.action for one in faults)


@pytest.mark.parametrize(
    ("offsets_seconds", "finding"),
    [
        ({A: -1, B: -14}, ""),
        (
            {A: -1, B: 3},
            "the newest sample of 1 of 2 nodes differs from this machine's clock: node-b +3",
        ),
        ({A: -1, B: -17}, "node-b -17.0 s"),
        ({A: 3600, B: 3601}, "all nodes' newest samples differ from this machine's clock"),
    ],
)
def test_a_nodes_clock_may_be_little_ahead_and_its_newest_sample_little_old(
    offsets_seconds: Mapping[NodeId, int], finding: str
) -> None:
    offsets_ns = {node: seconds * SECOND_NS for node, seconds in offsets_seconds.items()}
    (found,) = judge_clocks(offsets_ns, dict.fromkeys(offsets_ns, SECOND_NS))
    assert (found.status is Status.OK) == (finding == "")
    assert finding in found.finding


def test_a_sample_may_be_as_old_as_its_interval_in_addition() -> None:
    (found,) = judge_clocks({A: -70 * SECOND_NS}, {A: 60 * SECOND_NS})
    assert found.status is Status.OK


def test_clocks_without_samples_and_coverage_without_inventories_are_unknown() -> None:
    assert [one.status for one in judge_clocks({}, {})] == [Status.UNKNOWN]
    assert [one.status for one in judge_coverage({}, {})] == [Status.UNKNOWN]


def test_coverage_counts_only_gpus_of_the_inventory_and_each_at_most_once() -> None:
    eight = 8 * COVERAGE_NS
    (full,) = judge_coverage({A: 99 * COVERAGE_NS, C: COVERAGE_NS}, {A: eight})
    assert (full.status, full.finding[:6]) == (Status.OK, "100.0%")
    (half,) = judge_coverage({A: eight}, {A: eight, B: eight})
    assert half.status is Status.PROBLEM
    assert "only 50.0%" in half.finding
    assert half.finding.endswith(": node-b 0%")


def test_the_known_time_of_an_event_is_that_of_its_gpus_that_answered() -> None:
    instance = reading(uuid="MIG-1", parent_uuid="GPU-2")
    silent = books(reading(uuid="GPU-3"), gap_ns=SECOND_NS)
    seen = event(gpus=[books(reading(uuid="GPU-2")), books(instance), silent])
    assert covered_in(seen, until_ns=START_NS) == SECOND_NS
    assert covered_in(seen, until_ns=START_NS - SECOND_NS // 4) == SECOND_NS * 3 // 4
    assert covered_in(seen, until_ns=START_NS + COVERAGE_NS) == 0


async def put(on: MemoryBus, topic: str, node: NodeId, value: object, *, time_ns: int) -> None:
    key = key_in(*node)
    message = Message(key.encode(), encode(value), time_ns // 10**6)
    async with on.producer() as producer:
        await producer.publish(topic, partition_of_node(key, partitions=PARTITIONS), [message])


async def installation(seconds: Sequence[int] = range(-90, 1)) -> MemoryBus:
    """Return a bus with events of `NODE`, its newest sample and its inventory."""
    on = bus()
    gpu = GpuFacts(uuid=reading().uuid, index=0, model="H100", instances=[], capabilities=[])
    node = NodeId("default", NODE)
    inventory = Inventory(
        cluster=node.cluster, node=node.node, boot_id="b", time_ns=START_NS, gpus=[gpu]
    )
    await put(on, INVENTORY.name, node, inventory, time_ns=START_NS)
    newest = sample(cluster=node.cluster, node=node.node, time_ns=NOW_NS)
    await put(on, SAMPLES.name, node, newest, time_ns=NOW_NS)
    await publish(on, *(event(tick, seq=1000 + tick) for tick in seconds))
    return on


class Markers:
    """Brokers whose last markers have these times."""

    def __init__(self, times_ms: list[int]) -> None:
        self._times_ms = times_ms
        self.ends: Mapping[int, int] = {}

    async def read_marker_times_ms(self, topic: str, ends: Mapping[int, int]) -> list[int]:
        self.ends = ends
        return self._times_ms


@pytest.mark.parametrize(
    ("ago_seconds", "status"),
    [([], "unknown"), ([600, 1], "ok"), ([-3], "problem"), ([16, 17], "unknown")],
)
def test_this_machines_clock_is_compared_with_the_newest_marker(
    ago_seconds: list[int], status: str
) -> None:
    times_ms = [NOW_NS // 10**6 - seconds * 1000 for seconds in ago_seconds]
    (found,) = judge_own_clock(times_ms, now_ns=NOW_NS)
    assert found.status == status


async def test_the_checks_read_what_an_installation_publishes() -> None:
    on = await installation()
    fleet = Fleet(on, time_ns=lambda: NOW_NS)
    coverage = partial(check_coverage, on, fleet, now_ns=NOW_NS)
    assert [one.status for one in await coverage()] == [Status.PROBLEM]  # no watermark
    async with on.producer() as producer:
        for partition in range(PARTITIONS):
            message = message_of(watermark(partition, component="join"), time_ns=NOW_NS)
            await producer.publish(WATERMARKS.name, partition, [message])

    (found,) = await coverage()
    assert (found.status, found.finding[:6]) == (Status.OK, "100.0%")
    (nodes,) = await check_nodes(on, fleet)
    assert (nodes.status, nodes.finding) == (
        Status.OK,
        "inventory and samples from 1 node with 1 GPU",
    )
    for marker_ms, statuses in (
        ([NOW_NS // 10**6], [Status.OK, Status.OK]),
        ([], [Status.UNKNOWN, Status.OK]),
    ):
        brokers = Markers(marker_ms)
        clocks = await check_clocks(on, fleet, cast("Inspector", brokers))
        assert [one.status for one in clocks] == statuses
        assert brokers.ends == {place_of(NODE).partition: 91}

    later_ns = NOW_NS + 3600 * SECOND_NS
    later = Fleet(on, time_ns=lambda: later_ns)
    (nodes,) = await check_nodes(on, later)
    assert NODE in nodes.finding
    (stale,) = await check_coverage(on, later, now_ns=later_ns)
    assert "complete only through" in stale.finding


@pytest.mark.parametrize(
    ("events", "finding"),
    [
        (range(1, 30), "no GPU has been sampled for a complete minute"),
        (range(-9, 1), "100.0% of"),
        ([-9, *range(-4, 1)], "only 60.0% of"),
        ([-70, *range(-9, 1)], "only 16.7% of"),
        ([], "only 0.0% of"),
    ],
)
async def test_the_coverage_of_a_new_node_begins_with_its_first_event(
    events: Sequence[int], finding: str
) -> None:
    on = await installation(events)
    async with on.producer() as producer:
        for partition in range(PARTITIONS):
            message = message_of(watermark(partition, component="join"), time_ns=NOW_NS)
            await producer.publish(WATERMARKS.name, partition, [message])

    (found,) = await check_coverage(on, Fleet(on, time_ns=lambda: NOW_NS), now_ns=NOW_NS)

    assert finding in found.finding


async def test_one_checks_deadline_does_not_end_the_reading_of_the_others() -> None:
    on = await installation()
    fleet = Fleet(on, time_ns=lambda: NOW_NS)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await check_nodes(on, fleet)
    (found,) = await check_nodes(on, fleet)
    assert found.status is Status.OK
    await fleet.close()
