"""A deployable as a whole, from its first instruction to its exit code.

Here live signals, the deadline for the end, what errors become, and around them logs and health
pages. What a deployable does meanwhile is not known.
"""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Final, Protocol, TypeVar

import structlog

from gpuledger import __version__
from gpuledger.errors import FreshStartError, GpuledgerError, UserError
from gpuledger.runtime.http.asgi import AsgiApp
from gpuledger.runtime.http.health_pages import Page, serve_health
from gpuledger.runtime.http.web_config import WebGuard
from gpuledger.runtime.logs import configure_logs
from gpuledger.runtime.readiness import CheckSeverity, Readiness
from gpuledger.runtime.tasks import run_tasks
from gpuledger.settings.groups import HttpSettings, LogSettings
from gpuledger.settings.secret import mask_addresses

_log = structlog.get_logger(__name__)
_FAILED: Final = 1
_USER_ERROR: Final = 2
_LOGGING_SECONDS: Final = 1.0
_ENDING: Final = (signal.SIGTERM, signal.SIGINT)
_NO_SIGNAL: Final = b"\0"
_BEGINS: Final = {*map(int, _ENDING), *_NO_SIGNAL}


def run_until_signalled(
    work: Callable[[], Awaitable[None]],
    *,
    stop_within_seconds: float = 10.0,
    on_stop: Callable[[], object] = bool,
) -> int:
    """Run `work()` until it ends or SIGTERM or SIGINT cancels it; return the exit code.

    0 where it ended or let itself be cancelled, 1 where it failed, 2 where a `UserError` came out
    of it. Where it has not ended `stop_within_seconds` after the signal, the process ends with 1.
    `on_stop` is called in the event loop when the signal has come, before the work is cancelled.
    """
    deadline = _Deadline(stop_within_seconds)
    signals = _EndingSignals(deadline)
    try:
        asyncio.run(_supervise(work, deadline, signals, on_stop))
    except BaseException as error:  # noqa: BLE001  # the last place where it can be logged
        return _explain(error)
    finally:
        signals.restore()
        deadline.lift()
    return 0


def explain_user_errors(main: Callable[[], int]) -> Callable[[], int]:
    """Make a `main` that writes a `UserError` as one line on standard error and returns 2."""

    @wraps(main)
    def explaining() -> int:
        try:
            return main()
        except UserError as error:
            return _explain(error)

    return explaining


async def _supervise(
    work: Callable[[], Awaitable[None]],
    deadline: "_Deadline",
    signals: "_EndingSignals",
    on_stop: Callable[[], object],
) -> None:
    task = asyncio.ensure_future(work())

    def stop(name: str) -> None:
        on_stop()
        task.cancel()
        _log.info("signal_received", signal=name)  # last, as nobody may be reading the log

    signals.take(stop)
    await asyncio.wait({task})
    deadline.begin()  # whatever the work left behind may hang as well
    if not (signals.have_come and task.cancelled()):
        task.result()


class _EndingSignals:
    """SIGTERM and SIGINT: the first one counts, and those after it never do.

    A wrapper may pass the same signal on twice. The later one may come while the interpreter shuts
    down, which returns every handler to the system: only what the system itself ignores is not
    the exit code then.
    """

    def __init__(self, deadline: "_Deadline") -> None:
        self.have_come = False
        self._deadline = deadline
        self._before = {number: signal.getsignal(number) for number in _ENDING}

    def take(self, stop: Callable[[str], None]) -> None:
        """Call `stop` in the running event loop, with the name of the first signal that comes."""
        loop = asyncio.get_running_loop()
        self._deadline.set_loop(loop)
        passed_on = False

        def stop_once(name: str) -> None:
            # Decided in the event loop: a handler may be interrupted by another signal's at any
            # instruction, so that both believe to be the first.
            nonlocal passed_on
            if not passed_on:
                passed_on = True
                stop(name)

        def pass_on(number: int, _: FrameType | None) -> None:
            self._deadline.begin()  # here, as the event loop may stand still
            self.have_come = True
            # Not SIG_IGN yet: Python reports a signal that came with this one and has no handler.
            for ending in _ENDING:
                signal.signal(ending, lambda *_: None)
            if not loop.is_closed():
                loop.call_soon_threadsafe(stop_once, signal.Signals(number).name)

        for ending in _ENDING:
            signal.signal(ending, pass_on)

    def restore(self) -> None:
        """Restore the handlers from before, or ignore the signals as the process ends by one."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self.have_come else handler)


class _Deadline:
    """Ends the process when its time is over: from a thread, as the event loop itself may hang.

    The thread is there from the start and is woken through a pipe. A signal's handler can neither
    start a thread nor take a lock, as the code that it interrupts may be doing just that. Nor may
    it run at all: a signal that comes right before the main thread waits in the system, as for a
    reader of standard error that does not read, has its handler called when that wait is over. So
    the interpreter itself writes to the pipe (`signal.set_wakeup_fd`), whatever the thread does.
    An event loop that is about to wait is woken by this thread, so that it calls the handler.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._former_wake = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._lifted = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._watch, name="deadline", daemon=True)
        self._thread.start()

    def set_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the event loop to wake when a signal comes."""
        self._loop = loop

    def begin(self) -> None:
        """Let the time run from now on, unless it runs; also for a signal's handler."""
        with suppress(BlockingIOError):  # full of what wakes it
            os.write(self._wake, _NO_SIGNAL)

    def lift(self) -> None:
        """Let the process live on, unless a thread is left for which Python's exit would wait."""
        signal.set_wakeup_fd(self._former_wake)
        others = set(threading.enumerate()) - {threading.main_thread(), self._thread}
        if all(thread.daemon for thread in others):
            self.begin()  # so that the thread looks, and ends
            self._lifted.set()

    def _watch(self) -> None:
        while not set(os.read(self._woken, 1)) & _BEGINS:
            pass  # another signal than those that end us
        if self._loop is not None:
            with suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(bool)
        if self._lifted.wait(self._seconds):
            # Nobody writes any more: handlers and `set_wakeup_fd` are as they were before.
            os.close(self._wake)
            os.close(self._woken)
            return

        # Whoever writes a line now may wait for a reader of standard error that does not read, or
        # for the lock of somebody who does.
        def log() -> None:
            _log.error("stop_deadline_missed", stop_within_seconds=self._seconds)

        logging = threading.Thread(target=log, name="deadline-missed", daemon=True)
        with suppress(RuntimeError):  # no thread can be started
            logging.start()
            logging.join(_LOGGING_SECONDS)
        os._exit(_FAILED)


def _explain(error: BaseException) -> int:
    if mistake := _foreseen(error, UserError):
        text = mask_addresses(" ".join(str(mistake).split()))
        # The name under which this was started, also by `python -m`.
        started = Path(sys.argv[0])
        program = started.parent.name if started.name == "__main__.py" else started.name
        sys.stderr.write(f"{program}: {text}\n")
        return _USER_ERROR
    if end := _foreseen(error, FreshStartError):
        _log.critical("service_failed", error=str(end))
    else:
        _log.error("service_failed", exc_info=error)
    return _FAILED


def _foreseen(error: BaseException, kind: type[GpuledgerError]) -> GpuledgerError | None:
    """Return an error of a kind and nothing else; a task group wraps what its tasks raise."""
    if isinstance(error, BaseExceptionGroup):
        inner = [_foreseen(part, kind) for part in error.exceptions]
        return inner[0] if all(inner) else None
    return error if isinstance(error, kind) else None


class ServiceSettings(Protocol):
    """What the settings of every deployable have."""

    @property
    def http(self) -> HttpSettings:
        """Where health and metrics are served."""

    @property
    def log(self) -> LogSettings:
        """What is written to standard error."""


S = TypeVar("S", bound=ServiceSettings)


def run_service(
    main: Callable[[S, Readiness], Awaitable[None]],
    *,
    settings: S,
    page: Page | None = None,
    others: AsgiApp | None = None,
    about: Mapping[str, object] | None = None,
) -> int:
    """Run `main` with logs and health pages until a signal; return the exit code.

    `page` is written behind the process's own metrics on `/metrics`; `others` answers all other
    paths; `about` is what the first log line says of this deployable: what it does, where to, and
    as whom.
    """
    configure_logs(settings.log)
    readiness = Readiness()
    guard = None
    if file := settings.http.web_config_file:
        check = readiness.check("web_config", severity=CheckSeverity.WARNING)
        guard = WebGuard(file, check=check)
        readiness.add_periodic(guard.look, check=check)

    async def work() -> None:
        async with serve_health(
            listen=settings.http.listen,
            readiness=readiness,
            page=page,
            guard=guard,
            others=others,
        ) as address:
            _log.info("service_started", version=__version__, http=address, **(about or {}))
            try:
                async with run_tasks(readiness.run_periodic()):
                    await main(settings, readiness)
            finally:
                _log.info("service_ended")

    return run_until_signalled(work, on_stop=readiness.end)
