"""Starts parts for tests, and ends them with the tests that started them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Startable(Protocol):
    """A part that can be started, and ended with its data deleted."""

    def start(self) -> None:
        """Start it and wait until it serves."""

    def discard(self) -> None:
        """Kill it and delete its data."""


StartableT = TypeVar("StartableT", bound=Startable)


@contextmanager
def running(part: StartableT) -> Iterator[StartableT]:
    """Run a part for as long as the block lasts."""
    try:
        part.start()
        yield part
    finally:
        part.discard()


class Starter:
    """Starts parts for one test, each in its own folder, and ends them with the test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[Startable] = []

    def new_folder(self, name: str) -> Path:
        """Return the folder for the next part."""
        return self._folder / f"{name}-{len(self._started)}"

    def start(self, part: StartableT) -> StartableT:
        """Start a part that `end` will end."""
        self._started.append(part)
        part.start()
        return part

    def end(self) -> None:
        """End all, the newest first."""
        for part in reversed(self._started):
            part.discard()
