"""The bus of a run: topics are made first, and the run's records are mixed with nobody's.

On a Kafka others may be at work. Before a run writes anything, its topics must hold no records but
an earlier demo's, and the demo's consumer groups, which are those of every demo, no members. Two
demos that begin at once both pass that: so the groups must then have given all partitions to this
run, and nobody may have written a tick meanwhile.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol

from gpuledger.bus.administration import (
    check_topics,
    create_topics,
    find_groups,
    find_live_groups,
    refuse_other_partitions,
)
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import History, Span, TopicPartition, TransactionalBus
from gpuledger.clock import NS_PER_SECOND, Clock, SystemClock
from gpuledger.errors import BusUnavailableError, TopicsError
from gpuledger.runtime.tasks import end_tasks
from gpuledger.topics import Topic
from gpuledger_cli.demo.plan import SESSION_SECONDS, DemoPlan
from gpuledger_cli.demo.run_bus import PREFIX, Offsets, RunBus, is_own, own_group
from gpuledger_cli.demo.stage_tasks import Stages
from gpuledger_enricher.join.join_settings import GROUP as JOIN_GROUP
from gpuledger_enricher.podwatch.publish import WatchBus

_LEAVING_SECONDS: Final = SESSION_SECONDS + 5.0
"""How long members of the demo's groups may be there, before this run joins them."""
_ASKING_SECONDS: Final = 0.5


class DemoBus(TransactionalBus, WatchBus, Protocol):
    """A bus that the whole pipeline runs on; the pod watch reads back what it published."""


async def open_bus(plan: DemoPlan) -> DemoBus:
    """Return the bus of a run; raises `BusError`, with nothing written, where it cannot be had."""
    if plan.kafka is None:
        return MemoryBus()
    settings = plan.kafka
    bus = KafkaBus(settings)
    found = await check_topics(settings)
    refuse_other_partitions(found)
    missing = [line.topic for line in found if line.status == "missing"]
    filled = await filled_topics(bus, (line.topic for line in found if line.topic not in missing))
    groups = await find_groups(settings)
    refuse_topics_of_others(groups, filled=filled, reuse_topics=plan.reuse_topics)
    await wait_until_free(lambda: find_live_groups(settings, groups), clock=SystemClock())
    if missing:
        # Said before it is done, as a broker may take seconds for it.
        sys.stderr.write(f"making {len(missing)} topics on {settings.bootstrap_servers} … ")
        sys.stderr.flush()
        done = "failed"
        try:
            await create_topics(settings)
            done = "done"
        finally:
            sys.stderr.write(f"{done}\n")
            sys.stderr.flush()
    return bus


async def wait_until_free(live: Callable[[], Awaitable[Sequence[str]]], *, clock: Clock) -> None:
    """Wait until the demo's groups, which are those of every demo, have no member.

    They are not joined before: a live one would lose its partitions to this run. Members of a run
    that was killed go with their session. Raises `TopicsError` where they stay longer.
    """
    until_ns = clock.monotonic_ns() + round(_LEAVING_SECONDS * NS_PER_SECOND)
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


_JOINING_SECONDS: Final = 30.0
"""How long the groups may take to give all partitions to this run. Members of a run that ended
without a word hold theirs for a session, which is `gpuledger_cli.demo.plan`'s."""
_BROKERS_POLL_SECONDS: Final = 1.0


async def hold_all(bus: DemoBus, stages: Stages, views: Sequence[RunBus]) -> None:
    """Wait until each group has given all partitions to this run.

    Raises `BusError` where the brokers fall silent, or the groups have other members; and what a
    stage has raised.
    """
    querying = asyncio.create_task(_query_until_silent(bus))
    try:
        async with asyncio.timeout(_JOINING_SECONDS):
            while not all(view.holds_all() for view in views):
                stages.must_run()
                # A consumer waits for brokers without an end; who asks them hears of their silence.
                if querying.done():
                    await querying
                await asyncio.sleep(0.02)
    except TimeoutError as error:
        raise BusUnavailableError(
            f"the brokers have not given all partitions to this demo's consumer groups ({PREFIX}…)"
            f" within {_JOINING_SECONDS:g} s: another demo reads these topics, and each would count"
            " the other's ticks; end it, or name other brokers"
        ) from error
    finally:
        await end_tasks(querying)


def refuse_changes(beginning: Offsets, now: Offsets, *, samples: Topic) -> None:
    """Raise `BusError` where a tick was written since the beginning: none of this run is.

    Another demo that began at the same time would else have its ticks booked by this one. In other
    topics transactions may end meanwhile that a run left open that was killed.
    """
    if any(now[at] != beginning.get(at) for at in now if at.topic == samples.name):
        raise BusUnavailableError(
            f"somebody has written to {samples.name} while this demo's consumer groups ({PREFIX}…)"
            " formed: another demo reads these topics, and each would count the other's ticks; end"
            " it, or name other brokers"
        )


async def _query_until_silent(bus: DemoBus) -> None:
    """Raise `BusError` once the brokers do not answer: stages wait for them, without an end."""
    while True:
        await bus.partitions(bus.topics.samples.name)
        await asyncio.sleep(_BROKERS_POLL_SECONDS)
