"""What aiokafka may say: harmless lines are dropped, repeated ones thinned, refusals remembered.

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

LOGGERS: Final = (
    "aiokafka",
    "aiokafka.cluster",
    "aiokafka.conn",
    "aiokafka.consumer.fetcher",
    "aiokafka.consumer.group_coordinator",
    "aiokafka.producer.sender",
)
HARMLESS: Final = (
    # Said in every rebalance, which this is.
    "Heartbeat failed for group %s because it is rebalancing",
    # Raised by us as TopicsError; aiokafka says it ten times a second.
    "Topic %s not found in cluster metadata",
)
REFUSED: Final = ('Unable connect to "%s:%s": %s', 'Unable to request metadata from "%s:%s": %s')
QUIET_SECONDS: Final = 10.0
"""How long a line is not said again: while a broker is away, some come ten times a second."""

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


class Thinning:
    """Drops what is harmless, and what was said a moment ago: a filter for a logger."""

    def __init__(self, *, seconds: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._said_at: dict[str, float] = {}

    def __call__(self, record: logging.LogRecord) -> bool:
        """Say whether a line passes."""
        if record.levelno < logging.WARNING:
            return True
        if record.msg in HARMLESS or _is_remembered(record):
            return False
        now = self._seconds()
        if now - self._said_at.get(record.msg, -math.inf) < QUIET_SECONDS:
            return False
        # Keyed by the template, of which aiokafka has some dozens, so this stays small.
        self._said_at[record.msg] = now
        return True


_thinning: Final = Thinning()


def thin_logs() -> None:
    """Install the filter; again is as good as once."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_thinning)


def _is_remembered(record: logging.LogRecord) -> bool:
    refusals = _refusals.get()
    if refusals is None or record.msg not in REFUSED:
        return False
    host, port, reason = record.args if isinstance(record.args, tuple) else ("", "", "")
    refusals.append(f"{host}:{port}: {str(reason) or type(reason).__name__}")
    return True
