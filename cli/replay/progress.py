"""Says on standard error how far a replay is: a bar on a terminal, else a line now and then."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

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
