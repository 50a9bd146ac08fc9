"""The transactions of the partitions that a sink holds: one writer for each.

Whoever opens a partition's id shuts out who had it, so that of two sinks that take themselves for
the partition's owner one alone can write. What is written is the republishing sink's business.
"""

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Final

from gpuledger.bus.protocol import Message, TopicPartition, TransactionalBus, Transactions
from gpuledger.errors import BusUnavailableError, FencedError

_FINISH_SECONDS: Final = 2.5
"""How long a commit that is under way may go on when its partition is given up."""


@dataclass(kw_only=True)
class _Writer:
    transactions: Transactions
    stack: AsyncExitStack
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)


class Writers:
    """The open writers, by partition of the input."""

    def __init__(self, *, bus: TransactionalBus, group: str) -> None:
        self._bus, self._group = bus, group
        self._open: dict[TopicPartition, _Writer] = {}

    def __contains__(self, partition: TopicPartition) -> bool:
        """Say whether the partition has a writer."""
        return partition in self._open

    async def open(self, partitions: Iterable[TopicPartition]) -> None:
        """Take the partitions over; from then on their committed offsets move by us alone.

        Raises BusUnavailableError where one of them could not be opened.
        """
        wanted = list(partitions)
        await self.close(wanted)
        await _all_of(map(self._enter, wanted))

    async def commit(
        self,
        partition: TopicPartition,
        messages: Mapping[TopicPartition, Sequence[Message]],
        *,
        next_offset: int,
    ) -> None:
        """Publish and commit up to `next_offset`, all of it or nothing.

        Raises FencedError and BusUnavailableError, after which the partition must be opened anew.
        """
        writer = self._open[partition]
        async with writer.busy:
            await writer.transactions.commit(
                messages, offsets={partition: next_offset}, group=self._group
            )

    async def close(self, partitions: Iterable[TopicPartition]) -> None:
        """Let commits under way end, for a moment, and close."""
        closing = [self._open.pop(each) for each in partitions if each in self._open]
        await _all_of(map(_close, closing))

    async def close_all(self) -> None:
        """Close whatever is open."""
        await self.close(list(self._open))

    async def _enter(self, partition: TopicPartition) -> None:
        name = f"{self._group}-{partition.partition}"
        async with AsyncExitStack() as stack:
            try:
                transactions = await stack.enter_async_context(self._bus.transactions(name))
            except FencedError as error:
                raise BusUnavailableError(f"{name}: opened twice at once: {error}") from error
            self._open[partition] = _Writer(transactions=transactions, stack=stack.pop_all())


async def _close(writer: _Writer) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(_FINISH_SECONDS):
            await writer.busy.acquire()
    await writer.stack.aclose()


async def _all_of(works: Iterable[Awaitable[None]]) -> None:
    """Wait for all, also where one fails; then raise what the first one raised."""
    for outcome in await asyncio.gather(*works, return_exceptions=True):
        if outcome is not None:
            raise outcome
