"""Threads that may hang: work is submitted to them, and the process never waits for them.

A call that hangs in the driver cannot be ended, so neither can its thread: it is leaked, and ends
by itself if the call ever returns. What the work is, is not known here.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Final, TypeVar

T = TypeVar("T")

# Enough for ctypes and the driver's own frames, and too small for the kernel to back a stack
# with a huge page of 2 MiB.
_STACK_BYTES: Final = 512 * 1024
_stack_size = threading.Lock()


class Worker:
    """A thread that does one thing after the other; it ends with the process, hanging or not."""

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        start_thread(self._run, name=name)

    def submit(self, do: Callable[[], object]) -> None:
        """Have `do` done after what was submitted before; it must not raise."""
        self._work.put(do)

    def start(self, do: Callable[[], T]) -> "Future[T]":
        """Have `do` done after what was submitted before; return the future of its result."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(do())
            except BaseException as error:  # noqa: BLE001  # whoever waits for the result gets it
                future.set_exception(error)

        self.submit(run)
        return future

    def end(self) -> None:
        """Let the thread end once it is done."""
        self._work.put(None)

    def _run(self) -> None:
        while (do := self._work.get()) is not None:
            do()


def start_thread(run: Callable[[], None], *, name: str) -> threading.Thread:
    """Start a thread with a small stack, for which the process's end does not wait."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    # The size is the process's, so nobody else may set it until the thread has started.
    with _stack_size:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return thread


async def wait_for(future: "Future[Any]", seconds: float) -> None:
    """Wait until it is done, or for `seconds` of the host's time; what is late goes on."""
    waiting = asyncio.wrap_future(future)
    # An error is retrieved here, as asyncio reports one of a call that nobody waits for any more.
    waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
    await asyncio.wait((waiting,), timeout=seconds)
