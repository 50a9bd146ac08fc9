"""Transactional writers for a worker's partitions: one for each partition number.

Each partition number has a transactional id. Opening a writer fences the previous writer with the
same id, so that only one of two workers can write if both believe that they own a partition. The
worker decides what to write and when.
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
    """A group member's open writers, by partition number; leaving the context closes them.

    If a partition is given up during a commit, the commit has `finish_seconds` to finish.
    """

    def __init__(self, *, bus: Bus, group: str, finish_seconds: float) -> None:
        self._bus, self._group = bus, group
        self._finish_seconds = finish_seconds
        self._open: dict[int, _Writer] = {}
        self._opening: dict[int, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        """Enter without opening any writer."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all writers that are open or being opened."""
        await self.close([*self._open, *self._opening])

    def __contains__(self, number: int) -> bool:
        """Return whether the partition with this number has an open writer."""
        return number in self._open

    async def open(self, numbers: Iterable[int]) -> None:
        """Open a writer for each partition; only that writer can then commit its offsets.

        If `close` is called for a partition in the meantime, the partition has no writer
        afterwards. Raises `BusUnavailableError` if a writer could not be opened; the other
        writers stay open.
        """
        wanted = list(numbers)
        # Opening an id that is still open here would fence this worker's own writer.
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
        """Publish messages and commit the group's offsets, all or nothing.

        Returns the offset after each partition's last message, if the bus reported it.

        Raises `FencedError` and `BusUnavailableError`; then open the partition's writer again.
        """
        writer = self._open[number]
        async with writer.busy:
            commit = writer.transactions.commit
            return await commit(messages, offsets=offsets, group=self._group) or {}

    async def close(self, numbers: Iterable[int]) -> None:
        """Close the partitions' writers; abort commits that take longer than `finish_seconds`.

        First cancels openings in progress, which would otherwise fence the next owner's writer.
        """
        numbers = list(numbers)
        await end_tasks(*(self._opening.pop(number, None) for number in numbers))
        closing = [self._open.pop(number) for number in numbers if number in self._open]
        # Close all even if one fails: an open transaction would withhold all later records.
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
                    f"transactional id {name!r}: opened by two writers at once: {error}"
                ) from error
            self._open[number] = _Writer(transactions=transactions, stack=stack.pop_all())

    async def _end(self, writer: _Writer) -> None:
        # A commit that takes longer is aborted, and its records are read again.
        with suppress(TimeoutError):
            async with asyncio.timeout(self._finish_seconds):
                await writer.busy.acquire()
        await writer.stack.aclose()


def pause_seconds_after(
    undone: Iterable[Exception], *, backoff_seconds: float, fenced_seconds: float
) -> float:
    """Return how long to wait before reopening partitions whose commits failed.

    `undone` contains the errors of these commits. Returns at least `fenced_seconds` if a writer was
    fenced: reopening a partition before the group has assigned it would fence the partition's
    rightful owner.
    """
    if any(isinstance(error, FencedError) for error in undone):
        return max(backoff_seconds, fenced_seconds)
    return backoff_seconds
