"""Takes aiokafka's rebalances, which run in a task of its own, into the consumer's poll.

So a stage's callbacks never run while it works on polled records, as with Kafka's own client.
"""

import asyncio
from collections.abc import Iterable

from aiokafka import ConsumerRebalanceListener

from gpuledger.bus.protocol import PartitionsCallback, Subscription, TopicPartition

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
        self._offered = frozenset(TopicPartition(*place) for place in assigned)
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
