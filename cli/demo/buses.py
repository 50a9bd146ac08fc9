"""The bus of a run; on a Kafka its topics are made first, and nobody's records are mixed with."""

import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Final

from cli.demo.joining import is_own, own_group
from cli.demo.plan import SESSION_SECONDS, DemoPlan
from cli.demo.source import DemoBus
from enricher.join.join_settings import GROUP as JOIN_GROUP
from gpuledger.bus.administration import (
    check_topics,
    create_topics,
    find_groups,
    find_live_groups,
    refuse_other_partitions,
)
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import History, Span, TopicPartition
from gpuledger.clock import Clock, SystemClock
from gpuledger.errors import TopicsError
from gpuledger.settings import KafkaSettings

_LEAVING_SECONDS: Final = SESSION_SECONDS + 5.0
"""How long members of the demo's groups may be there, before this run joins them."""
_ASKING_SECONDS: Final = 0.5


async def open_bus(plan: DemoPlan) -> DemoBus:
    """Return the bus of a run; raises `BusError`, with nothing written, where it cannot be had."""
    if plan.kafka is None:
        return MemoryBus()
    return await _open_kafka(plan.kafka, reuse_topics=plan.reuse_topics)


async def _open_kafka(settings: KafkaSettings, *, reuse_topics: bool) -> KafkaBus:
    bus = KafkaBus(settings)
    found = await check_topics(settings)
    refuse_other_partitions(found)
    missing = [line.topic for line in found if line.status == "missing"]
    filled = await filled_topics(bus, (one.topic for one in found if one.topic not in missing))
    groups = await find_groups(settings)
    refuse_topics_of_others(groups, filled=filled, reuse_topics=reuse_topics)
    await wait_until_free(lambda: find_live_groups(settings, groups), clock=SystemClock())
    if missing:
        _show(f"making {len(missing)} topics on {settings.bootstrap_servers} … ")
        done = "failed"
        try:
            await create_topics(settings)
            done = "done"
        finally:
            _show(f"{done}\n")
    return bus


async def wait_until_free(live: Callable[[], Awaitable[Sequence[str]]], *, clock: Clock) -> None:
    """Wait until the demo's groups, which are those of every demo, have no member.

    They are not joined before: a live one would lose its partitions to this run. Members of a run
    that was killed go with their session. Raises `TopicsError` where they stay longer.
    """
    until_ns = clock.monotonic_ns() + round(_LEAVING_SECONDS * 1e9)
    while groups := await live():
        if clock.monotonic_ns() >= until_ns:
            raise TopicsError(
                f"another demo reads these topics: the consumer group {groups[0]} has had a member"
                f" for {_LEAVING_SECONDS:g} s, and each would count the other's ticks; end it, or"
                " name other brokers"
            )
        await clock.sleep(_ASKING_SECONDS)


async def filled_topics(bus: History, topics: Iterable[str]) -> list[str]:
    """Return those of the topics that hold records."""
    async with bus.reader() as reader:
        return [topic for topic in topics if holds_records(await reader.spans(topic))]


def refuse_topics_of_others(
    groups: Mapping[str, Sequence[str]], *, filled: Sequence[str], reuse_topics: bool
) -> None:
    """Raise `TopicsError` where the demo's records would mix with those of somebody else.

    `groups` are the consumer groups with the topics they read. A group that is no demo's would
    take the demo's records for those of real GPUs. Records are taken for an earlier demo's where
    its groups have read them, and `reuse_topics` must say so as well.
    """
    for group, topics in groups.items():
        if not is_own(group):
            raise TopicsError(
                f"{topics[0]} is read by the consumer group {group}, which is not the demo's and"
                " would take the demo's records for real ones; name a broker for demos alone"
            )
    if not filled:
        return
    if not reuse_topics:
        raise TopicsError(
            f"{filled[0]} holds records already, and the demo's would mix with them; name "
            "a broker without them, or, where they are an earlier demo's, add "
            "--reuse-topics"
        )
    if not groups:
        raise TopicsError(
            f"{filled[0]} holds records that are no demo's: the consumer group"
            f" {own_group(JOIN_GROUP)} has read none of the topics; name a broker without them, or"
            " delete the topics where nobody needs them"
        )


def holds_records(spans: Mapping[TopicPartition, Span]) -> bool:
    """Return whether any partition keeps anything."""
    return any(span.end > span.first for span in spans.values())


def _show(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
