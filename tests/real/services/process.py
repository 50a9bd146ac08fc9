"""One external process with its own folder and log: started, waited for and stopped.

This module does not know what the process is; the modules next to it do.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

STOP_SECONDS = 120.0
RECHECK_SECONDS = 0.02
LOG_TAIL_BYTES = 4_000


class PartError(Exception):
    """A part ended, or was not ready in time; the message contains the end of its log."""


class Process:
    """A program that writes its output to `<folder>/<name>.log`."""

    def __init__(
        self,
        *,
        name: str,
        argv: Sequence[str | Path],
        folder: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.argv = [str(part) for part in argv]
        self.folder = folder
        self.environment = environment
        self.log = folder / f"{name}.log"
        self._running: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process id; raises PartError if it was never started."""
        if self._running is None:
            raise PartError(f"{self.name} was not started")
        return self._running.pid

    def start(self) -> None:
        """Start the program; its output is appended to its log."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._running = subprocess.Popen(
                self.argv,
                cwd=self.folder,
                env={**os.environ, **(self.environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C ends the tests, which then stop the parts in their own order.
                start_new_session=True,
            )

    def exit_status(self) -> int | None:
        """Return the exit status (negative: the signal), or None while it runs."""
        return None if self._running is None else self._running.poll()

    def is_running(self) -> bool:
        """Return whether it was started and has not ended."""
        return self._running is not None and self._running.poll() is None

    def wait_until(self, probe: Callable[[], bool], *, deadline_seconds: float) -> None:
        """Wait until `probe` returns true; an OSError means not yet. Raises PartError."""
        end_seconds = time.monotonic() + deadline_seconds
        while True:
            # Read before the probe: a probe that waits for the end may see it just after.
            has_ended = self.exit_status() is not None
            if _answers(probe):
                return
            if has_ended:
                raise PartError(f"{self.name} ended early: {self._story()}")
            if time.monotonic() > end_seconds:
                raise PartError(
                    f"{self.name} was not ready in {deadline_seconds} s: {self._story()}"
                )
            time.sleep(RECHECK_SECONDS)

    def wait_exit(self, *, deadline_seconds: float) -> int:
        """Wait until it has ended without a signal from here; return its exit status."""
        if self._running is None:
            raise PartError(f"{self.name} was never started")
        return self._running.wait(deadline_seconds)

    def send(self, number: signal.Signals) -> None:
        """Send a signal if it still runs; after SIGSTOP, wait until its threads have stopped."""
        if self._running is not None and self._running.poll() is None:
            self._running.send_signal(number)
            if number == signal.SIGSTOP:
                # Until then, a broker may still answer a request.
                os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def stop(self, *, deadline_seconds: float = STOP_SECONDS) -> int | None:
        """Send SIGTERM, kill it if it does not end in time, and return its exit status."""
        if self._running is None:
            return None
        self.send(signal.SIGTERM)
        try:
            return self._running.wait(deadline_seconds)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int | None:
        """Kill it, like a power cut, and return its exit status."""
        if self._running is None:
            return None
        self.send(signal.SIGKILL)
        return self._running.wait()

    def log_tail(self) -> str:
        """Return the end of the log."""
        if not self.log.exists():
            return ""
        return self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")

    def _story(self) -> str:
        return f"status {self.exit_status()}, {self.log}\n{self.log_tail()}"


def _answers(probe: Callable[[], bool]) -> bool:
    try:
        return probe()
    except OSError:
        return False


class Part(ABC):
    """A server of one process: started until ready, stopped, killed and restarted."""

    name: str
    ready_seconds: float = 120.0

    def __init__(self, *, folder: Path) -> None:
        self.folder = folder
        self._process: Process | None = None

    @abstractmethod
    def argv(self) -> list[str | Path]:
        """Return the command line."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Return whether it serves; raises OSError if it does not answer at all."""

    @property
    def process(self) -> Process:
        """The process that runs or ran."""
        if self._process is None:
            self._process = Process(name=self.name, argv=self.argv(), folder=self.folder)
        return self._process

    @property
    def log(self) -> Path:
        """The file with all its output."""
        return self.process.log

    def start(self) -> None:
        """Start or restart it on the same ports and data, and wait until it serves."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.process.start()
        try:
            self.process.wait_until(self.is_ready, deadline_seconds=self.ready_seconds)
        except PartError:
            self.process.kill()
            raise

    def stop(self) -> int | None:
        """End it with SIGTERM, then SIGKILL; return the exit status."""
        return self.process.stop()

    def kill(self) -> int | None:
        """End it with SIGKILL; return the exit status."""
        return self.process.kill()

    def discard(self) -> None:
        """End it and delete its data; the log stays, to examine failures."""
        self.kill()
        shutil.rmtree(self.folder / "data", ignore_errors=True)

    def log_tail(self) -> str:
        """Return the end of its log."""
        return self.process.log_tail()
