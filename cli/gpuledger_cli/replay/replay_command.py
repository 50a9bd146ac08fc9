"""`gpuledger replay`: reads the options, and writes a file or a topic or prints a comparison."""

import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Annotated, Final

from cyclopts import App, Parameter
from cyclopts.validators import Number

from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Bus
from gpuledger.clock import NS_PER_MS
from gpuledger.errors import UserError
from gpuledger.keys import show_node
from gpuledger.runtime import configure_logs
from gpuledger.settings import LogSettings
from gpuledger.time_ranges import parse_duration, parse_moment, write_moment
from gpuledger_cli.kafka_options import NO_OPTIONS, KafkaOptions
from gpuledger_cli.long_work import printing_progress, run_cancellable
from gpuledger_cli.option_help import duration_option, epilogue, time_option
from gpuledger_cli.replay.range_plan import ReplayRequest, TimeRange, make_plan
from gpuledger_cli.replay.run import (
    Replaying,
    ReplayOutcome,
    Write,
    count_ticks,
    refuse_nothing,
    to_file,
    to_nowhere,
    to_topic,
)
from gpuledger_enricher.join.replay_diff import Comparison, Counts, Difference

OpenOutput = Callable[[Bus], AbstractAsyncContextManager[Write]]
_HELP: Final = epilogue(
    """
The command reads the topics outside any consumer group, so it does not affect
the running join. It reads all pods first, so it also knows pods that the first
run did not know yet.

--compare checks the events against gpuledger.events.v1. Usage must be the same
to the byte. Descriptions (pods, namespaces, node) must be the same or more
complete. Differences are listed; the last line is the result.
""",
    examples={
        "The last hour into a file": "gpuledger replay --from -1h --output events.jsonl.gz",
        "Compare an hour with the first run": "gpuledger replay --from -2h --to -1h --compare",
        "Into a topic of its own": "gpuledger replay --from 2026-11-21 --topic events-again",
    },
    codes={0: "replayed; with --compare: no difference", 1: "an event differs or is missing"},
)
app = App(name="replay", help_epilogue=_HELP, help_format="plaintext")


@app.default
def replay(
    *,
    from_: Annotated[str, time_option("Start of the range", name="--from")],
    to: Annotated[str, time_option("End of the range (exclusive)")] = "now",
    output: Annotated[
        Path | None,
        Parameter(help="File to write, one JSON event per line; compressed if it ends in .gz."),
    ] = None,
    topic: Annotated[
        str | None,
        Parameter(
            help="Topic to write to, not one of gpuledger's own; it needs as many partitions as"
            " gpuledger.events.v1."
        ),
    ] = None,
    compare: Annotated[
        bool, Parameter(help="Compare with the events of the first run.", negative=())
    ] = False,
    show: Annotated[
        int,
        Parameter(help="Maximum number of differing fields to show.", validator=Number(gte=0)),
    ] = 20,
    lead_in: Annotated[
        str,
        duration_option("How long before the range to start reading, for state of earlier ticks"),
    ] = "5m",
    lateness: Annotated[
        str,
        duration_option("How late a record may have arrived, as after an outage of Kafka"),
    ] = "10m",
    accept_gaps: Annotated[
        bool,
        Parameter(
            help="Replay the rest if retention has removed a part of the range.", negative=()
        ),
    ] = False,
    kafka: KafkaOptions = NO_OPTIONS,
) -> int:
    """Run the join again over a time range; write the events or compare them."""
    configure_logs(LogSettings(level="error", format="text"))
    now_ms = time.time_ns() // NS_PER_MS
    request = ReplayRequest(
        wanted=_range(from_, to, now_ms=now_ms),
        lead_in_ms=parse_duration(lead_in, option="--lead-in"),
        lateness_ms=parse_duration(lateness, option="--lateness"),
        accept_gaps=accept_gaps,
        compare=compare,
    )
    open_output = choose_output(output, topic, compare=compare)
    comparison = Comparison(shown=show) if compare else None
    bus = KafkaBus(kafka.settings())
    # Cancelling closes the output's context with an error, so that no partial file is left.
    outcome = run_cancellable(
        replay_range(bus, bus, request=request, open_output=open_output, comparison=comparison)
    )
    print_outcome(outcome, request.wanted, where=str(output or topic or "") or None)
    return print_comparison(comparison) if comparison else 0


def choose_output(output: Path | None, topic: str | None, *, compare: bool) -> OpenOutput:
    """Return a function that opens the output; raises `UserError` if none or two are given."""
    if output is not None and topic is not None:
        raise UserError("--output and --topic: give only one of them")
    if output is not None:
        return lambda _bus: to_file(output)
    if topic is not None:
        return lambda bus: to_topic(bus, topic)
    if not compare:
        raise UserError("missing output; give --output FILE, --topic NAME or --compare")
    return lambda _bus: to_nowhere()


async def replay_range(
    bus: Bus,
    history: Bus,
    *,
    request: ReplayRequest,
    open_output: OpenOutput,
    comparison: Comparison | None,
) -> ReplayOutcome:
    """Replay a range; raises `UserError` if it is empty or no longer kept in full."""
    async with history.reader() as reader:
        plan = await make_plan(reader, request, topics=history.topics)
    begin, end = map(write_moment, request.wanted)
    refuse_nothing(plan, request, shown=f"from {begin} to {end}")
    for warning in plan.warnings:
        sys.stderr.write(f"gpuledger: {warning}\n")
    # Opened late, so that a range without ticks leaves no empty file.
    with printing_progress(count_ticks(plan), what="ticks", done="replayed") as advance:
        async with open_output(bus) as write:
            replaying = Replaying(
                wanted=request.wanted,
                partitions=plan.partitions,
                topics=history.topics,
                write=write,
                comparison=comparison,
                advance=advance,
            )
            return await replaying.run(history, plan)


def _range(from_: str, to: str, *, now_ms: int) -> TimeRange:
    begin_ms = parse_moment(from_, option="--from", now_ms=now_ms)
    end_ms = parse_moment(to, option="--to", now_ms=now_ms)
    if begin_ms >= end_ms:
        raise UserError(
            f"--from {write_moment(begin_ms)} is not before --to {write_moment(end_ms)}"
        )
    return TimeRange(begin_ms, end_ms)


_SHOWN_CHARACTERS: Final = 200
DIFFERENT: Final = 1


def print_outcome(outcome: ReplayOutcome, wanted: TimeRange, *, where: str | None) -> None:
    """Print the number of events and of records that could not be used."""
    begin, end = map(write_moment, wanted)
    into = f", into {where}" if where else ""
    sys.stderr.write(f"gpuledger: replayed {outcome.events} events, {begin} to {end}{into}\n")
    if outcome.unusable:
        sys.stderr.write(
            f"gpuledger: {outcome.unusable} records could not be used; the first:"
            f" {outcome.first_detail}\n"
        )


def print_comparison(comparison: Comparison) -> int:
    """Print the differences, then the result; return the exit code."""
    for difference in comparison.differences:
        print_line(show_difference(difference))
    hidden = comparison.changes - len(comparison.differences)
    if hidden:
        print_line(f"and {hidden} more differences, {comparison.changes} in all")
    counts = comparison.counts
    if counts.repeated:
        print_line(f"the first run has {counts.repeated} events more than once")
    if counts.late_otherwise:
        print_line(f"{counts.late_otherwise} events are marked late in only one of the runs")
    print_line(verdict(counts))
    return 0 if counts.is_agreed else DIFFERENT


def verdict(counts: Counts) -> str:
    """Return the line with the result of the comparison."""
    return (
        f"compared {counts.compared} events: {counts.equal} equal,"
        f" {counts.more_complete} more complete, {counts.different} differ,"
        f" {counts.missing} missing, {counts.extra} extra"
    )


def show_difference(difference: Difference) -> str:
    """Return the line for a differing field."""
    event, change = difference
    node = show_node(event.cluster, event.node)
    return (
        f"node {node} boot {event.boot_id} seq {event.seq} {change.field}:"
        f" first {_shown(change.first)}, replayed {_shown(change.replayed)}"
    )


def print_line(line: str) -> None:
    """Write a line to standard output."""
    sys.stdout.write(f"{line}\n")


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
