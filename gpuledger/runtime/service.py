"""Runs a component from its start to its exit code.

Handles signals, the deadline for shutdown, uncaught errors, logs and health pages. The component's
own work is passed in as a function.
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

    The exit code is 0 if the work ended or was cancelled by a signal, 1 if it failed, and 2 if it
    raised a `UserError`. If it is still running `stop_within_seconds` after the signal, the process
    exits with 1. `on_stop` is called in the event loop after the signal, before the cancellation.
    """
    deadline = _Deadline(stop_within_seconds)
    signals = _EndingSignals(deadline)
    try:
        asyncio.run(_supervise(work, deadline, signals, on_stop))
    except BaseException as error:  # noqa: BLE001  # the last place where an error can be logged
        return _explain(error)
    finally:
        signals.restore()
        deadline.lift()
    return 0


def explain_user_errors(main: Callable[[], int]) -> Callable[[], int]:
    """Wrap `main` so that a `UserError` becomes one line on standard error and exit code 2."""

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
        _log.info("signal_received", signal=name)  # last, because writing may block

    signals.take(stop)
    await asyncio.wait({task})
    deadline.begin()  # tasks and threads left by the work may hang as well
    if not (signals.have_come and task.cancelled()):
        task.result()


class _EndingSignals:
    """Handles the first SIGTERM or SIGINT, and ignores all later ones.

    A wrapper may forward the same signal twice. The second signal may arrive while the interpreter
    shuts down, which restores the system's handlers. By then, a handler in Python no longer exists.
    Therefore the system itself ignores the signals (SIG_IGN); otherwise they would change the exit
    code.
    """

    def __init__(self, deadline: "_Deadline") -> None:
        self.have_come = False
        self._deadline = deadline
        self._before = {number: signal.getsignal(number) for number in _ENDING}

    def take(self, stop: Callable[[str], None]) -> None:
        """Call `stop` in the running event loop with the name of the first signal."""
        loop = asyncio.get_running_loop()
        self._deadline.set_loop(loop)
        passed_on = False

        def stop_once(name: str) -> None:
            # Decided in the event loop: another signal may interrupt a handler at any instruction,
            # so that both handlers would consider themselves the first.
            nonlocal passed_on
            if not passed_on:
                passed_on = True
                stop(name)

        def pass_on(number: int, _: FrameType | None) -> None:
            self._deadline.begin()  # here, because the event loop may be blocked
            self.have_come = True
            # Not SIG_IGN yet: Python reports an error for a pending signal that has no handler.
            for ending in _ENDING:
                signal.signal(ending, lambda *_: None)
            if not loop.is_closed():
                loop.call_soon_threadsafe(stop_once, signal.Signals(number).name)

        for ending in _ENDING:
            signal.signal(ending, pass_on)

    def restore(self) -> None:
        """Restore the previous handlers, or ignore further signals if one has arrived."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self.have_come else handler)


class _Deadline:
    """Ends the process at its deadline, in a thread, because the event loop itself may hang.

    The thread is started in advance and woken through a pipe. A signal handler can neither start a
    thread nor take a lock, because the interrupted code may be doing the same. The handler may even
    be late: Python calls it only after a system call that blocks the main thread, for example
    because its standard error is not read. So the interpreter itself writes to the pipe
    (`signal.set_wakeup_fd`), independent of the main thread. The woken thread also wakes the event
    loop, which may be about to wait, so that the handler runs.
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
        """Set the event loop to wake when a signal arrives."""
        self._loop = loop

    def begin(self) -> None:
        """Start the time to the deadline, if it has not started; signal handlers may call this."""
        with suppress(BlockingIOError):  # the pipe is full, so the thread will wake anyway
            os.write(self._wake, _NO_SIGNAL)

    def lift(self) -> None:
        """Cancel the deadline, unless Python's exit would have to wait for a running thread."""
        signal.set_wakeup_fd(self._former_wake)
        others = set(threading.enumerate()) - {threading.main_thread(), self._thread}
        if all(thread.daemon for thread in others):
            self.begin()  # wakes the thread, so that it ends
            self._lifted.set()

    def _watch(self) -> None:
        while not set(os.read(self._woken, 1)) & _BEGINS:
            pass  # a signal that does not end the process
        if self._loop is not None:
            with suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(bool)
        if self._lifted.wait(self._seconds):
            # Nothing writes to the pipe any more: the handlers and `set_wakeup_fd` are restored.
            os.close(self._wake)
            os.close(self._woken)
            return

        # In a thread with a time limit: writing may block because standard error is not read, or
        # because another thread that writes holds the lock.
        def log() -> None:
            _log.error("stop_deadline_missed", stop_within_seconds=self._seconds)

        logging = threading.Thread(target=log, name="deadline-missed", daemon=True)
        with suppress(RuntimeError):  # the thread cannot be started
            logging.start()
            logging.join(_LOGGING_SECONDS)
        os._exit(_FAILED)


def _explain(error: BaseException) -> int:
    if mistake := _foreseen(error, UserError):
        text = mask_addresses(" ".join(str(mistake).split()))
        # The name by which the program was started, also for `python -m`.
        started = Path(sys.argv[0])
        program = started.parent.name if started.name == "__main__.py" else started.name
        sys.stderr.write(f"{program}: {text}\n")
        return _USER_ERROR
    if end := _foreseen(error, FreshStartError):
        _log.critical("service_failed", error=str(end))
    elif end := _foreseen(error, GpuledgerError):
        _log.error("service_failed", error=str(end))
    else:
        _log.error("service_failed", exc_info=error)
    return _FAILED


def _foreseen(error: BaseException, kind: type[GpuledgerError]) -> GpuledgerError | None:
    """Return the error if it is of this kind, otherwise `None`.

    For an exception group that has only errors of this kind, returns the first one. A task group
    wraps its tasks' errors in an exception group.
    """
    if isinstance(error, BaseExceptionGroup):
        inner = [_foreseen(part, kind) for part in error.exceptions]
        return inner[0] if all(inner) else None
    return error if isinstance(error, kind) else None


class ServiceSettings(Protocol):
    """The settings that every component has."""

    @property
    def http(self) -> HttpSettings:
        """The HTTP server for health and metrics."""

    @property
    def log(self) -> LogSettings:
        """Format and level of the log on standard error."""


S = TypeVar("S", bound=ServiceSettings)


def run_service(
    main: Callable[[S, Readiness], Awaitable[None]],
    *,
    settings: S,
    page: Page | None = None,
    others: AsgiApp | None = None,
    about: Mapping[str, object] | None = None,
) -> int:
    """Run `main` with logs and health pages until it ends or a signal arrives.

    Returns the exit code. `page` is appended to the process's own metrics on `/metrics`. `others`
    answers all other paths. `about` adds facts about this component to the first log line: its
    work, destination and identity.
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
