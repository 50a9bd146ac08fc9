"""Partitions that an operator added: the join refuses them, because nodes would move."""

from gpuledger.bus.memory import MemoryBus
from gpuledger.runtime import Readiness
from tests.default_topics import PROGRESS, SAMPLES, TOPICS
from tests.unit.enricher.join.joining import committed, joining, publish, read_events, tick, until


def refuses(readiness: Readiness, *words: str) -> bool:
    check = readiness.check("kafka")
    return not check.is_ok and all(word in check.detail for word in words)


def add_partitions(bus: MemoryBus, total: int) -> None:
    for topic in TOPICS:
        if topic.is_placed_by_node:
            bus.add_partitions(topic.name, total)


async def test_a_join_that_runs_refuses_added_partitions_and_so_does_the_next_one() -> None:
    bus = MemoryBus()
    await publish(bus, SAMPLES, tick(1000))
    async with joining(bus) as readiness:
        await committed(bus, 1)
        add_partitions(bus, 24)
        await publish(bus, SAMPLES, tick(2000))
        await until(lambda: refuses(readiness, f"{SAMPLES.name} has 24", "had 12"))
    async with joining(bus) as readiness:
        await until(lambda: refuses(readiness, f"{SAMPLES.name} has 24", "had 12"))
    assert [event.seq for event in await read_events(bus, 1)] == [1000]


async def test_a_join_refuses_topics_of_nodes_with_different_numbers() -> None:
    bus = MemoryBus()
    bus.add_partitions(PROGRESS.name, 24)
    async with joining(bus) as readiness:
        await until(lambda: refuses(readiness, f"{PROGRESS.name} 24", f"{SAMPLES.name} 12"))
