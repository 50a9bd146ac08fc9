"""Puts lines on the terminal: a live screen of its own, or plain lines where there is no terminal.

What the lines say is decided elsewhere. The live screen is the terminal's second one: whatever its
size becomes, each frame replaces the whole of it, and nothing of it is left behind at the end.
"""

import asyncio
import io
import logging
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text
from typing_extensions import override

from cli.demo.screen import ScreenLine
from gpuledger.runtime.tasks import end_tasks

WIDTH_IN_FILES: Final = 160
_REDRAW_SECONDS: Final = 0.25
_MAX_LOG_LINES: Final = 100

Draw = Callable[[int, int, float], Sequence[ScreenLine]]
"""Returns the lines of a frame for a width, a height and the seconds since the first one."""


def can_be_live(console: Console) -> bool:
    """Return whether frames can replace each other there."""
    return console.is_terminal and not console.is_dumb_terminal


def width_of(console: Console) -> int:
    """Return how wide lines may be: as wide as the terminal, or as a file bears."""
    return console.width if console.is_terminal else WIDTH_IN_FILES


def show(console: Console, lines: Sequence[ScreenLine]) -> None:
    """Print lines, each of them whole."""
    for text, style in lines:
        console.print(Text(text, style=style), soft_wrap=True)


@asynccontextmanager
async def live(console: Console, draw: Draw, *, stop: asyncio.Event) -> AsyncIterator[None]:
    """Show frames while the context is open; one that cannot be drawn sets `stop`, and raises."""
    with logs_held_back(), Live(console=console, auto_refresh=False, screen=True) as screen:
        task = asyncio.create_task(_redraw(screen, console, draw))
        task.add_done_callback(lambda _: stop.set())
        try:
            yield
        finally:
            await end_tasks(task)
            if not task.cancelled():
                task.result()


async def _redraw(screen: Live, console: Console, draw: Draw) -> None:
    began_seconds = time.monotonic()
    while True:
        lines = draw(console.width, console.height, time.monotonic() - began_seconds)
        texts = (Text(text, style=style, no_wrap=True, overflow="crop") for text, style in lines)
        screen.update(Group(*texts), refresh=True)
        await asyncio.sleep(_REDRAW_SECONDS)


@contextmanager
def logs_held_back() -> Iterator[None]:
    """Keep log lines off the screen while the context is open, and write the last ones after it."""
    held = _LastLines()
    handlers = [
        handler
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.StreamHandler)
    ]
    streams = [handler.setStream(held) for handler in handlers]
    try:
        yield
    finally:
        for handler, stream in zip(handlers, streams, strict=True):
            if stream is not None:
                handler.setStream(stream)
        sys.stderr.write("".join(held.lines))


def leave_out_of_logs(event: str) -> None:
    """Keep the log lines of an event away: it is shown otherwise."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(
            lambda record: not (isinstance(record.msg, dict) and record.msg.get("event") == event)
        )


class _LastLines(io.TextIOBase):
    """Keeps what was written last."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=_MAX_LOG_LINES)

    @override
    def write(self, text: str) -> int:
        self.lines.append(text)
        return len(text)
