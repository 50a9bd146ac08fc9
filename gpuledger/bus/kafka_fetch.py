"""What a poll waits for: its turn, and then records or a rebalance, whichever comes first.

aiokafka runs a rebalance in a task of its own. `Rebalances` takes it into the consumer's poll, so
that a stage's callbacks never run while it works on polled records, as with Kafka's own client.

All records are unpacked on the event loop, on which health pages and heartbeats wait. So between
two turns of it all consumers together take up batches until `MAX_TURN_BYTES` have been fetched and
unpacked, of whichever partitions; the batch that goes beyond is the last. What is left of a
broker's answer stays where it is. So that is also what one poll brings at most.

Theory of operation. aiokafka's fetcher knows two cases: there are records, or it waits for a broker
to send some. A turn that is used up is a third one: there may be records, and nobody will send any.
So a poll first waits for its turn (`Turn.wait`), takes what is there, and waits for a broker only
if the turn had room to the last: then nothing is there. A poll that waits for a broker and wakes in
a turn that others have used up waits for the next one likewise.

Turns are given out first come, first served: who has a backlog and polls in every turn stands
behind those that already wait. Of these each end of a turn lets in the first one alone, as how much
is left of the new turn shows only once that one has taken what it wants.

It holds for every consumer of the process, one of aiokafka's own too: `install_turns` puts the two
functions in the place of the fetcher's own. Held to the pinned minor version like
`kafka_internals`.
"""

# ruff: noqa: SLF001  # a waiter, and whether the fetcher is closed, have no public name
import asyncio
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import aiokafka
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener
from aiokafka.consumer.fetcher import Fetcher
from aiokafka.errors import ConsumerStoppedError

from gpuledger.bus.kafka_internals import raise_group_errors, serve_last
from gpuledger.bus.limits import MAX_TURN_BYTES
from gpuledger.bus.protocol import PartitionsCallback, Polled, Record, Subscription, TopicPartition

_PAUSE_SECONDS: Final = 60.0
"""After which who waits for one record looks again; a broker's answer wakes it before."""


class Turn(threading.local):
    """What may be unpacked until the event loop has gone round once more; each thread has its own.

    Outside of a loop nobody waits: what is counted there is forgotten by the next `begin`.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ends = False
        """Whether the end of this turn is on its way."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.used_bytes = 0
        """What was fetched, unpacked, or given up as too much: added to by whoever does it."""

    @property
    def is_used_up(self) -> bool:
        """Return whether no further batch is to be taken up."""
        return self.used_bytes > MAX_TURN_BYTES

    def begin(self) -> None:
        """Have the turn end when the running loop has gone round once more."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            # What another loop of this thread left has no end, and nobody waits there any more.
            self._loop, self._ends, self.used_bytes, self._waiting = loop, False, 0, deque()
        if not self._ends:
            self._ends = True
            loop.call_soon(self._end)

    async def wait(self) -> None:
        """Return where something may be taken up: at once, or behind those that came before."""
        self.begin()
        waiting = self._waiting
        if not waiting and not self.is_used_up:
            return
        admitted = asyncio.get_running_loop().create_future()
        waiting.append(admitted)
        try:
            await admitted
        finally:
            # It stood in the queue until now, so that nobody came between it and its turn.
            waiting.remove(admitted)

    def _end(self) -> None:
        self._ends, self.used_bytes = False, 0
        if self._waiting:
            # One that was cancelled leaves the queue in this turn, which has an end as well.
            if not self._waiting[0].done():
                self._waiting[0].set_result(None)
            self.begin()


turn: Final = Turn()

_take_what_is_there: Final = Fetcher.fetched_records


def install_turns() -> None:
    """Have every consumer of this process poll as this module says."""
    Fetcher.fetched_records = fetched_records
    Fetcher.next_record = next_record


async def fetched_records(
    fetcher: Any,  # noqa: ANN401  # aiokafka is untyped
    partitions: Sequence[Any],
    timeout: float = 0,  # noqa: ASYNC109  # as aiokafka names it, in seconds
    max_records: int | None = None,
) -> Mapping[Any, Sequence[Record]]:
    """Return what is there of the partitions, or comes in time; nothing after that."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    while True:
        await turn.wait()
        found: Mapping[Any, Sequence[Record]]
        found = await _take_what_is_there(fetcher, partitions, 0, max_records)
        left_seconds = deadline - loop.time()
        if found or left_seconds <= 0:
            return found
        if turn.is_used_up:
            continue  # by others meanwhile, or by batches without a record for anybody
        # Not one instruction of another task lies between the look and this: no answer is missed.
        waiter = fetcher._create_fetch_waiter()
        try:
            await asyncio.wait([waiter], timeout=left_seconds)
            if not waiter.done() or fetcher._closed:
                return {}
            waiter.result()  # raises what has gone wrong in the group
        finally:
            waiter.cancel()  # else the fetcher would keep it until the next answer


async def next_record(fetcher: Any, partitions: Sequence[Any]) -> Record:  # noqa: ANN401  # untyped
    """Return the next record of the partitions; wait for it as long as the consumer is open."""
    while not fetcher._closed:
        found = await fetched_records(fetcher, partitions, _PAUSE_SECONDS, max_records=1)
        for records in found.values():
            return records[0]
    raise ConsumerStoppedError


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
