"""A process that works until it is signalled, and ends in the way that its argument names."""

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
    """The least that a service needs."""

    http: HttpSettings = HttpSettings(listen="127.0.0.1:0")
    log: LogSettings = LogSettings()


def say(text: str) -> None:
    """Tell the test."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def slow() -> None:
    """Clean up for a moment."""
    try:
        say("working")
        await asyncio.sleep(FOR_EVER)
    finally:
        await asyncio.sleep(0.2)
        say("cleaned up")


async def hanging() -> None:
    """Never end."""
    say("working")
    while True:
        try:
            await asyncio.sleep(FOR_EVER)
        except asyncio.CancelledError:
            continue


async def blocking() -> None:
    """Hold the event loop in the clean-up."""
    try:
        say("working")
        await asyncio.sleep(FOR_EVER)
    finally:
        time.sleep(FOR_EVER)  # noqa: ASYNC251 - the mistake that is tested


async def reading_a_fifo() -> None:
    """Hold the event loop in a call of the system's that nobody ends."""
    fifo = Path(tempfile.mkdtemp()) / "fifo"
    os.mkfifo(fifo)
    say("working")
    fifo.read_bytes()


async def logging_to_nobody() -> None:
    """Have standard error be a pipe that is full and that nobody reads."""
    os.set_blocking(sys.stderr.fileno(), False)
    with suppress(BlockingIOError):
        while True:
            os.write(sys.stderr.fileno(), b"x")
    os.set_blocking(sys.stderr.fileno(), True)
    say("working")
    await asyncio.sleep(FOR_EVER)


async def logging_to_nobody_at_once() -> None:
    """Write a line of the log, which takes for ever, before the signal comes."""
    asyncio.get_running_loop().call_soon(structlog.get_logger().error, "stuck")
    await logging_to_nobody()


async def left_task() -> None:
    """End, but leave a task that does not."""
    task = asyncio.create_task(hanging())
    await asyncio.sleep(FOR_EVER)
    await task


async def left_thread() -> None:
    """End, but leave a thread for which Python waits."""
    threading.Thread(target=time.sleep, args=(FOR_EVER,)).start()
    say("working")
    await asyncio.sleep(FOR_EVER)


async def failing_cleanup() -> None:
    """Fail while ending."""
    try:
        say("working")
        await asyncio.sleep(FOR_EVER)
    finally:
        raise RuntimeError("could not clean up")


async def serve(settings: Settings, readiness: Readiness) -> None:
    """Work as a deployable does."""
    readiness.check("test").ok(settings.http.listen)
    await slow()


async def serve_in_outage(_: Settings, readiness: Readiness) -> None:
    """Give up at the end what could not be delivered, so that nothing is left that fails."""
    check = readiness.check("delivery")
    check.failed("no broker")
    try:
        await slow()
    finally:
        check.ok()


class LateSignal:
    """Signals this process when the interpreter, shutting down, clears the module that has it."""

    def __del__(
        self,
        kill: Callable[[int, int], None] = os.kill,
        number: int = signal.SIGTERM,
        process_id: int = os.getpid(),  # at the end there is nothing left to ask
    ) -> None:
        """Send it."""
        kill(process_id, number)


async def signalled_late() -> None:
    """Clean up, and have another signal come at the very end."""
    globals()["last"] = LateSignal()
    await slow()


async def signalled_twice_at_once() -> None:
    """Have both signals come at the same instant, once it works."""
    asyncio.get_running_loop().call_soon(signal_twice_at_once)
    await slow()


def signal_twice_at_once() -> None:
    """Send both signals, and let them through together."""
    both = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, both)
    for number in both:
        os.kill(os.getpid(), number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, both)


async def signalled_within_the_handler() -> None:
    """Have the second signal come while the first one is being handled."""

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
    "logging-to-nobody": logging_to_nobody,
    "logging-to-nobody-at-once": logging_to_nobody_at_once,
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
