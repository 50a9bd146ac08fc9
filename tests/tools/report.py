"""What a run says while it works: a line as each step starts, signs of life, the seconds in all."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

LOUD = "!!!"
SIGN_OF_LIFE_SECONDS = 30.0


def print_line(line: str) -> None:
    """Print a line at once, so that a log shows where a long build stands."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@contextmanager
def step(name: str, version: str, text: str) -> Iterator[None]:
    """Yield what is being done for a part, that it goes on, and how long it took."""
    heading = f"{name} {version}: {text}"
    started_seconds = time.monotonic()
    print_line(f"{heading} ...")
    ended = threading.Event()
    watcher = threading.Thread(
        target=_report_still_running, args=(heading, started_seconds, ended), daemon=True
    )
    watcher.start()
    try:
        yield
    finally:
        ended.set()
    print_line(f"{heading} - done in {time.monotonic() - started_seconds:.1f} s")


def _report_still_running(heading: str, started_seconds: float, ended: threading.Event) -> None:
    while not ended.wait(SIGN_OF_LIFE_SECONDS):
        print_line(f"{heading} ... {time.monotonic() - started_seconds:.0f} s")
