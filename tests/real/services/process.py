"""One outside process with a folder and a log of its own, started, waited for and stopped.

Nothing here knows what the process is; the parts beside this file do.
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
    """A part ended, or was not ready in time; the message holds the end of its log."""


class Process:
    """A program running with its output in `<folder>/<name>.log`."""

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
        """The process id; raises PartError when it was never started."""
        if self._running is None:
            raise PartError(f"{self.name} was not started")
        return self._running.pid

    def start(self) -> None:
        """Start the program; its log is continued."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._running = subprocess.Popen(
                self.argv,
                cwd=self.folder,
                env={**os.environ, **(self.environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A Ctrl-C is for the tests, which then stop the parts in their own order.
                start_new_session=True,
            )

    def exit_status(self) -> int | None:
        """Return the exit status (negative: the signal), or None while it runs."""
        return None if self._running is None else self._running.poll()

    def is_running(self) -> bool:
        """Return whether it was started and has not ended."""
        return self._running is not None and self._running.poll() is None

    def wait_until(self, probe: Callable[[], bool], *, deadline_seconds: float) -> None:
        """Wait until `probe` says yes; an OSError of it means not yet. Raises PartError."""
        end_seconds = time.monotonic() + deadline_seconds
        while True:
            # Asked before the probe: one that waits for the end itself may see it just after.
            has_ended = self.exit_status() is not None
            if _answers(probe):
                return
            if has_ended:
                raise PartError(f"{self.name} ended by itself: {self._story()}")
            if time.monotonic() > end_seconds:
                raise PartError(
                    f"{self.name} was not ready in {deadline_seconds} s: {self._story()}"
                )
            time.sleep(RECHECK_SECONDS)

    def wait_exit(self, *, deadline_seconds: float) -> int:
        """Wait until it has ended by itself; return its exit status."""
        if self._running is None:
            raise PartError(f"{self.name} was never started")
        return self._running.wait(deadline_seconds)

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self._running is not None and self._running.poll() is None:
            self._running.send_signal(number)

    def stop(self, *, deadline_seconds: float = STOP_SECONDS) -> int | None:
        """Ask it to end, kill it when it does not in time, and return its exit status."""
        if self._running is None:
            return None
        self.send(signal.SIGTERM)
        try:
            return self._running.wait(deadline_seconds)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int | None:
        """End it at once, as a power cut would, and return its exit status."""
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
    """A server of one process: started until ready, stopped, killed and started again."""

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
        """Return whether it serves; raises OSError while it does not even answer."""

    @property
    def process(self) -> Process:
        """The process that is or was running."""
        if self._process is None:
            self._process = Process(name=self.name, argv=self.argv(), folder=self.folder)
        return self._process

    @property
    def log(self) -> Path:
        """The file with everything it printed."""
        return self.process.log

    def start(self) -> None:
        """Start it, or start it again on the same ports and data, and wait until it serves."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.process.start()
        try:
            self.process.wait_until(self.is_ready, deadline_seconds=self.ready_seconds)
        except PartError:
            self.process.kill()
            raise

    def stop(self) -> int | None:
        """End it with SIGTERM, then SIGKILL; gives the exit status."""
        return self.process.stop()

    def kill(self) -> int | None:
        """End it with SIGKILL; gives the exit status."""
        return self.process.kill()

    def discard(self) -> None:
        """End it and drop its data; the log stays for whoever looks into a failure."""
        self.kill()
        shutil.rmtree(self.folder / "data", ignore_errors=True)

    def log_tail(self) -> str:
        """Return the end of its log."""
        return self.process.log_tail()
