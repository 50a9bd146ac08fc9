"""A replay of dead letters: from settings, over what is opened and delivered, to the exit code.

Letters are delivered in batches (`LetterReplay`). A batch's marks are written once the receiver has
taken it, before the next batch is delivered. A process that is killed in between leaves one batch
delivered and not marked, which the next replay delivers again: at least once.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypedDict, TypeVar

from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Producer, WholeBus
from gpuledger.clock import Clock
from gpuledger.errors import UnavailableError
from gpuledger.runtime import Check, Readiness, RetryingCaller
from gpuledger.settings import Option, load_settings
from gpuledger.texts import readable, shorten
from gpuledger_cli.dead_letters.letter_log import (
    KeptLetter,
    LetterFilter,
    LetterLog,
    Position,
    ReplayedLetters,
    mark_of,
)
from gpuledger_cli.dead_letters.letter_printing import open_log
from gpuledger_cli.dead_letters.letter_target import (
    LetterTarget,
    Usable,
    open_join_target,
    open_sink_target,
    replayed_kind,
)
from gpuledger_cli.long_work import printing_progress
from gpuledger_enricher.join.join_settings import JoinSettings
from gpuledger_sinks.settings import SinkSettings

T = TypeVar("T")
_MAX_BATCH_BYTES: Final = 1 << 20
"""Bytes of records beyond which no more is delivered at once: of an event a hundred times as much
may be made."""
_REASON_CHARACTERS: Final = 200
_MAX_REASONS: Final = 1000
_OTHERS: Final = "other reasons"
ALL_DELIVERED: Final = 0
REFUSED: Final = 1
LEFT_OUT: Final = 3
_PROGRAM: Final = "gpuledger dead-letters replay"
_KIND: Final = Option(name="kind", setting="kind", help="Which sink.")
_SERVERS: Final = Option(
    name="--bootstrap-servers", setting="kafka.bootstrap_servers", help="Brokers to ask first."
)


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
        """Deliver to `target`, which may be away for `give_up_seconds`.

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
        deadline_seconds = asyncio.get_running_loop().time() + self._give_up_seconds
        return await self._retrying(call, deadline_seconds=deadline_seconds)


class Where(TypedDict):
    """Where the settings come from, and the clock."""

    config: Path | None
    bootstrap_servers: str | None
    clock: Clock


class Opening(NamedTuple):
    """A bus, and what opens a target over it."""

    bus: WholeBus
    target: AbstractAsyncContextManager[LetterTarget]


def sink_opening(
    name: str, *, config: Path | None, bootstrap_servers: str | None, clock: Clock
) -> Opening:
    """Return what hands letters of a sink to its receiver, by the sink's settings."""
    kind = replayed_kind(name)
    settings = load_settings(
        SinkSettings,
        prog=_PROGRAM,
        description="",
        options=[_KIND, _SERVERS],
        argv=[kind.name, *_argv(config, bootstrap_servers)],
    )
    bus = KafkaBus(settings.kafka)
    target = open_sink_target(
        kind,
        bus=bus,
        settings=getattr(settings, kind.name),
        group=bus.topics.group(settings.group or kind.group),
        readiness=Readiness(),
        clock=clock,
    )
    return Opening(bus, target)


def join_opening(*, config: Path | None, bootstrap_servers: str | None, clock: Clock) -> Opening:
    """Return what writes letters of the join back, by the join's settings."""
    settings = load_settings(
        JoinSettings,
        prog=_PROGRAM,
        description="",
        options=[_SERVERS],
        argv=_argv(config, bootstrap_servers),
    )
    bus = KafkaBus(settings.kafka)
    group = bus.topics.group(settings.join.group)
    return Opening(bus, open_join_target(bus=bus, history=bus, group=group, clock=clock))


class RefusedPrinter:
    """Prints the first letters that are refused again, with the receiver's words."""

    def __init__(self, shown: int) -> None:
        """Print at most `shown` letters."""
        self._shown, self._count = shown, 0

    def add(self, refused: RefusedAgain) -> None:
        """Print the letter, unless enough are printed."""
        self._count += 1
        if self._count <= self._shown:
            sys.stdout.write(f"{refused.position} refused again: {readable(refused.words)}\n")

    def close(self) -> None:
        """Print how many were not printed."""
        if self._count > self._shown:
            sys.stdout.write(f"and {self._count - self._shown} more refused again\n")


async def replay_letters(
    bus: WholeBus,
    opening: AbstractAsyncContextManager[LetterTarget],
    *,
    wanted: LetterFilter,
    again: bool,
    is_rehearsal: bool,
    give_up_seconds: float,
    clock: Clock,
    refused: RefusedPrinter,
) -> LetterOutcome:
    """Put letters back, or count what would be, and print what became of them; also at an error."""
    async with opening as target, bus.producer() as marks:
        # Where letters are named one by one, one of another consumer is told, not passed over.
        consumers = wanted.consumers or (target.consumer,)
        if not wanted.positions:
            wanted = replace(wanted, consumers=consumers)
        replaying = LetterReplay(
            target=target,
            marks=marks,
            clock=clock,
            dead_letters=bus.topics.dead_letters.name,
            consumers=consumers,
            give_up_seconds=give_up_seconds,
            report_refused=refused.add,
        )
        try:
            async with open_log(bus, wanted) as (log, replayed):
                work = replaying.rehearse if is_rehearsal else replaying.run
                found = ReplayedLetters({}) if again else replayed
                with printing_progress(log.offsets, what="dead letters", done="read") as advance:
                    await work(log, found, advance=advance)
                for position in sorted(log.missing):
                    replaying.outcome.skip(f"nothing that was asked for lies at {position}")
                # Zeros alone would look as if all were well.
                if replaying.outcome == LetterOutcome():
                    sys.stdout.write(f"{log.passed_over.why_none()}\n")
        finally:
            refused.close()
            print_outcome(replaying.outcome, receiver=target.receiver, is_rehearsal=is_rehearsal)
        return replaying.outcome


def print_outcome(outcome: LetterOutcome, *, receiver: str, is_rehearsal: bool) -> None:
    """Print what became of the letters; the last line counts."""
    for why, count in outcome.skipped.most_common():
        sys.stdout.write(f"{count} left out: {why}\n")
    done = "would be replayed" if is_rehearsal else "replayed"
    sys.stdout.write(
        f"{outcome.delivered} {done} to {receiver}, {outcome.refused} refused again,"
        f" {outcome.skipped.total()} left out, {outcome.before} replayed before\n"
    )
    if is_rehearsal and outcome.delivered:
        sys.stdout.write("nothing was sent: --yes sends\n")


def exit_code(outcome: LetterOutcome) -> int:
    """Return 0 where all that was chosen is delivered, or would be."""
    if outcome.refused:
        return REFUSED
    return LEFT_OUT if outcome.skipped else ALL_DELIVERED


def _argv(config: Path | None, bootstrap_servers: str | None) -> list[str]:
    argv = [f"--config={config}"] if config else []
    return [*argv, *([f"--bootstrap-servers={bootstrap_servers}"] if bootstrap_servers else [])]
