"""Waits within a poll for records or a rebalance, whichever comes first.

aiokafka runs a rebalance in a separate task. `Rebalances` moves its callbacks into the consumer's
poll, so that they never run while a component processes polled records, as in Kafka's own client.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import aiokafka
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener

from gpuledger.bus.aiokafka_patches.consumers import raise_group_errors, serve_last
from gpuledger.bus.protocol import PartitionsCallback, Polled, Record, Subscription, TopicPartition

Partitions = frozenset[TopicPartition]


class Rebalances(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka is untyped
    """This consumer's partitions, and the changes that its group has requested."""

    def __init__(self, subscription: Subscription, *, begin: PartitionsCallback) -> None:
        self.held: Partitions = frozenset()
        """The partitions that the component reads: taken up after an assignment, not given up."""
        self.changed = asyncio.Event()
        """Set when `follow` has something to do."""
        self.has_joined = False
        """Whether the group has assigned this consumer its share, which may be empty."""
        self._subscription = subscription
        self._begin = begin
        """Sets the start position of new partitions before the subscription's callback runs."""
        self._revoking = False
        self._given_up = asyncio.Event()
        self._offered: Partitions | None = None

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:  # noqa: ARG002  # all are: the assignor is eager
        """Wait until the component has given up its partitions; the rebalance waits meanwhile."""
        self._offered = None
        if not self.held:
            return
        self._revoking = True
        self._given_up.clear()
        self.changed.set()
        await self._given_up.wait()

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        """Store the partitions for `follow`; do not wait, or heartbeats would start too late."""
        self._offered = frozenset(TopicPartition(*partition) for partition in assigned)
        self.changed.set()

    async def follow(self) -> None:
        """Make the changes that the group requested, and call the subscription's callbacks."""
        self.changed.clear()
        if self._revoking:
            await self.give_up()
        offered = self._offered
        if offered is not None:
            self.held = offered
            self.has_joined = True
            # If one of these two calls fails, the next poll repeats both.
            await self._begin(offered)
            await self._subscription.on_assigned(offered)
            if self._offered is offered:
                self._offered = None

    async def give_up(self) -> None:
        """Give up all held partitions, and call the subscription's callback."""
        try:
            if self.held:
                await self._subscription.on_revoked(self.held)
        finally:
            self.held = frozenset()
            self._revoking = False
            self._given_up.set()

    async def end(self) -> None:
        """Give up all partitions of a closed client, and forget partitions not yet taken up."""
        self._offered = None
        self.has_joined = False
        await self.give_up()


GRACE_SECONDS: Final = 0.5
"""Extra time for `getmany`, which observes its deadline except during a rebalance."""


async def fetch(
    client: AIOKafkaConsumer, rebalances: Rebalances, *, deadline: float, max_records: int
) -> Polled:
    """Return available records, or wait for some.

    Returns nothing if a rebalance is due, or at `deadline`, which is a time of the event loop.
    Partitions take turns: after a partition was served, it goes last, so that a backlog in one
    partition delays the others by at most one poll.
    """
    partitions = [named(partition) for partition in rebalances.held]
    raise_group_errors(client)
    # Under load, records are available at once. Taking them without a task is cheaper: a task costs
    # more than a small poll.
    if partitions and not rebalances.changed.is_set():
        try:
            async with asyncio.timeout(GRACE_SECONDS):
                found = await client.getmany(*partitions, timeout_ms=0, max_records=max_records)
        # During a rebalance, `getmany` waits until the rebalance ends, and the rebalance waits for
        # the next poll.
        except TimeoutError:
            return {}
        if found:
            serve_last(client, found)
            return _records(found)
    left_seconds = deadline - asyncio.get_running_loop().time()
    if left_seconds <= 0 or rebalances.changed.is_set():
        return {}
    # A rebalance ends the wait too: the group waits for this member to give up its partitions.
    changed = asyncio.create_task(rebalances.changed.wait())
    if not partitions:
        return await _first_of(None, changed, client=client, seconds=left_seconds)
    getting = client.getmany(
        *partitions, timeout_ms=int(left_seconds * 1000), max_records=max_records
    )
    fetching = asyncio.create_task(getting)
    seconds = left_seconds + GRACE_SECONDS
    return await _first_of(fetching, changed, client=client, seconds=seconds)


async def _first_of(
    fetching: asyncio.Task[Any] | None,
    changed: asyncio.Task[Any],
    *,
    client: AIOKafkaConsumer,
    seconds: float,
) -> Polled:
    """Return the fetched records, or nothing if the assignment changes or time runs out first."""
    waiting = [changed] if fetching is None else [fetching, changed]
    try:
        await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        # The caller will not receive these records, but the position is already past them: seek
        # back to fetch them again.
        is_done = fetching is not None and fetching.done() and not fetching.cancelled()
        if fetching is not None and is_done and fetching.exception() is None:
            for partition, records in fetching.result().items():
                client.seek(partition, records[0].first_offset)
        raise
    finally:
        for task in waiting:
            task.cancel()
    if fetching is None or not fetching.done():
        return {}
    found = fetching.result()
    serve_last(client, found)
    return _records(found)


class Answers:
    """Measures the time since brokers last answered for each partition that is being fetched."""

    def __init__(self, *, clock_seconds: Callable[[], float] = time.monotonic) -> None:
        self._clock_seconds = clock_seconds
        self._observed_at = clock_seconds()
        self._known: dict[TopicPartition, tuple[int | None, float]] = {}
        """For each partition: the time of its last answer, in ms since the epoch, and when this
        time was first observed, in seconds of the clock."""

    def observe(self, times: Mapping[TopicPartition, int | None]) -> None:
        """Record the times of the last answers of the partitions that are being fetched."""
        now = self._clock_seconds()
        answered: dict[TopicPartition, tuple[int | None, float]] = {}
        for partition, at in times.items():
            known = self._known.get(partition)
            answered[partition] = known if known and known[0] == at else (at, now)
        self._observed_at, self._known = now, answered

    def seconds(self) -> float:
        """Return the longest time without an answer; it grows between observations."""
        begin_seconds = [seen_seconds for _, seen_seconds in self._known.values()]
        return self._clock_seconds() - min(begin_seconds, default=self._observed_at)


def named(partition: TopicPartition) -> Any:  # noqa: ANN401  # aiokafka is untyped
    """Convert a partition to aiokafka's `TopicPartition`, because aiokafka checks the type."""
    return aiokafka.TopicPartition(*partition)


def _records(found: Mapping[Any, Sequence[Record]]) -> Polled:
    return {TopicPartition(*partition): records for partition, records in found.items()}
