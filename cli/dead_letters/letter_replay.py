"""A replay from settings to its closing line: what is opened, and what is printed of it."""

import sys
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple, TypedDict

from cli.dead_letters.join_target import open_join_target
from cli.dead_letters.letter_filter import LetterFilter
from cli.dead_letters.letter_log import ReplayedLetters
from cli.dead_letters.letter_printing import open_log
from cli.dead_letters.letter_target import LetterTarget
from cli.dead_letters.replaying import LetterOutcome, LetterReplay, RefusedAgain
from cli.dead_letters.sink_target import open_sink_target, replayed_kind
from cli.long_work import printing_progress
from enricher.join.join_settings import JoinSettings
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import WholeBus
from gpuledger.clock import Clock
from gpuledger.runtime import Readiness
from gpuledger.settings import Option, load_settings
from gpuledger.texts import readable
from sinks.settings import SinkSettings

ALL_DELIVERED: Final = 0
REFUSED: Final = 1
LEFT_OUT: Final = 3
_PROGRAM: Final = "gpuledger dead-letters replay"
_KIND: Final = Option(name="kind", setting="kind", help="Which sink.")
_SERVERS: Final = Option(
    name="--bootstrap-servers", setting="kafka.bootstrap_servers", help="Brokers to ask first."
)


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
        """Take how many to print."""
        self._shown, self._count = shown, 0

    def add(self, refused: RefusedAgain) -> None:
        """Take one."""
        self._count += 1
        if self._count <= self._shown:
            sys.stdout.write(f"{refused.position} refused again: {readable(refused.words)}\n")

    def close(self) -> None:
        """Say how many were not printed."""
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
