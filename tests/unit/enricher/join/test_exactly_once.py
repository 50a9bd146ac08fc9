"""How often events are published if transactions fail or another worker takes over."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count

import msgspec
import pytest
from typing_extensions import override

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import (
    Message,
    Subscription,
    TopicPartition,
    Transactions,
)
from gpuledger.bus.transactional_writers import TransactionalWriters
from gpuledger.codec import Decoder, encode
from gpuledger.dead_letter_queue import DeadLetterQueue
from gpuledger.errors import BusUnavailableError
from gpuledger.records import NodeProgress
from gpuledger.runtime import Check
from gpuledger.settings import KafkaSettings
from gpuledger_enricher.join.delivery import CommitBatch, Delivery
from gpuledger_enricher.join.join_settings import JoinSettings, JoinTuning
from tests.default_topics import DEAD_LETTERS, EVENTS, PROGRESS, SAMPLES, TOPICS
from tests.unit.enricher.join.joining import (
    GROUP,
    PARTITION,
    committed,
    joining,
    publish,
    read,
    read_events,
    tick,
)
from tests.unit.enricher.join.ticks import SECOND_NS, sample

SETTINGS = JoinSettings(
    kafka=KafkaSettings(session_timeout_seconds=0.03),
    join=JoinTuning(
        poll_timeout_seconds=0.02,
        commit_interval_seconds=0.001,
        podwatch_timeout_seconds=0,
    ),
)
TRANSACTIONAL_ID = f"{GROUP}-{PARTITION}"
EVENTS_PARTITION = TopicPartition(EVENTS.name, PARTITION)


class BrittleBus(MemoryBus):
    """A bus whose transactions fail a given number of times."""

    def __init__(self, *, before: int = 0, after: int = 0) -> None:
        super().__init__()
        self.before, self.after = before, after

    @override
    @asynccontextmanager
    async def transactions(self, transactional_id: str) -> AsyncIterator[Transactions]:
        async with super().transactions(transactional_id) as transactions:
            yield BrittleTransactions(transactions, self)

    def fail_before(self) -> None:
        """Fail before anything is done."""
        if self.before:
            self.before -= 1
            raise BusUnavailableError("no broker answers")

    def fail_after(self) -> None:
        """Fail after everything is done, as if the response were lost."""
        if self.after:
            self.after -= 1
            raise BusUnavailableError("the broker's answer was lost")


class BrittleTransactions:
    def __init__(self, transactions: Transactions, bus: BrittleBus) -> None:
        self._transactions, self._bus = transactions, bus

    async def commit(
        self,
        messages: Mapping[TopicPartition, Sequence[Message]],
        *,
        offsets: Mapping[TopicPartition, int],
        group: str,
    ) -> None:
        """Commit, or fail."""
        self._bus.fail_before()
        await self._transactions.commit(messages, offsets=offsets, group=group)
        self._bus.fail_after()


async def events_there(bus: MemoryBus) -> list[int]:
    """Return the `seq` of every event on the topic."""
    found: list[bytes] = []
    requested = Subscription(group=f"reader-{next(_readers)}", topics=[EVENTS.name])
    async with bus.consumer(requested) as consumer:
        ends = await consumer.end_offsets([EVENTS_PARTITION])
        while len(found) < ends[EVENTS_PARTITION]:
            polled = await consumer.poll(timeout_seconds=1, max_records=100)
            found += [record.value or b"" for records in polled.values() for record in records]
    return [msgspec.json.decode(value)["seq"] for value in found]


_readers = count()


def watermark(seq: int, *, offset: int = 0) -> NodeProgress:
    """Return the progress of a node booked through this tick."""
    boot_id = sample().boot_id
    return NodeProgress(
        cluster="default", node="node-a", boot_id=boot_id, seq=seq, time_ns=SECOND_NS, offset=offset
    )


async def read_watermarks(bus: MemoryBus, number: int) -> list[NodeProgress]:
    """Read `count` progress records."""
    decoder = Decoder(topic=PROGRESS.name, record=NodeProgress)
    return [decoder.decode(value) for value in await read(bus, PROGRESS, number)]


async def test_the_progress_of_a_node_names_its_last_published_event() -> None:
    """With the tick's number and offset, in the node's partition."""
    bus = MemoryBus()
    await publish(bus, SAMPLES, tick(1), tick(2))
    async with joining(bus, settings=SETTINGS):
        (marked,) = await read_watermarks(bus, 1)
    assert (marked.node, marked.seq, marked.offset) == ("node-a", 2, 1)


async def test_events_that_a_previous_worker_published_are_not_published_again() -> None:
    """Even if it could not commit its offsets."""
    bus = MemoryBus()
    await publish(bus, SAMPLES, tick(1), tick(2), tick(3))
    await publish(bus, PROGRESS, watermark(2, offset=1))
    async with joining(bus, settings=SETTINGS):
        await committed(bus, 3)
    assert await events_there(bus) == [3]


async def test_repeated_ticks_are_dropped_after_a_restart() -> None:
    """For example from an agent that does not know that its last ticks were accepted."""
    bus = MemoryBus()
    await publish(bus, SAMPLES, tick(1), tick(2))
    async with joining(bus, settings=SETTINGS):
        await committed(bus, 2)
    await publish(bus, SAMPLES, tick(1), tick(2), tick(3))
    async with joining(bus, settings=SETTINGS):
        await committed(bus, 5)
    assert await events_there(bus) == [1, 2, 3]


@pytest.mark.parametrize("failures", [1, 3])
async def test_a_publication_that_fails_before_anything_is_done_is_made_once(failures: int) -> None:
    """It is retried until it succeeds."""
    bus = BrittleBus(before=failures)
    await publish(bus, SAMPLES, tick(1), tick(2))
    async with joining(bus, settings=SETTINGS):
        await committed(bus, 2)
    assert await events_there(bus) == [1, 2]


async def test_the_join_does_not_repeat_a_transaction_that_succeeded_without_a_response() -> None:
    """The committed offsets show that it succeeded."""
    bus = BrittleBus(after=2)
    await publish(bus, SAMPLES, tick(1), b"no json")
    async with joining(bus, settings=SETTINGS):
        await read_events(bus, 1)
        await publish(bus, SAMPLES, tick(2))
        await committed(bus, 3)
    assert await events_there(bus) == [1, 2]
    assert len(await read(bus, DEAD_LETTERS, 1)) == 1


async def test_the_join_yields_to_another_owner_of_its_partition_and_then_continues() -> None:
    """The work in progress is rejected; nothing is lost and nothing is duplicated."""
    bus = MemoryBus()
    await publish(bus, SAMPLES, tick(1))
    async with joining(bus, settings=SETTINGS):
        await committed(bus, 1)
        async with bus.transactions(TRANSACTIONAL_ID) as other:
            await publish(bus, SAMPLES, tick(2), tick(3))
            await other.commit(
                {
                    EVENTS_PARTITION: [_event(2)],
                    TopicPartition(PROGRESS.name, PARTITION): [_watermark(2)],
                },
                offsets={TopicPartition(SAMPLES.name, PARTITION): 2},
                group=GROUP,
            )
        await committed(bus, 3)
    assert await events_there(bus) == [1, 2, 3]


async def test_the_join_commits_offsets_only_together_with_their_events() -> None:
    """The events of every committed offset are on the topic."""
    bus = MemoryBus()
    partition = TopicPartition(SAMPLES.name, PARTITION)
    async with joining(bus, settings=SETTINGS):
        for seq in range(1, 30):
            await publish(bus, SAMPLES, tick(seq))
            async with bus.consumer(Subscription(group=GROUP, stage="join", topics=[])) as consumer:
                done = await consumer.committed(partition) or 0
                ends = await consumer.end_offsets([EVENTS_PARTITION])
            assert ends[EVENTS_PARTITION] == done
        await committed(bus, 29)


async def test_a_second_worker_that_comes_and_goes_loses_and_duplicates_nothing() -> None:
    """Work collected for a revoked partition belongs to the next owner."""
    bus = MemoryBus()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(joining(bus, settings=SETTINGS))
        second = await stack.enter_async_context(AsyncExitStack())
        for seq in range(1, 41):
            await publish(bus, SAMPLES, tick(seq))
            if seq % 10 == 5:
                await second.enter_async_context(joining(bus, settings=SETTINGS))
            if seq % 10 == 9:
                await second.aclose()
            if seq % 3:
                await committed(bus, seq)
        await committed(bus, 40)
    assert await events_there(bus) == list(range(1, 41))


def _event(seq: int) -> Message:
    return Message(b"default/node-a", msgspec.json.encode({"seq": seq}), 0)


def _watermark(seq: int) -> Message:
    return Message(b"default/node-a", encode(watermark(seq, offset=1)), 0)


async def test_the_check_passes_once_an_undelivered_partition_is_revoked() -> None:
    bus, check = BrittleBus(before=1), Check()
    async with (
        TransactionalWriters(bus=bus, group=GROUP, finish_seconds=0) as writers,
        bus.producer() as producer,
    ):
        dead_letters = DeadLetterQueue(
            consumer=GROUP, producer=producer, partitions=1, topic=DEAD_LETTERS
        )
        delivery = Delivery(
            writers=writers, dead_letters=dead_letters, check=check, fenced_seconds=0
        )
        await delivery.take_over([PARTITION])
        made = CommitBatch(partition=PARTITION, begun_seconds=0.0, topics=TOPICS)
        made.add(EVENTS_PARTITION, [Message(b"default/node-a", b"", 0)])
        assert set(await delivery.deliver([made])) == {PARTITION}
        assert check.has_failed

        await delivery.give_up([PARTITION + 1])
        assert check.has_failed
        await delivery.give_up([PARTITION])
        assert check.is_ok


async def test_the_check_passes_once_an_undelivered_batch_is_delivered() -> None:
    bus, check = BrittleBus(before=1), Check()
    async with (
        TransactionalWriters(bus=bus, group=GROUP, finish_seconds=0) as writers,
        bus.producer() as producer,
    ):
        dead_letters = DeadLetterQueue(
            consumer=GROUP, producer=producer, partitions=1, topic=DEAD_LETTERS
        )
        delivery = Delivery(
            writers=writers, dead_letters=dead_letters, check=check, fenced_seconds=0
        )
        for undone in ({PARTITION}, set[int]()):
            await delivery.take_over([PARTITION])
            made = CommitBatch(partition=PARTITION, begun_seconds=0.0, topics=TOPICS)
            made.add(EVENTS_PARTITION, [Message(b"default/node-a", b"", 0)])
            assert set(await delivery.deliver([made])) == undone
            assert check.has_failed == bool(undone)
