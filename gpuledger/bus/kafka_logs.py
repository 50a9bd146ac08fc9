"""What aiokafka may say: its retries are debug lines, refused connections are remembered.

aiokafka keeps the reason of a failed connection to its log; here it is taken from there, so that
our own error can name it.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

LIBRARY: Final = "aiokafka"
TOLD: Final = (
    # Raised by a callback of ours, and seen by nobody else.
    "User provided subscription listener %s for group %s failed on_partitions_revoked",
    "User provided listener %s for group %s failed on partition assignment: %s",
    # For people who set it up; aiokafka says it for each connection.
    "Sending username and password in the clear",
)
"""What stays a warning or an error. All else is a retry of aiokafka's, or comes back to the caller
as an exception and so to a check: it is of use to who looks for a mistake in the client."""
REFUSED: Final = ('Unable connect to "%s:%s": %s', 'Unable to request metadata from "%s:%s": %s')
QUIET_SECONDS: Final = 3600.0
"""How long a line that stays is not written again."""

_refusals: ContextVar[list[str] | None] = ContextVar("refusals", default=None)


@contextmanager
def remembered_refusals() -> Iterator[list[str]]:
    """Collect why brokers refused a connection, instead of logging it."""
    refusals: list[str] = []
    token = _refusals.set(refusals)
    try:
        yield refusals
    finally:
        _refusals.reset(token)


class Demotion:
    """Makes a debug line of what is no news: a filter for the loggers of aiokafka."""

    def __init__(self, *, seconds: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._said_at: dict[str, float] = {}

    def __call__(self, record: logging.LogRecord) -> bool:
        """Say whether a line passes; it may have become a debug line."""
        if record.levelno < logging.WARNING:
            return True
        if _is_remembered(record):
            return False
        if not self._is_news(record.msg):
            record.levelno, record.levelname = logging.DEBUG, logging.getLevelName(logging.DEBUG)
        return True

    def _is_news(self, template: str) -> bool:
        now_seconds = self._seconds()
        said_at_seconds = self._said_at.get(template, -math.inf)
        if template not in TOLD or now_seconds - said_at_seconds < QUIET_SECONDS:
            return False
        self._said_at[template] = now_seconds
        return True


_demotion: Final = Demotion()


def demote_logs() -> None:
    """Install the filter on every logger of aiokafka; again is as good as once."""
    for name in (LIBRARY, *logging.root.manager.loggerDict):
        if name.partition(".")[0] == LIBRARY:
            logging.getLogger(name).addFilter(_demotion)


def _is_remembered(record: logging.LogRecord) -> bool:
    refusals = _refusals.get()
    if refusals is None or record.msg not in REFUSED:
        return False
    host, port, reason = record.args if isinstance(record.args, tuple) else ("", "", "")
    refusals.append(f"{host}:{port}: {str(reason) or type(reason).__name__}")
    return True
