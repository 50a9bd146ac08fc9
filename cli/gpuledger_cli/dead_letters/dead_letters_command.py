"""`gpuledger dead-letters`: options in; tables, letters and replays out."""

import sys
import time
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Final

from cyclopts import App, Parameter
from cyclopts.validators import Number

from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Bus
from gpuledger.clock import NS_PER_MS, SystemClock
from gpuledger.errors import UserError
from gpuledger.runtime import configure_logs
from gpuledger.settings import LogSettings
from gpuledger.time_ranges import parse_moment
from gpuledger_cli.dead_letters.letter_log import (
    KeptLetter,
    LetterFilter,
    LetterLog,
    parse_position,
)
from gpuledger_cli.dead_letters.letter_printing import Format, LetterPrinter, open_log, print_counts
from gpuledger_cli.dead_letters.letter_replay import replay_letters
from gpuledger_cli.dead_letters.letter_views import LetterCounts, full_text, parse_count_by, row_of
from gpuledger_cli.kafka_options import NO_OPTIONS, KafkaOptions
from gpuledger_cli.long_work import printing_progress, run_cancellable

_REPLAY_HELP: Final = """
A dead-letter record is replayed only to the consumer that rejected it:

- Records that the join rejected are written back to their own topic.
- Events that a sink rejected (remote_write, store, rows) are written to the topic
  `gpuledger.replay.v1`, from which that sink takes them. Alerts are not replayed.

Without `--yes` nothing is written: the records are counted. A record that is rejected again gets
another dead letter: `gpuledger dead-letters list --since -10m` shows it. You may replay a record
again: its consumer recognises what it already has.

Exit codes: 0 all are written; 3 some cannot be replayed; 2 invalid input, or Kafka is unavailable;
130 interrupted.

- Count first: gpuledger dead-letters replay --reason out_of_order
- Then send: gpuledger dead-letters replay --reason out_of_order --yes
- One record: gpuledger dead-letters replay 0:17 --yes
- After an upgrade of the join: gpuledger dead-letters replay --reason undecodable --yes
"""
_HELP: Final = """
Reads the topic of dead letters outside any consumer group: nobody notices.

- The newest hundred: gpuledger dead-letters list
- Who refuses what: gpuledger dead-letters list --count-by consumer,reason
- Of one node since an hour: gpuledger dead-letters list --since -1h --node gpu-node-07
- For jq: gpuledger dead-letters list --format json --limit 0 | jq -r .detail | sort | uniq -c
- All of one: gpuledger dead-letters show 0:17
- Send again what a receiver refused: gpuledger dead-letters replay --help
"""
app = App(
    name="dead-letters",
    help="List what could not be used, show it, and put it back.",
    help_epilogue=_HELP,
    help_format="markdown",
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Which letters; conditions of several options hold together."""

    since: Annotated[
        str | None,
        Parameter(
            help="Put aside at this time or later: 2026-11-21T14:00:00Z, or -1h.",
            allow_leading_hyphen=True,
        ),
    ] = None
    until: Annotated[
        str | None, Parameter(help="Put aside before this time.", allow_leading_hyphen=True)
    ] = None
    consumer: Annotated[
        tuple[str, ...],
        Parameter(
            help="Put aside by this consumer group; may be given several times.",
            negative=(),
            show_default=False,
        ),
    ] = ()
    reason: Annotated[
        tuple[str, ...],
        Parameter(
            help="For this reason; may be given several times.", negative=(), show_default=False
        ),
    ] = ()
    topic: Annotated[
        tuple[str, ...],
        Parameter(
            help="Of a record of this topic; may be given several times.",
            negative=(),
            show_default=False,
        ),
    ] = ()
    key: Annotated[str | None, Parameter(help="Of a record under this key.")] = None
    node: Annotated[
        str | None,
        Parameter(help="Of a record of this node: its name, or CLUSTER/NODE."),
    ] = None

    def filter(self, positions: Iterable[str] = ()) -> LetterFilter:
        """Return what the options mean; raises UserError naming the one that is wrong."""
        now_ms = time.time_ns() // NS_PER_MS
        moments = {
            option: None if text is None else parse_moment(text, option=option, now_ms=now_ms)
            for option, text in (("--since", self.since), ("--until", self.until))
        }
        return LetterFilter(
            positions=frozenset(map(parse_position, positions)),
            since_ms=moments["--since"],
            until_ms=moments["--until"],
            consumers=self.consumer,
            reasons=self.reason,
            topics=self.topic,
            key=self.key,
            node=self.node,
        )


_EVERYTHING: Final = Chosen()
Flag = Annotated[bool, Parameter(negative=())]


@app.command(name="list")
def list_letters(
    chosen: Chosen = _EVERYTHING,
    *,
    limit: Annotated[int, Parameter(validator=Number(gte=0))] = 100,
    count_by: str | None = None,
    format: Format = "table",  # noqa: A002  # the option's name
    kafka: KafkaOptions = NO_OPTIONS,
) -> int:
    """List dead letters, the newest last.

    Parameters
    ----------
    limit
        How many to show at most, the newest; 0 is all, for json and csv.
    count_by
        Count instead, by fields separated by commas: consumer, reason, topic, partition, node.
    format
        A table for people, a JSON object a line, or CSV.

    """
    if limit == 0 and format == "table" and count_by is None:
        raise UserError("--limit: 0 is for --format json and csv; a table has an end")
    fields = None if count_by is None else parse_count_by(count_by)
    into = LetterPrinter(format=format, limit=limit) if fields is None else LetterCounts(fields)
    wanted = chosen.filter()
    bus = _open_quietly(kafka)
    why_none = run_cancellable(scan(bus, wanted, into=into))
    if isinstance(into, LetterCounts):
        print_counts(into, format=format)
    else:
        into.close()
    if why_none:
        sys.stderr.write(f"gpuledger: {why_none}\n")
    return 0


async def scan(history: Bus, wanted: LetterFilter, *, into: LetterCounts | LetterPrinter) -> str:
    """Read the letters that are meant, as far as they were there at the begin.

    Return why there are none; empty where there are some.
    """
    found = 0
    async with open_log(history, wanted) as log:
        with printing_progress(log.offsets, what="dead letters", done="read") as advance:
            async with aclosing(log.letters(advance)) as letters:
                async for letter in letters:
                    found += 1
                    if isinstance(into, LetterCounts):
                        into.add(letter)
                    else:
                        into.add(row_of(letter))
        return "" if found else log.why_none()


@app.command
def show(
    *positions: str,
    value: Flag = False,
    kafka: KafkaOptions = NO_OPTIONS,
) -> int:
    """Show all that dead letters say, and the records that they stand for.

    Parameters
    ----------
    positions
        Where they lie, PARTITION:OFFSET, as `list` shows it.
    value
        Write the record's bytes alone, as they are.

    """
    if not positions:
        raise UserError("which letter? give PARTITION:OFFSET, such as 0:17")
    bus = _open_quietly(kafka)
    wanted = LetterFilter(positions=frozenset(map(parse_position, positions)))
    for letter in run_cancellable(find(bus, wanted)):
        if value:
            sys.stdout.buffer.write(letter.value or b"")
        else:
            sys.stdout.write(full_text(letter, bus.topics))
    return 0


async def find(history: Bus, wanted: LetterFilter) -> list[KeptLetter]:
    """Return letters by their positions; raises UserError for one that is missing."""
    async with open_log(history, wanted) as log:
        found = [letter async for letter in log.letters(lambda _count: None)]
    refuse_missing(log)
    return found


def refuse_missing(log: LetterLog) -> None:
    """Raise UserError where a position was asked for at which no letter lies."""
    if log.missing:
        raise UserError(
            f"there is no dead letter at {', '.join(map(str, sorted(log.missing)))}: retention may"
            " have removed it; `gpuledger dead-letters list` shows those that are there"
        )


@app.command(help_epilogue=_REPLAY_HELP)
def replay(
    *positions: str,
    chosen: Chosen = _EVERYTHING,
    all_: Annotated[bool, Parameter(name="--all", negative=())] = False,
    yes: Flag = False,
    kafka: KafkaOptions = NO_OPTIONS,
) -> int:
    """Send dead-letter records to the consumers that rejected them once more.

    Parameters
    ----------
    positions
        Which records, PARTITION:OFFSET, as `list` shows them; or by the options of `list`.
    all_
        All records, if no option chooses any.
    yes
        Send them; without it, they are only counted.

    """
    wanted = chosen.filter(positions)
    if wanted.is_empty and not all_:
        raise UserError("which letters? give positions, options of `list`, or --all")
    bus = _open_quietly(kafka)
    return run_cancellable(replay_letters(bus, wanted, is_rehearsal=not yes, clock=SystemClock()))


def _open_quietly(kafka: KafkaOptions) -> KafkaBus:
    configure_logs(LogSettings(level="error", format="text"))
    return KafkaBus(kafka.settings())
