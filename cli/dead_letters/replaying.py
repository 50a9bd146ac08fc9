"""Letters put back, one batch after another: what became of each, and the marks of those taken.

A mark is written behind the receiver's word and before the next batch. So whoever is killed in
between has one batch delivered and not marked, which the next replay delivers again: at least once.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple, TypeVar

from cli.dead_letters.letter_filter import KeptLetter, Position
from cli.dead_letters.letter_log import LetterLog, ReplayedLetters, mark_of
from cli.dead_letters.letter_target import LetterTarget, Usable
from gpuledger.bus.protocol import Producer
from gpuledger.clock import Clock
from gpuledger.errors import UnavailableError
from gpuledger.runtime import Check, RetryingCaller
from gpuledger.texts import readable, shorten

T = TypeVar("T")
_MAX_BATCH_BYTES: Final = 1 << 20
"""Bytes of records beyond which no more is delivered at once: of an event a hundred times as much
may be made."""
_REASON_CHARACTERS: Final = 200
_MAX_REASONS: Final = 1000
_OTHERS: Final = "other reasons"


class RefusedAgain(NamedTuple):
    """A letter that was refused once more."""

    position: Position
    words: str
    """The receiver's."""


@dataclass(kw_only=True)
class LetterOutcome:
    """What became of the letters that were chosen."""

    delivered: int = 0
    """Taken by the receiver; in a rehearsal those that would be handed to it."""
    refused: int = 0
    before: int = 0
    """Left out, as they were replayed before."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Left out, as they cannot be put back, by why."""

    def skip(self, why: str) -> None:
        """Count a letter that cannot be put back."""
        why = shorten(readable(why), _REASON_CHARACTERS)
        # Reasons quote what records say: there may be as many as letters.
        is_kept = why in self.skipped or len(self.skipped) < _MAX_REASONS
        self.skipped[why if is_kept else _OTHERS] += 1


class LetterReplay:
    """Puts back the letters of a log."""

    def __init__(
        self,
        *,
        target: LetterTarget,
        marks: Producer,
        clock: Clock,
        dead_letters: str,
        consumers: Collection[str],
        give_up_seconds: float,
        report_refused: Callable[[RefusedAgain], None],
    ) -> None:
        """Take whom to deliver to, and for how long it may be away.

        Letters of the `consumers` are delivered; marks go to the topic `dead_letters`.
        """
        self._consumers = consumers
        self._target, self._marks, self._clock = target, marks, clock
        self._topic, self._give_up_seconds = dead_letters, give_up_seconds
        self._report_refused = report_refused
        self._retrying = RetryingCaller(on=UnavailableError, check=Check(), clock=clock)
        self.outcome = LetterOutcome()

    async def rehearse(
        self, log: LetterLog, replayed: ReplayedLetters, *, advance: Callable[[int], None]
    ) -> None:
        """Count what `run` would do; nothing is sent."""
        async with aclosing(log.letters(advance)) as letters:
            async for letter in letters:
                if self._take(letter, replayed) is not None:
                    self.outcome.delivered += 1

    async def run(
        self, log: LetterLog, replayed: ReplayedLetters, *, advance: Callable[[int], None]
    ) -> None:
        """Deliver; raises UnavailableError where the receiver is away for too long."""
        batch: list[tuple[KeptLetter, Usable]] = []
        size_bytes = 0
        async with aclosing(log.letters(advance)) as letters:
            async for letter in letters:
                if (found := self._take(letter, replayed)) is None:
                    continue
                batch.append((letter, found))
                size_bytes += len(letter.value or b"")
                if len(batch) >= self._target.max_batch or size_bytes >= _MAX_BATCH_BYTES:
                    await self._deliver(batch)
                    batch, size_bytes = [], 0
        if batch:
            await self._deliver(batch)

    def _take(self, letter: KeptLetter, replayed: ReplayedLetters) -> Usable | None:
        if letter.position in replayed:
            self.outcome.before += 1
            return None
        if (consumer := letter.content.consumer) not in self._consumers:
            self.outcome.skip(f"it is of the consumer {consumer}: name it with --consumer")
            return None
        found = self._target.take(letter)
        if isinstance(found, str):
            self.outcome.skip(found)
            return None
        return found

    async def _deliver(self, batch: Sequence[tuple[KeptLetter, Usable]]) -> None:
        refusals = await self._retry(partial(self._target.deliver, [found for _, found in batch]))
        taken: list[KeptLetter] = []
        for (letter, _), refusal in zip(batch, refusals, strict=True):
            if refusal is None:
                taken.append(letter)
            else:
                self.outcome.refused += 1
                self._report_refused(RefusedAgain(letter.position, refusal))
        self.outcome.delivered += len(taken)
        await self._mark(taken)

    async def _mark(self, taken: Sequence[KeptLetter]) -> None:
        by_partition: dict[int, list[KeptLetter]] = {}
        for letter in taken:
            by_partition.setdefault(letter.position.partition, []).append(letter)
        for partition, letters in by_partition.items():
            messages = [
                mark_of(
                    letter,
                    topic=self._topic,
                    consumer=self._target.consumer,
                    receiver=self._target.receiver,
                    time_ns=self._clock.time_ns(),
                )
                for letter in letters
            ]
            publish = partial(self._marks.publish, self._topic, partition, messages)
            await self._retry(publish)

    async def _retry(self, call: Callable[[], Awaitable[T]]) -> T:
        deadline = asyncio.get_running_loop().time() + self._give_up_seconds
        return await self._retrying(call, deadline=deadline)
