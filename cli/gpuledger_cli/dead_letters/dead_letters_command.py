"""`gpuledger dead-letters`: options in; tables, letters and replays out."""

import sys
import time
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from cyclopts import App, Parameter
from cyclopts.validators import Number

from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import History
from gpuledger.clock import NS_PER_MS, SystemClock
from gpuledger.errors import UserError
from gpuledger.runtime import configure_logs
from gpuledger.settings import LogSettings
from gpuledger_cli.dead_letters.letter_log import (
    KeptLetter,
    LetterFilter,
    LetterLog,
    parse_position,
)
from gpuledger_cli.dead_letters.letter_printing import Format, LetterPrinter, open_log, print_counts
from gpuledger_cli.dead_letters.letter_replay import (
    RefusedPrinter,
    Where,
    exit_code,
    join_opening,
    replay_letters,
    sink_opening,
)
from gpuledger_cli.dead_letters.letter_views import LetterCounts, full_text, parse_count_by, row_of
from gpuledger_cli.long_work import printing_progress, run_cancellable
from gpuledger_cli.replay.range_plan import parse_duration, parse_moment
from gpuledger_cli.topics import kafka_settings

_REPLAY_HELP: Final = """
A letter goes to the consumer that refused it, and to nobody else:

- `--sink KIND` hands letters of that sink to its receiver (remote_write, store, rows, otlp), with
  the settings of `--config`, which is the sink's own file. The sink may run meanwhile; its group,
  its offsets and other sinks are not touched. Alerts tell of the present and are not replayed.
- `--join` writes letters of the join back to the topic, partition and key that they had. A tick is
  written only where nothing behind it is booked of its node, as the join would pass over it.

Without `--yes` nothing is sent: what would be is counted. What is taken is marked on the topic of
dead letters, and left out the next time, unless `--again`. What is refused again is told with the
receiver's words; its letter stays.

Exit codes: 0 all that was chosen is delivered, now or before; 1 something was refused again; 3 some
letters cannot be put back; 2 a mistake, or Kafka or the receiver is away; 130 interrupted.

- What would be sent again: gpuledger dead-letters replay --reason out_of_order --sink remote_write
  --config sink.yaml
- Send it: the same with --yes
- One letter: gpuledger dead-letters replay 0:17 --sink store --config sink.yaml --yes
- After an upgrade of the join: gpuledger dead-letters replay --join --reason undecodable --yes
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
BootstrapServers = Annotated[
    str | None, Parameter(help="Brokers to ask first, host:port, separated by commas.")
]
Config = Annotated[
    Path | None,
    Parameter(help="Settings file (YAML) of any deployable; its kafka section is read."),
]


@app.command(name="list")
def list_letters(
    chosen: Chosen = _EVERYTHING,
    *,
    pending: Flag = False,
    limit: Annotated[int, Parameter(validator=Number(gte=0))] = 100,
    count_by: str | None = None,
    format: Format = "table",  # noqa: A002  # the option's name
    bootstrap_servers: BootstrapServers = None,
    config: Config = None,
) -> int:
    """List dead letters, the newest last.

    Parameters
    ----------
    pending
        Leave out those that were replayed.
    limit
        How many to show at most, the newest; 0 is all, for json and csv.
    count_by
        Count instead, by fields separated by commas: consumer, reason, topic, partition, node.
    format
        A table for people, a JSON object a line, or CSV.

    """
    if limit == 0 and format == "table" and count_by is None:
        raise UserError("--limit: 0 is for --format json and csv; a table has an end")
    _quiet()
    fields = None if count_by is None else parse_count_by(count_by)
    into = LetterPrinter(format=format, limit=limit) if fields is None else LetterCounts(fields)
    wanted = chosen.filter()
    bus = KafkaBus(kafka_settings(bootstrap_servers=bootstrap_servers, config=config))
    why_none = run_cancellable(scan(bus, wanted, pending=pending, into=into))
    if isinstance(into, LetterCounts):
        print_counts(into, format=format)
    else:
        into.close()
    if why_none:
        sys.stderr.write(f"gpuledger: {why_none}\n")
    return 0


async def scan(
    history: History, wanted: LetterFilter, *, pending: bool, into: LetterCounts | LetterPrinter
) -> str:
    """Read the letters that are meant, as far as they were there at the begin.

    Return why there are none; empty where there are some.
    """
    found = left_out = 0
    async with open_log(history, wanted) as (log, replayed):
        with printing_progress(log.offsets, what="dead letters", done="read") as advance:
            async with aclosing(log.letters(advance)) as letters:
                async for letter in letters:
                    is_replayed = letter.position in replayed
                    if pending and is_replayed:
                        left_out += 1
                        continue
                    found += 1
                    if isinstance(into, LetterCounts):
                        into.add(letter)
                    else:
                        into.add(row_of(letter, is_replayed=is_replayed))
        if found:
            return ""
        if left_out:
            return f"no dead letter is pending: {left_out} were replayed"
        return log.passed_over.why_none()


@app.command
def show(
    *positions: str,
    value: Flag = False,
    bootstrap_servers: BootstrapServers = None,
    config: Config = None,
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
    _quiet()
    bus = KafkaBus(kafka_settings(bootstrap_servers=bootstrap_servers, config=config))
    wanted = LetterFilter(positions=frozenset(map(parse_position, positions)))
    for letter, is_replayed in run_cancellable(find(bus, wanted)):
        if value:
            sys.stdout.buffer.write(letter.value or b"")
        else:
            sys.stdout.write(full_text(letter, bus.topics, is_replayed=is_replayed))
    return 0


async def find(history: History, wanted: LetterFilter) -> list[tuple[KeptLetter, bool]]:
    """Return letters by their positions, and whether each was replayed; UserError for a missing."""
    async with open_log(history, wanted) as (log, replayed):
        found: list[tuple[KeptLetter, bool]] = []
        async with aclosing(log.letters(lambda _count: None)) as letters:
            async for letter in letters:
                found.append((letter, letter.position in replayed))
                if not log.missing:
                    break
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
def replay(  # one parameter an option
    *positions: str,
    chosen: Chosen = _EVERYTHING,
    sink: str | None = None,
    join: Flag = False,
    all_: Annotated[bool, Parameter(name="--all", negative=())] = False,
    again: Flag = False,
    yes: Flag = False,
    show: Annotated[int, Parameter(validator=Number(gte=0))] = 20,
    give_up_after: str = "1m",
    bootstrap_servers: BootstrapServers = None,
    config: Annotated[
        Path | None, Parameter(help="The sink's settings file (YAML), or the join's.")
    ] = None,
) -> int:
    """Put dead letters back: to the receiver that refused them, or to the join.

    Parameters
    ----------
    positions
        Which letters, PARTITION:OFFSET, as `list` shows it; or by the options of `list`.
    sink
        Hand letters of this sink to its receiver: remote_write, store, rows or otlp.
    join
        Write letters of the join back to their topics.
    all_
        All letters of that consumer, where no option chooses any.
    again
        Also those that were replayed before.
    yes
        Send them; without it, what would be sent is counted.
    show
        How many letters that are refused again to show, at most.
    give_up_after
        For how long the receiver or Kafka may be away.

    """
    if (sink is None) == (not join):
        raise UserError("to whom? give --sink KIND or --join, one of them")
    wanted = chosen.filter(positions)
    if wanted.is_empty and not all_:
        raise UserError("which letters? give positions, options of `list`, or --all")
    give_up_seconds = parse_duration(give_up_after, option="--give-up-after") / 1000
    _quiet()
    clock = SystemClock()
    where: Where = {"config": config, "bootstrap_servers": bootstrap_servers, "clock": clock}
    opening = sink_opening(sink, **where) if sink is not None else join_opening(**where)
    refused = RefusedPrinter(show)
    work = replay_letters(
        opening.bus,
        opening.target,
        wanted=wanted,
        again=again,
        is_rehearsal=not yes,
        give_up_seconds=give_up_seconds,
        clock=clock,
        refused=refused,
    )
    outcome = run_cancellable(work)
    return exit_code(outcome)


def _quiet() -> None:
    configure_logs(LogSettings(level="error", format="text"))
