"""Runs long work: reports its progress, and ends it on a signal."""

import asyncio
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

T = TypeVar("T")
Advance = Callable[[int], None]
"""Takes the number of items done since the last call."""
LINE_SECONDS: Final = 10.0
_INTERRUPT_SECONDS: Final = 0.05


def run_cancellable(work: Coroutine[Any, Any, T]) -> T:
    """Run the work and return its result; SIGTERM and Ctrl-C raise KeyboardInterrupt."""
    try:
        return asyncio.run(_until_signal(work))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _until_signal(work: Coroutine[Any, Any, T]) -> T:
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await work


def run_interruptible(work: Callable[[], T], *, interrupt: Callable[[], None]) -> T:
    """Run a DuckDB call; SIGINT interrupts it and raises `KeyboardInterrupt`.

    The call runs in a thread of its own. In the main thread, Python would handle the signal only
    after DuckDB has returned. A second SIGINT ends the process.
    """
    done, interrupted = Future[T](), threading.Event()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001  # raised in the main thread
            done.set_exception(error)

    def heed(*_: object) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    # The handler only sets an event, because an exception could leave the thread running.
    former = signal.signal(signal.SIGINT, heed)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_INTERRUPT_SECONDS)
        if interrupted.is_set():
            interrupt()  # repeated, because DuckDB ignores it before the query begins
    signal.signal(signal.SIGINT, former)
    if interrupted.is_set():
        raise KeyboardInterrupt
    return done.result()


@contextmanager
def printing_progress(total: int, *, what: str, done: str) -> Iterator[Advance]:
    """Report progress while the context is open.

    `what` names the items in the plural and `done` is the participle, as in "read 3 of 9 records".
    """
    if sys.stderr.isatty():
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(what),
            TimeRemainingColumn(),
        )
        # On standard error, because results go to standard output.
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
