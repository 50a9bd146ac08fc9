"""`gpuledger dead-letters`: the commands `list`, `show` and `replay`."""

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
from gpuledger_cli.dead_letters.dead_letter_log import (
    DeadLetterFilter,
    DeadLetterLog,
    StoredDeadLetter,
    parse_position,
)
from gpuledger_cli.dead_letters.dead_letter_printing import (
    DeadLetterPrinter,
    Format,
    open_log,
    print_counts,
)
from gpuledger_cli.dead_letters.dead_letter_replay import replay_dead_letters
from gpuledger_cli.dead_letters.dead_letter_views import (
    DeadLetterCounts,
    full_text,
    parse_count_by,
    row_of,
)
from gpuledger_cli.kafka_options import NO_OPTIONS, KafkaOptions
from gpuledger_cli.long_work import printing_progress, run_cancellable
from gpuledger_cli.option_help import epilogue, time_option

_READS: Final = (
    "The command reads the dead-letter topic outside any consumer group, so it does not affect"
    " running components."
)
_REPLAY_HELP: Final = epilogue(
    """
A dead-letter record is replayed only to the consumer that rejected it:
  - Records that the join rejected are written back to their own topic.
  - Events that a sink rejected (remote_write, store, rows) are written to the
    topic gpuledger.replay.v1. Only that sink takes them from there. Alerts
    are not replayed.

A record that is rejected again becomes another dead-letter record:
`gpuledger dead-letters list --since -10m` shows it. You may replay a record
twice: its consumer recognizes what it already has. Only the sink rows does not;
it writes the rows to its topic again.
""",
    examples={
        "Count first": "gpuledger dead-letters replay --reason out_of_order",
        "Then send": "gpuledger dead-letters replay --reason out_of_order --yes",
        "One record": "gpuledger dead-letters replay 0:17 --yes",
        "After an upgrade of the join": "gpuledger dead-letters replay --reason undecodable --yes",
    },
    codes={0: "all records are counted or written", 3: "some records cannot be replayed"},
)
app = App(name="dead-letters", help_format="plaintext")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The options that select dead letters; all of them must match."""

    since: Annotated[str | None, time_option("Rejected at this time or later")] = None
    until: Annotated[str | None, time_option("Rejected before this time")] = None
    consumer: Annotated[
        tuple[str, ...],
        Parameter(
            help="Rejected by this consumer group; may be repeated.",
            negative=(),
            show_default=False,
        ),
    ] = ()
    reason: Annotated[
        tuple[str, ...],
        Parameter(
            help="Rejected for this reason; may be repeated.", negative=(), show_default=False
        ),
    ] = ()
    topic: Annotated[
        tuple[str, ...],
        Parameter(
            help="Records of this topic; may be repeated.",
            negative=(),
            show_default=False,
        ),
    ] = ()
    key: Annotated[str | None, Parameter(help="Records with this key.")] = None
    node: Annotated[
        str | None,
        Parameter(help="Records of this node: its name, or CLUSTER/NODE."),
    ] = None

    def filter(self, positions: Iterable[str] = ()) -> DeadLetterFilter:
        """Return the filter; raises UserError that names an invalid option."""
        now_ms = time.time_ns() // NS_PER_MS
        moments = {
            option: None if text is None else parse_moment(text, option=option, now_ms=now_ms)
            for option, text in (("--since", self.since), ("--until", self.until))
        }
        return DeadLetterFilter(
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


@app.command(
    name="list",
    help_epilogue=epilogue(
        _READS,
        examples={
            "The newest hundred": "gpuledger dead-letters list",
            "How many by consumer and reason": (
                "gpuledger dead-letters list --count-by consumer,reason"
            ),
            "One node, the last hour": (
                "gpuledger dead-letters list --since -1h --node gpu-node-07"
            ),
            "For jq": "gpuledger dead-letters list --format json --limit 0 | jq -r .detail",
        },
    ),
)
def list_dead_letters(
    chosen: Chosen = _EVERYTHING,
    *,
    limit: Annotated[int, Parameter(validator=Number(gte=0))] = 100,
    count_by: str | None = None,
    format: Format = "table",  # noqa: A002  # the option's name
    kafka: KafkaOptions = NO_OPTIONS,
) -> int:
    """List dead-letter records, the newest last.

    Parameters
    ----------
    limit
        Maximum number of records to show, the newest ones; 0 shows all, for json and csv.
    count_by
        Count records by fields, separated by commas: consumer, reason, topic, partition, node.
    format
        table, json (one object per line) or csv.

    """
    if limit == 0 and format == "table" and count_by is None:
        raise UserError("--limit: 0 is only for --format json and csv; give a positive number")
    fields = None if count_by is None else parse_count_by(count_by)
    into = (
        DeadLetterPrinter(format=format, limit=limit)
        if fields is None
        else DeadLetterCounts(fields)
    )
    wanted = chosen.filter()
    bus = _open_quietly(kafka)
    why_none = run_cancellable(scan(bus, wanted, into=into))
    if isinstance(into, DeadLetterCounts):
        print_counts(into, format=format)
    else:
        into.close()
    if why_none:
        sys.stderr.write(f"gpuledger: {why_none}\n")
    return 0


async def scan(
    history: Bus, wanted: DeadLetterFilter, *, into: DeadLetterCounts | DeadLetterPrinter
) -> str:
    """Read the dead letters that exist when the command starts; add those that match to `into`.

    If no dead letter matched, return the reason; otherwise return an empty text.
    """
    found = 0
    async with open_log(history, wanted) as log:
        with printing_progress(log.offsets, what="dead-letter records", done="read") as advance:
            async with aclosing(log.dead_letters(advance)) as dead_letters:
                async for dead_letter in dead_letters:
                    found += 1
                    if isinstance(into, DeadLetterCounts):
                        into.add(dead_letter)
                    else:
                        into.add(row_of(dead_letter))
        return "" if found else log.why_none()


@app.command(
    usage="gpuledger dead-letters show [OPTIONS] PARTITION:OFFSET...",
    help_epilogue=epilogue(
        examples={
            "All about one record": "gpuledger dead-letters show 0:17",
            "The bytes of the rejected record": "gpuledger dead-letters show 0:17 --value > record",
        }
    ),
)
def show(
    *positions: Annotated[str, Parameter(name="PARTITION:OFFSET")],
    value: Flag = False,
    kafka: KafkaOptions = NO_OPTIONS,
) -> int:
    """Show dead-letter records with the records that were rejected.

    Parameters
    ----------
    positions
        Position of a dead-letter record, such as 0:17, as `list` shows it; may be repeated.
    value
        Write only the bytes of the rejected record.

    """
    if not positions:
        raise UserError("PARTITION:OFFSET: missing; give a position, such as 0:17")
    bus = _open_quietly(kafka)
    wanted = DeadLetterFilter(positions=frozenset(map(parse_position, positions)))
    for dead_letter in run_cancellable(find(bus, wanted)):
        if value:
            sys.stdout.buffer.write(dead_letter.value or b"")
        else:
            sys.stdout.write(full_text(dead_letter, bus.topics))
    return 0


async def find(history: Bus, wanted: DeadLetterFilter) -> list[StoredDeadLetter]:
    """Return the dead letters at the wanted positions; raises UserError if one is missing."""
    async with open_log(history, wanted) as log:
        found = [dead_letter async for dead_letter in log.dead_letters(lambda _count: None)]
    refuse_missing(log)
    return found


def refuse_missing(log: DeadLetterLog) -> None:
    """Raise UserError if a requested position has no dead letter."""
    if log.missing:
        raise UserError(
            f"no dead-letter record at {', '.join(map(str, sorted(log.missing)))}; retention may"
            " have removed it; `gpuledger dead-letters list` shows the present ones"
        )


@app.command(
    usage="gpuledger dead-letters replay [OPTIONS] [PARTITION:OFFSET...]",
    help_epilogue=_REPLAY_HELP,
)
def replay(
    *positions: Annotated[str, Parameter(name="PARTITION:OFFSET")],
    chosen: Chosen = _EVERYTHING,
    all_: Annotated[bool, Parameter(name="--all", negative=())] = False,
    yes: Flag = False,
    kafka: KafkaOptions = NO_OPTIONS,
) -> int:
    """Replay dead-letter records to the consumers that rejected them; without --yes, only count.

    Parameters
    ----------
    positions
        Position of a dead-letter record, such as 0:17, as `list` shows it; may be repeated.
    all_
        Replay all records; required if neither a position nor an option chooses any.
    yes
        Write the records; without it, they are only counted.

    """
    wanted = chosen.filter(positions)
    if wanted.is_empty and not all_:
        raise UserError("no records chosen; give positions, options such as --reason, or --all")
    bus = _open_quietly(kafka)
    return run_cancellable(
        replay_dead_letters(bus, wanted, is_rehearsal=not yes, clock=SystemClock())
    )


def _open_quietly(kafka: KafkaOptions) -> KafkaBus:
    configure_logs(LogSettings(level="error", format="text"))
    return KafkaBus(kafka.settings())
