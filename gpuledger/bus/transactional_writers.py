"""The transactions of the partitions that a worker holds: one writer for each partition number.

Whoever opens a number's id shuts out who had it, so that of two workers that take themselves for
the partition's owner one alone can write. What is written, and when, is the worker's business.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Self

from gpuledger.bus.protocol import Bus, Message, TopicPartition, Transactions
from gpuledger.errors import BusUnavailableError, FencedError
from gpuledger.runtime.tasks import end_tasks


@dataclass(kw_only=True)
class _Writer:
    transactions: Transactions
    stack: AsyncExitStack
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)


class TransactionalWriters:
    """The open writers of a group's member, by partition number; leaving the context closes them.

    A commit that is under way when its partition is given up may go on for `finish_seconds`.
    """

    def __init__(self, *, bus: Bus, group: str, finish_seconds: float) -> None:
        self._bus, self._group = bus, group
        self._finish_seconds = finish_seconds
        self._open: dict[int, _Writer] = {}
        self._opening: dict[int, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        """Open nothing yet."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close whatever is open or being opened."""
        await self.close([*self._open, *self._opening])

    def __contains__(self, number: int) -> bool:
        """Return whether the partition has a writer."""
        return number in self._open

    async def open(self, numbers: Iterable[int]) -> None:
        """Take the partitions over; from then on their committed offsets move by us alone.

        One that is closed meanwhile has no writer after that. Raises BusUnavailableError where one
        of them could not be opened; the others are open.
        """
        wanted = list(numbers)
        # An id that is still ours would be fenced by ourselves.
        await self.close(wanted)
        opening = {number: asyncio.create_task(self._enter(number)) for number in wanted}
        self._opening |= opening
        try:
            outcomes = await asyncio.gather(*opening.values(), return_exceptions=True)
        finally:
            await end_tasks(*opening.values())
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    async def commit(
        self,
        number: int,
        messages: Mapping[TopicPartition, Sequence[Message]],
        *,
        offsets: Mapping[TopicPartition, int],
    ) -> Mapping[TopicPartition, int]:
        """Publish messages and commit the group's offsets, all of it or nothing.

        Returns of each partition the offset behind the last message, where the bus told it.

        Raises FencedError and BusUnavailableError, after which the partition must be opened anew.
        """
        writer = self._open[number]
        async with writer.busy:
            commit = writer.transactions.commit
            return await commit(messages, offsets=offsets, group=self._group) or {}

    async def close(self, numbers: Iterable[int]) -> None:
        """Let commits under way end, for `finish_seconds`, and close; what is open is aborted.

        What is being opened is ended first: the id is the next owner's to take.
        """
        numbers = list(numbers)
        await end_tasks(*(self._opening.pop(number, None) for number in numbers))
        closing = [self._open.pop(number) for number in numbers if number in self._open]
        # All of them, also where one fails: an open transaction would withhold what is behind it.
        for outcome in await asyncio.gather(*map(self._end, closing), return_exceptions=True):
            if outcome is not None:
                raise outcome

    async def _enter(self, number: int) -> None:
        name = f"{self._group}-{number}"
        async with AsyncExitStack() as stack:
            try:
                transactions = await stack.enter_async_context(self._bus.transactions(name))
            except FencedError as error:
                raise BusUnavailableError(
                    f"{name}: two writers open it at once: {error}"
                ) from error
            self._open[number] = _Writer(transactions=transactions, stack=stack.pop_all())

    async def _end(self, writer: _Writer) -> None:
        # A commit that outlasts it is aborted, and its offsets are read again.
        with suppress(TimeoutError):
            async with asyncio.timeout(self._finish_seconds):
                await writer.busy.acquire()
        await writer.stack.aclose()


def pause_seconds_after(
    undone: Iterable[Exception], *, backoff_seconds: float, fenced_seconds: float
) -> float:
    """Return how long to wait before partitions whose commits were undone are opened anew.

    Where a writer was shut out it is `fenced_seconds` at least: taken back before the group has
    said who has a partition now, its rightful owner would be shut out.
    """
    if any(isinstance(error, FencedError) for error in undone):
        return max(backoff_seconds, fenced_seconds)
    return backoff_seconds
