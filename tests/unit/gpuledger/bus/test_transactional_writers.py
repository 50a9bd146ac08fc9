"""Ownership of partitions' writers, on a bus that records their opening, commits and closing."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import pytest
from typing_extensions import override

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Message, Subscription, TopicPartition, Transactions
from gpuledger.bus.transactional_writers import TransactionalWriters, pause_seconds_after
from gpuledger.errors import BusUnavailableError, FencedError
from tests.default_topics import EVENTS, ROWS
from tests.errors import has_words
from tests.hanging import HANG_SECONDS

GROUP = "gpuledger-test"


class WatchedBus(MemoryBus):
    """Records its transactions; commits and opens can be held back, and some ids are taken."""

    def __init__(self, *, taken: Sequence[str] = (), of: MemoryBus | None = None) -> None:
        super().__init__()
        self.story: list[str] = []
        self.may_commit = asyncio.Event()
        self.may_commit.set()
        self.may_open = asyncio.Event()
        self.may_open.set()
        self._taken = taken
        self._of = of

    @override
    @asynccontextmanager
    async def transactions(self, transactional_id: str) -> AsyncIterator[Transactions]:
        if transactional_id in self._taken:
            raise FencedError("another producer has it")
        await self.may_open.wait()
        opened = super().transactions if self._of is None else self._of.transactions
        async with opened(transactional_id) as inner:
            watched = WatchedTransactions(inner, bus=self, name=transactional_id)
            await turn()  # so that a fenced producer is fenced first
            self.story.append(f"opened {transactional_id}")
            try:
                yield watched
            finally:
                watched.is_closed = True
                self.story.append(f"closed {transactional_id}")


class WatchedTransactions:
    """Rejects calls after it was closed, as Kafka's transactions do."""

    def __init__(self, inner: Transactions, *, bus: WatchedBus, name: str) -> None:
        self._inner, self._bus, self._name = inner, bus, name
        self.is_closed = False

    async def commit(
        self,
        messages: Mapping[TopicPartition, Sequence[Message]],
        *,
        offsets: Mapping[TopicPartition, int],
        group: str,
    ) -> None:
        if self.is_closed:
            raise BusUnavailableError(f"{self._name} is not open")
        self._bus.story.append(f"began {self._name}")
        await self._bus.may_commit.wait()
        await self._inner.commit(messages, offsets=offsets, group=group)
        self._bus.story.append(f"committed {self._name}")


def writers_of(bus: MemoryBus, *, finish_seconds: float = 30.0) -> TransactionalWriters:
    return TransactionalWriters(bus=bus, group=GROUP, finish_seconds=finish_seconds)


async def commit(writers: TransactionalWriters, number: int, *, next_offset: int = 1) -> None:
    """Publish a row of a partition together with its next offset."""
    await writers.commit(
        number,
        {TopicPartition(ROWS.name, number): [Message(None, b"row", 0)]},
        offsets={TopicPartition(EVENTS.name, number): next_offset},
    )


async def committed(bus: MemoryBus, number: int) -> int | None:
    async with bus.consumer(Subscription(group=GROUP, topics=[])) as consumer:
        return await consumer.committed(TopicPartition(EVENTS.name, number))


async def turn() -> None:
    """Give other tasks a chance to run."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_messages_and_the_groups_offsets_are_committed_under_the_partitions_id() -> None:
    bus = WatchedBus()
    async with writers_of(bus) as writers:
        await writers.open([3])
        await commit(writers, 3, next_offset=7)

    assert await committed(bus, 3) == 7
    assert [record.partition for record in bus.kept(ROWS.name)] == [3]
    assert bus.story == [f"{what} {GROUP}-3" for what in ("opened", "began", "committed", "closed")]


async def test_only_the_last_owner_to_open_a_partition_can_commit() -> None:
    bus = WatchedBus()
    async with writers_of(bus) as first, writers_of(bus) as second:
        await first.open([1, 2])
        await second.open([1])
        with pytest.raises(FencedError):
            await commit(first, 1, next_offset=5)
        await commit(first, 2, next_offset=2)
        assert [await committed(bus, number) for number in (1, 2)] == [None, 2]

        await first.open([1])
        await commit(first, 1, next_offset=9)
        with pytest.raises(FencedError):
            await commit(second, 1, next_offset=5)
        assert await committed(bus, 1) == 9


async def test_a_partition_that_another_producer_is_opening_can_be_opened_later() -> None:
    bus = WatchedBus(taken=[f"{GROUP}-1"])
    async with writers_of(bus) as writers:
        with pytest.raises(BusUnavailableError, check=has_words(f"{GROUP}-1")):
            await writers.open([0, 1, 2])
        assert [number in writers for number in (0, 1, 2)] == [True, False, True]


async def test_an_open_writer_is_closed_before_it_is_opened_again() -> None:
    bus = WatchedBus()
    async with writers_of(bus) as writers:
        await writers.open([1])
        await writers.open([1])
        await commit(writers, 1)
        opened, closed = f"opened {GROUP}-1", f"closed {GROUP}-1"
        assert bus.story[:3] == [opened, closed, opened]


async def test_partitions_are_committed_concurrently() -> None:
    bus = WatchedBus()
    async with writers_of(bus) as writers:
        await writers.open([1, 2])
        bus.may_commit.clear()
        commits = asyncio.gather(commit(writers, 1), commit(writers, 2))
        await turn()
        assert bus.story[-2:] == [f"began {GROUP}-1", f"began {GROUP}-2"]
        bus.may_commit.set()
        await commits


async def test_only_revoked_partitions_are_closed_at_once_and_the_others_at_the_end() -> None:
    bus = WatchedBus()
    async with writers_of(bus) as writers:
        await writers.open([1, 2])
        await writers.close([1, 5])
        assert [number in writers for number in (1, 2)] == [False, True]
        assert bus.story[2:] == [f"closed {GROUP}-1"]
    assert bus.story[2:] == [f"closed {GROUP}-1", f"closed {GROUP}-2"]


async def test_a_commit_in_progress_ends_before_its_writer_is_closed() -> None:
    bus = WatchedBus()
    async with writers_of(bus) as writers:
        await writers.open([1])
        bus.may_commit.clear()
        committing = asyncio.create_task(commit(writers, 1))
        await turn()
        closing = asyncio.create_task(writers.close([1]))
        await turn()
        assert not closing.done()
        assert 1 not in writers
        bus.may_commit.set()
        await asyncio.gather(committing, closing)
    assert bus.story[-2:] == [f"committed {GROUP}-1", f"closed {GROUP}-1"]


@pytest.mark.parametrize("finish_seconds", [0.0, 0.01])
async def test_a_commit_that_does_not_end_in_time_does_not_keep_its_writer_open(
    finish_seconds: float,
) -> None:
    bus = WatchedBus()
    async with writers_of(bus, finish_seconds=finish_seconds) as writers:
        await writers.open([1])
        bus.may_commit.clear()
        committing = asyncio.create_task(commit(writers, 1))
        await turn()
        async with asyncio.timeout(HANG_SECONDS):
            await writers.close([1])
        assert bus.story[-1] == f"closed {GROUP}-1"
        assert not committing.done()
        bus.may_commit.set()
        await committing


async def test_commits_of_a_partition_are_sequential_and_end_before_it_is_closed() -> None:
    bus = WatchedBus()
    async with writers_of(bus) as writers:
        await writers.open([1])
        bus.may_commit.clear()
        commits = asyncio.gather(*(commit(writers, 1, next_offset=at) for at in (1, 2)))
        await turn()
        assert bus.story.count(f"began {GROUP}-1") == 1
        closing = asyncio.create_task(writers.close([1]))
        await turn()
        bus.may_commit.set()
        await asyncio.gather(commits, closing)
    assert await committed(bus, 1) == 2
    reported = [f"{what} {GROUP}-1" for what in ("began", "committed")]
    assert bus.story[1:] == [*reported, *reported, f"closed {GROUP}-1"]


async def test_a_partition_revoked_while_it_opens_takes_no_id_from_its_next_owner() -> None:
    both = MemoryBus()
    bus, slow = WatchedBus(of=both), WatchedBus(of=both)
    slow.may_open.clear()
    async with writers_of(slow) as before, writers_of(bus) as after:
        opening = asyncio.create_task(before.open([1, 2]))
        await turn()
        await before.close([1])
        await after.open([1])
        slow.may_open.set()
        await opening
        assert [number in before for number in (1, 2)] == [False, True]
        await commit(after, 1)
    assert f"opened {GROUP}-1" not in slow.story


async def test_a_partition_that_is_opened_twice_at_once_has_one_writer() -> None:
    bus = WatchedBus()
    bus.may_open.clear()
    async with writers_of(bus) as writers:
        both = asyncio.gather(writers.open([1]), writers.open([1]))
        await turn()
        bus.may_open.set()
        await both
        await commit(writers, 1)
    assert [line for line in bus.story if "opened" in line] == [f"opened {GROUP}-1"]


async def test_an_exit_while_partitions_are_being_opened_leaves_none_open() -> None:
    bus = WatchedBus()
    bus.may_open.clear()
    async with writers_of(bus) as writers:
        opening = asyncio.create_task(writers.open([1, 2]))
        await turn()
    bus.may_open.set()
    await opening
    assert bus.story == []


FENCED, AWAY = FencedError("another has it"), BusUnavailableError("no broker answers")


@pytest.mark.parametrize(
    ("undone", "backoff_seconds", "expected"),
    [
        ([AWAY], 0.5, 0.5),
        ([AWAY], 20.0, 20.0),
        ([FENCED], 0.5, 3.0),
        ([AWAY, FENCED, AWAY], 0.5, 3.0),
        ([FENCED], 20.0, 20.0),
    ],
)
def test_a_fenced_writer_waits_until_the_group_can_have_announced_the_partitions_owner(
    undone: list[Exception], backoff_seconds: float, expected: float
) -> None:
    assert expected == pause_seconds_after(
        undone, backoff_seconds=backoff_seconds, fenced_seconds=3.0
    )
