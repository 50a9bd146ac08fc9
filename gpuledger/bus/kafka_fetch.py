"""What a poll waits for: records or a rebalance, whichever comes first.

aiokafka runs a rebalance in a task of its own. `Rebalances` takes it into the consumer's poll, so
that a stage's callbacks never run while it works on polled records, as with Kafka's own client.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import aiokafka
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener

from gpuledger.bus.aiokafka_patches.consumers import raise_group_errors, serve_last
from gpuledger.bus.protocol import PartitionsCallback, Polled, Record, Subscription, TopicPartition

Partitions = frozenset[TopicPartition]


class Rebalances(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka is untyped
    """What this consumer holds, and what the group wants of it."""

    def __init__(self, subscription: Subscription, *, begin: PartitionsCallback) -> None:
        self.held: Partitions = frozenset()
        """What the stage knows that it holds."""
        self.changed = asyncio.Event()
        """Set when `follow` has something to do."""
        self.has_joined = False
        """Whether the group has given this consumer its share, which may be nothing."""
        self._subscription = subscription
        self._begin = begin
        """Sets new partitions to their first position, before the stage hears of them."""
        self._revoking = False
        self._given_up = asyncio.Event()
        self._offered: Partitions | None = None

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:  # noqa: ARG002  # all are: the assignor is eager
        """Wait until the stage has given up what it holds; the group waits for that meanwhile."""
        self._offered = None
        if not self.held:
            return
        self._revoking = True
        self._given_up.clear()
        self.changed.set()
        await self._given_up.wait()

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        """Offer the partitions; without waiting, for heartbeats begin only after this."""
        self._offered = frozenset(TopicPartition(*partition) for partition in assigned)
        self.changed.set()

    async def follow(self) -> None:
        """Give up and take up partitions as the group wants it, with the stage's callbacks."""
        self.changed.clear()
        if self._revoking:
            await self.give_up()
        offered = self._offered
        if offered is not None:
            self.held = offered
            self.has_joined = True
            # Where a callback fails, the next poll calls both again.
            await self._begin(offered)
            await self._subscription.on_assigned(offered)
            if self._offered is offered:
                self._offered = None

    async def give_up(self) -> None:
        """Give up what is held, with the stage's callback."""
        try:
            if self.held:
                await self._subscription.on_revoked(self.held)
        finally:
            self.held = frozenset()
            self._revoking = False
            self._given_up.set()

    async def end(self) -> None:
        """Give up all that came by a client that was closed, also what it offered at the last."""
        self._offered = None
        self.has_joined = False
        await self.give_up()


GRACE_SECONDS: Final = 0.5
"""`getmany` ends by itself at its deadline, except while the group is being rebalanced."""


async def fetch(
    client: AIOKafkaConsumer, rebalances: Rebalances, *, deadline: float, max_records: int
) -> Polled:
    """Return what is there, or wait for it; nothing at the deadline or where a rebalance is due.

    Partitions take turns: whoever was served goes last, so that a backlog in one, whatever its
    records are, keeps no other waiting for longer than one poll.
    """
    partitions = [named(partition) for partition in rebalances.held]
    raise_group_errors(client)
    # Without a task where something is there, as under load: a task costs more than a small poll.
    if partitions and not rebalances.changed.is_set():
        try:
            async with asyncio.timeout(GRACE_SECONDS):
                found = await client.getmany(*partitions, timeout_ms=0, max_records=max_records)
        # The group is being rebalanced: `getmany` waits for its end, which waits for our poll.
        except TimeoutError:
            return {}
        if found:
            serve_last(client, found)
            return _records(found)
    left_seconds = deadline - asyncio.get_running_loop().time()
    if left_seconds <= 0 or rebalances.changed.is_set():
        return {}
    # Woken by a rebalance too: the group waits for this member until it has given up.
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
    """Return what was fetched; nothing where the assignment changed or the time is over before."""
    waiting = [changed] if fetching is None else [fetching, changed]
    try:
        await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        # Records that nobody will see are to be fetched again: the position is behind them already.
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


def named(partition: TopicPartition) -> Any:  # noqa: ANN401  # aiokafka is untyped
    """Return aiokafka's own partition: equal to ours, but it asks for its type."""
    return aiokafka.TopicPartition(*partition)


def _records(found: Mapping[Any, Sequence[Record]]) -> Polled:
    return {TopicPartition(*partition): records for partition, records in found.items()}
