"""What a replay says at its end: counts on standard error, differences and verdict on output."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cli.replay.plan import write_moment
from cli.replay.run import ReplayOutcome
from enricher.join.replay import TimeRange
from enricher.join.replay_diff import Comparison, Counts, Difference

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


# Says on standard error how far a replay is: a bar on a terminal, else a line now and then.

Advance = Callable[[int], None]
"""Takes how many more ticks are done."""
LINE_SECONDS: Final = 10.0


@contextmanager
def telling_progress(total: int) -> Iterator[Advance]:
    """Report progress while the context is open."""
    if sys.stderr.isatty():
        with _bar() as bar:
            task = bar.add_task("replaying", total=total)
            yield lambda count: bar.update(task, advance=count)
    else:
        yield _Lines(total).advance


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("ticks"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


class _Lines:
    def __init__(self, total: int, *, seconds: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._seconds = seconds
        self._done = 0
        self._said_at = seconds()

    def advance(self, count: int) -> None:
        self._done += count
        now = self._seconds()
        if now - self._said_at >= LINE_SECONDS:
            self._said_at = now
            sys.stderr.write(f"gpuledger: replayed {self._done} of {self._total} ticks\n")
            sys.stderr.flush()
