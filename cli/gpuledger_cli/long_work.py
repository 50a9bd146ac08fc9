"""What a command that works for long shows meanwhile, and how a signal ends it."""

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

T = TypeVar("T")
Advance = Callable[[int], None]
"""Takes how much more is done."""
LINE_SECONDS: Final = 10.0


def run_cancellable(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end; SIGTERM cancels the work as Ctrl-C does, which asyncio sees to itself."""
    try:
        return asyncio.run(_until_signal(work))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _until_signal(work: Coroutine[Any, Any, T]) -> T:
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await work


@contextmanager
def printing_progress(total: int, *, what: str, done: str) -> Iterator[Advance]:
    """Report progress while the context is open; `what` is counted, and is `done` to it."""
    if sys.stderr.isatty():
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(what),
            TimeRemainingColumn(),
        )
        # On standard error, as results go to standard output.
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(done, total=total)
            yield lambda count: bar.update(task, advance=count)
    else:
        yield _Lines(total, what=what, done=done).advance


class _Lines:
    def __init__(self, total: int, *, what: str, done: str) -> None:
        self._total, self._what, self._done_word = total, what, done
        self._count = 0
        self._printed_seconds = time.monotonic()

    def advance(self, count: int) -> None:
        self._count += count
        now_seconds = time.monotonic()
        if now_seconds - self._printed_seconds >= LINE_SECONDS:
            self._printed_seconds = now_seconds
            sys.stderr.write(
                f"gpuledger: {self._done_word} {self._count} of {self._total} {self._what}\n"
            )
            sys.stderr.flush()
