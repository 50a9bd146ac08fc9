"""A process that works until it is signalled, and ends in the way named by its argument."""

import asyncio
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

import msgspec
import structlog

from gpuledger.runtime import Readiness, configure_logs, run_service, run_until_signalled
from gpuledger.settings import HttpSettings, LogSettings

FOR_EVER = 3600.0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The minimum that a service needs."""

    http: HttpSettings = HttpSettings(listen="127.0.0.1:0")
    log: LogSettings = LogSettings()


def report(text: str) -> None:
    """Print a line for the test."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def slow() -> None:
    """Clean up for a moment."""
    try:
        report("working")
        await asyncio.sleep(FOR_EVER)
    finally:
        await asyncio.sleep(0.2)
        report("cleaned up")


async def hanging() -> None:
    """Never end."""
    report("working")
    while True:
        try:
            await asyncio.sleep(FOR_EVER)
        except asyncio.CancelledError:
            continue


async def blocking() -> None:
    """Hold the event loop in the clean-up."""
    try:
        report("working")
        await asyncio.sleep(FOR_EVER)
    finally:
        time.sleep(FOR_EVER)  # noqa: ASYNC251 - the mistake that is tested


async def reading_a_fifo() -> None:
    """Block the event loop in a system call that never returns."""
    fifo = Path(tempfile.mkdtemp()) / "fifo"
    os.mkfifo(fifo)
    report("working")
    fifo.read_bytes()


async def logging_without_reader() -> None:
    """Make standard error a full pipe that nobody reads."""
    os.set_blocking(sys.stderr.fileno(), False)
    with suppress(BlockingIOError):
        while True:
            os.write(sys.stderr.fileno(), b"x")
    os.set_blocking(sys.stderr.fileno(), True)
    report("working")
    await asyncio.sleep(FOR_EVER)


async def logging_without_reader_at_once() -> None:
    """Write a log line, which blocks forever, before the signal comes."""
    asyncio.get_running_loop().call_soon(structlog.get_logger().error, "stuck")
    await logging_without_reader()


async def left_task() -> None:
    """End, but leave a task that does not end."""
    task = asyncio.create_task(hanging())
    await asyncio.sleep(FOR_EVER)
    await task


async def left_thread() -> None:
    """End, but leave a thread that Python waits for."""
    threading.Thread(target=time.sleep, args=(FOR_EVER,)).start()
    report("working")
    await asyncio.sleep(FOR_EVER)


async def failing_cleanup() -> None:
    """Fail during shutdown."""
    try:
        report("working")
        await asyncio.sleep(FOR_EVER)
    finally:
        raise RuntimeError("could not clean up")


async def serve(settings: Settings, readiness: Readiness) -> None:
    """Work as a component does."""
    readiness.check("test").ok(settings.http.listen)
    await slow()


async def serve_in_outage(_: Settings, readiness: Readiness) -> None:
    """Give up undelivered messages at the end, so that no check is left failing."""
    check = readiness.check("delivery")
    check.failed("no broker")
    try:
        await slow()
    finally:
        check.ok()


class LateSignal:
    """Signals this process when the interpreter, at shutdown, clears the module that has it."""

    def __del__(
        self,
        kill: Callable[[int, int], None] = os.kill,
        number: int = signal.SIGTERM,
        process_id: int = os.getpid(),  # at that time os cannot be used any more
    ) -> None:
        """Send the signal."""
        kill(process_id, number)


async def signalled_late() -> None:
    """Clean up, and let another signal come at the very end."""
    globals()["last"] = LateSignal()
    await slow()


async def signalled_twice_at_once() -> None:
    """Let both signals come at the same instant, after work has started."""
    asyncio.get_running_loop().call_soon(signal_twice_at_once)
    await slow()


def signal_twice_at_once() -> None:
    """Send both signals, and unblock them together."""
    both = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, both)
    for number in both:
        os.kill(os.getpid(), number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, both)


async def signalled_within_the_handler() -> None:
    """Let the second signal come while the first is being handled."""

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == "begin":
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

    sys.setprofile(interrupt)
    asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGTERM)
    await slow()


CASES: dict[str, Callable[[], Awaitable[None]]] = {
    "slow": slow,
    "hanging": hanging,
    "blocking": blocking,
    "reading-a-fifo": reading_a_fifo,
    "logging-to-nobody": logging_without_reader,
    "logging-to-nobody-at-once": logging_without_reader_at_once,
    "left-task": left_task,
    "left-thread": left_thread,
    "failing-cleanup": failing_cleanup,
    "signalled-late": signalled_late,
    "signalled-twice-at-once": signalled_twice_at_once,
    "signalled-within-the-handler": signalled_within_the_handler,
}


def main(case: str) -> int:
    """Run one case."""
    if case == "service":
        return run_service(serve, settings=Settings(), about={"node": "node-1"})
    if case == "service-in-outage":
        return run_service(serve_in_outage, settings=Settings())
    configure_logs(LogSettings())
    seconds = 10.0 if case == "slow" or case.startswith("signalled") else 0.4
    return run_until_signalled(CASES[case], stop_within_seconds=seconds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
