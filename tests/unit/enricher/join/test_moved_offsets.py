"""Offsets of the join that another program has set while no worker was running."""

import pytest
from structlog.testing import capture_logs

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import TopicPartition
from gpuledger.records import NodeProgress
from gpuledger.runtime import Readiness
from tests.default_topics import INCIDENTS, PROGRESS, SAMPLES
from tests.unit.enricher.join.incidents import incident
from tests.unit.enricher.join.joining import (
    GROUP,
    PARTITION,
    committed,
    joining,
    publish,
    read_events,
    tick,
    until,
)
from tests.unit.enricher.join.ticks import sample

AT = TopicPartition(SAMPLES.name, PARTITION)


async def join(bus: MemoryBus, *seqs: int) -> None:
    """Run a worker until it has booked these ticks."""
    await publish(bus, SAMPLES, *map(tick, seqs))
    async with joining(bus):
        await committed(bus, len(seqs))


def gaps(readiness: Readiness) -> str:
    return readiness.check("gaps").detail


async def is_restored(readiness: Readiness) -> None:
    await until(lambda: "pods" in readiness.check("pods").detail)


async def seqs(bus: MemoryBus, count: int) -> list[int]:
    return [event.seq for event in await read_events(bus, count)]


async def test_ticks_before_an_offset_that_was_moved_forward_are_a_gap_once() -> None:
    bus = MemoryBus()
    await join(bus, 1000, 2000)
    await publish(bus, SAMPLES, *map(tick, (3000, 4000)))
    bus.move_offset(GROUP, AT, 4)

    async with joining(bus) as readiness:
        await until(lambda: "moved" in gaps(readiness))
        assert f"[{PARTITION}] from offset 2 to offset 4: 2 offsets (moved" in gaps(readiness)
        # The offset is committed even if no tick follows.
        await until(lambda: not bus.is_moved(GROUP, AT))
    async with joining(bus) as readiness:
        await is_restored(readiness)
        assert gaps(readiness) == "no record was missed"
        await publish(bus, SAMPLES, tick(5000))
        assert await seqs(bus, 3) == [1000, 2000, 5000]


async def test_ticks_after_an_offset_that_was_moved_back_are_booked_once_and_are_no_gap() -> None:
    bus = MemoryBus()
    await join(bus, 1000, 2000, 3000)
    bus.move_offset(GROUP, AT, 1)

    async with joining(bus) as readiness:
        await publish(bus, SAMPLES, tick(4000))
        await committed(bus, 4)
        assert gaps(readiness) == "no record was missed"
    assert await seqs(bus, 4) == [1000, 2000, 3000, 4000]


@pytest.mark.parametrize(
    "last", [tick(2000), sample(boot_id="next", seq=10)], ids=["duplicate", "reboot"]
)
async def test_an_offset_that_was_set_to_where_it_was_is_no_gap(last: object) -> None:
    """For example with `--to-current`, if the last tick was not booked as the node's newest one."""
    bus = MemoryBus()
    await publish(bus, SAMPLES, tick(1000), tick(2000), last)
    async with joining(bus):
        await committed(bus, 3)
    bus.move_offset(GROUP, AT, 3)

    async with joining(bus) as readiness:
        await until(lambda: not bus.is_moved(GROUP, AT))
        assert gaps(readiness) == "no record was missed"


async def test_a_group_that_has_booked_nothing_begins_where_its_offset_was_set_without_a_gap() -> (
    None
):
    bus = MemoryBus()
    await publish(bus, SAMPLES, *map(tick, (1000, 2000)))
    bus.move_offset(GROUP, AT, 1)

    async with joining(bus) as readiness:
        assert await seqs(bus, 1) == [2000]
        assert gaps(readiness) == "no record was missed"


async def test_a_topic_that_was_recreated_while_no_worker_ran_is_a_gap_once() -> None:
    """Although Kafka deletes the group's offsets with the topic. The new topic is read fully."""
    bus = MemoryBus()
    await join(bus, 1000, 2000)
    await publish(bus, SAMPLES, tick(3000))
    bus.recreate(SAMPLES.name)

    async with joining(bus) as readiness:
        await until(lambda: "topic_recreated" in gaps(readiness))
        assert f"1; the last one in {SAMPLES.name}[{PARTITION}] from offset 2" in gaps(readiness)
        # The offset is committed even if no tick follows.
        await until(lambda: bus.committed(GROUP, AT) == 0)
    async with joining(bus) as readiness:
        await is_restored(readiness)
        assert gaps(readiness) == "no record was missed"
        await publish(bus, SAMPLES, *map(tick, (4000, 5000)))
        await committed(bus, 2)
    bus.move_offset(GROUP, AT, 0)
    async with joining(bus) as readiness:
        await is_restored(readiness)
        assert gaps(readiness) == "no record was missed"
    assert await seqs(bus, 4) == [1000, 2000, 4000, 5000]


async def test_an_offset_that_was_moved_in_a_recreated_topic_is_compared_with_its_beginning() -> (
    None
):
    bus = MemoryBus()
    await join(bus, *range(1000, 6000, 1000))
    bus.recreate(SAMPLES.name)
    await publish(bus, SAMPLES, *map(tick, (6000, 7000, 8000)))
    bus.move_offset(GROUP, AT, 2)

    with capture_logs() as logs:
        async with joining(bus) as readiness:
            assert await seqs(bus, 6) == [1000, 2000, 3000, 4000, 5000, 8000]
            assert gaps(readiness).startswith("gaps since the start: 2;")

    missed = [each for each in logs if each["event"] == "records_missed"]
    assert [(each["reason"], each["first_offset"], each["next_offset"]) for each in missed] == [
        ("moved", 0, 2),
        ("topic_recreated", 5, 0),
    ]


async def test_a_node_that_sent_nothing_since_the_topic_was_recreated_causes_no_second_gap() -> (
    None
):
    bus = MemoryBus()
    other = NodeProgress(
        cluster="default",
        node="node-away",
        boot_id="boot",
        seq=1,
        time_ns=1,
        offset=90,
        topic_id="an earlier one",
    )
    await publish(bus, PROGRESS, other, key="default/node-away")
    await join(bus, 1000)
    bus.move_offset(GROUP, AT, 1)

    async with joining(bus) as readiness:
        await until(lambda: not bus.is_moved(GROUP, AT))
        assert gaps(readiness) == "no record was missed"


async def test_a_moved_offset_of_incidents_is_a_gap_of_unknown_size() -> None:
    bus = MemoryBus()
    await join(bus, 1000)
    await publish(bus, INCIDENTS, incident(), incident())
    bus.move_offset(GROUP, TopicPartition(INCIDENTS.name, PARTITION), 2)

    async with joining(bus) as readiness:
        await until(lambda: "moved" in gaps(readiness))
        assert gaps(readiness).startswith(
            f"gaps since the start: 1; the last one in {INCIDENTS.name}[{PARTITION}]"
            " before offset 2: an unknown number of records (moved"
        )
