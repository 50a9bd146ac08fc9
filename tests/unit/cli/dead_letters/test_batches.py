"""Letters are delivered in batches that are bounded, each marked before the next one."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from typing_extensions import override

from gpuledger.errors import UserError
from gpuledger_cli.dead_letters.letter_log import KeptLetter, Position, ReplayedLetters
from gpuledger_cli.dead_letters.letter_target import LetterTarget, Usable
from tests.default_topics import DEAD_LETTERS
from tests.unit.cli.dead_letters.builders import counted, record_of, reject, replay
from tests.unit.sinks.builders import ManualClock, bus, event

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from gpuledger.bus.memory import MemoryBus
    from gpuledger_sinks.redelivery import Refusals

CONSUMER = "anybody"


class Recording(LetterTarget):
    """Takes every letter, and knows how many were marked before each batch."""

    def __init__(self, on: MemoryBus, *, letters: int, fails_at: int | None = None) -> None:
        self.consumer, self.receiver, self.max_batch = CONSUMER, "nowhere", 10
        self.sizes: list[int] = []
        self.marked: list[int] = []
        self._on, self._letters, self._fails_at = on, letters, fails_at

    @override
    def take(self, letter: KeptLetter) -> Usable | str:
        return Usable(record_of(letter.value), None)

    @override
    async def deliver(self, batch: Sequence[Usable]) -> Refusals:
        if len(self.sizes) == self._fails_at:
            raise UserError("no right")
        self.sizes.append(len(batch))
        self.marked.append(len(self._on.kept(DEAD_LETTERS.name)) - self._letters)
        return [None] * len(batch)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[LetterTarget]:
        yield self


async def test_each_batch_is_marked_before_the_next_one_is_delivered() -> None:
    on = bus()
    await reject(on, *(record_of(event(tick)) for tick in range(25)), consumer=CONSUMER)
    target = Recording(on, letters=25)
    await replay(on, target.opened(), clock=ManualClock())

    assert target.sizes == [10, 10, 5]
    assert target.marked == [0, 10, 20]


async def test_large_letters_are_delivered_a_few_at_a_time() -> None:
    on = bus()
    large = record_of(b"x" * 400_000)
    await reject(on, *[large] * 7, consumer=CONSUMER)
    target = Recording(on, letters=7)
    await replay(on, target.opened(), clock=ManualClock())

    assert target.sizes == [3, 3, 1]


async def test_what_was_delivered_before_an_error_is_marked_and_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    on = bus()
    await reject(on, *(record_of(event(tick)) for tick in range(25)), consumer=CONSUMER)
    target = Recording(on, letters=25, fails_at=1)
    with pytest.raises(UserError, match="no right"):
        await replay(on, target.opened(), clock=ManualClock())

    assert "10 replayed to nowhere" in capsys.readouterr().out
    rest = Recording(on, letters=25)
    assert counted(await replay(on, rest.opened(), clock=ManualClock())) == (15, 0, 0, 10)


def test_marks_are_known_by_partition_and_offset_in_whatever_order_they_came() -> None:
    replayed = ReplayedLetters({0: [7, 3, 5], 2: [4]})
    known = [(partition, offset) for partition in range(4) for offset in range(9)]
    assert [at for at in known if Position(*at) in replayed] == [(0, 3), (0, 5), (0, 7), (2, 4)]
