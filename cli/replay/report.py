"""What a replay says at its end: counts on standard error, differences and verdict on output."""

import json
import sys
from typing import Final

from cli.replay.run import ReplayOutcome
from cli.replay.time_args import write_moment
from enricher.join.replay.diff import Comparison, Counts, Difference
from enricher.join.replay.replay import TimeRange

_SHOWN_CHARACTERS: Final = 200
DIFFERENT: Final = 1


def tell_outcome(outcome: ReplayOutcome, wanted: TimeRange, *, where: str | None) -> None:
    """Return how many events there were, and what could not be used."""
    begin, end = map(write_moment, wanted)
    into = f", into {where}" if where else ""
    sys.stderr.write(f"gpuledger: replayed {outcome.events} events, {begin} to {end}{into}\n")
    if outcome.unusable:
        sys.stderr.write(
            f"gpuledger: {outcome.unusable} records could not be used, the first:"
            f" {outcome.first_detail}\n"
        )


def tell_comparison(comparison: Comparison) -> int:
    """Print what differs, then the verdict; return the exit code."""
    for difference in comparison.differences:
        print_line(show_difference(difference))
    hidden = comparison.changes - len(comparison.differences)
    if hidden:
        print_line(f"and {hidden} more differences, {comparison.changes} in all")
    counts = comparison.counts
    if counts.repeated:
        print_line(f"the first run has {counts.repeated} events more than once")
    if counts.late_otherwise:
        print_line(f"{counts.late_otherwise} events are marked late in one run only")
    print_line(verdict(counts))
    return 0 if counts.is_agreed else DIFFERENT


def verdict(counts: Counts) -> str:
    """Return the one line that counts."""
    return (
        f"compared {counts.compared} events: {counts.equal} equal,"
        f" {counts.more_complete} more complete, {counts.different} differ,"
        f" {counts.missing} missing, {counts.extra} extra"
    )


def show_difference(difference: Difference) -> str:
    """Return the line of one field."""
    event, change = difference
    return (
        f"node {event.node} boot {event.boot_id} seq {event.seq} {change.field}:"
        f" first {_shown(change.first)}, replayed {_shown(change.replayed)}"
    )


def print_line(line: str) -> None:
    """Print one line."""
    sys.stdout.write(f"{line}\n")


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
