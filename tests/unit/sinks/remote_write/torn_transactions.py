"""Buses whose transactions fail before or after their commit, or for a time."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from typing_extensions import override

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Message, TopicPartition, Transactions
from gpuledger.clock import NS_PER_DAY, NS_PER_MS
from gpuledger.errors import TimestampRefusedError
from tests.unit.sinks.builders import START_NS


class TornTransactions:
    """Transactions that fail as the bus requires, before or after their commit."""

    def __init__(self, inner: Transactions, bus: "TornBus") -> None:
        self._inner, self._bus = inner, bus

    async def commit(
        self,
        messages: Mapping[TopicPartition, Sequence[Message]],
        *,
        offsets: Mapping[TopicPartition, int],
        group: str,
    ) -> Mapping[TopicPartition, int] | None:
        if (error := self._bus.next_error(messages)) is None:
            return await self._inner.commit(messages, offsets=offsets, group=group)
        if self._bus.is_done_all_the_same:
            await self._inner.commit(messages, offsets=offsets, group=group)
        raise error


class TornBus(MemoryBus):
    """A bus on which the first commits raise these errors."""

    errors: list[Exception]
    is_done_all_the_same = False

    def next_error(self, sent: Mapping[TopicPartition, Sequence[Message]]) -> Exception | None:
        """Return the error that prevents this commit; `None` if there is none."""
        return self.errors.pop(0) if self.errors else None

    @override
    @asynccontextmanager
    async def transactions(self, transactional_id: str) -> AsyncIterator[Transactions]:
        async with super().transactions(transactional_id) as inner:
            yield TornTransactions(inner, self)


class TimedBus(TornBus):
    """A bus whose clock is at `START_NS`: it rejects stamps more than a day ahead."""

    @override
    def next_error(self, sent: Mapping[TopicPartition, Sequence[Message]]) -> Exception | None:
        latest_ms = (START_NS + NS_PER_DAY) // NS_PER_MS
        if any(one.timestamp_ms > latest_ms for of in sent.values() for one in of):
            return TimestampRefusedError("too far ahead")
        return None
