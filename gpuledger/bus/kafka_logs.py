"""What aiokafka may say: its retries are debug lines, refused connections are remembered.

aiokafka keeps the reason of a failed connection to its log; here it is taken from there, so that
our own error can name it: also where a background task of a client connects, whose caller is only
told that nobody answered.
"""

import logging
import math
import time
from collections import OrderedDict
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
REFUSED: Final = {
    'Unable connect to "%s:%s": %s': "%s:%s",
    'Unable to request metadata from "%s:%s": %s': "%s:%s",
    "Unable connect to node with id %s: %s": "node %s",
    "Unable to request metadata from node with id %s: %r": "node %s",
}
"""Lines whose last value is why a connection failed, and how those before name the broker."""
MAX_BROKERS: Final = 16
"""Of so many brokers the reason is remembered."""
QUIET_SECONDS: Final = 3600.0
"""How long a line that stays is not written again."""


class RefusedConnections:
    """Why each broker refused its last connection that failed, and when that was."""

    def __init__(
        self,
        *,
        seconds: Callable[[], float] = time.monotonic,
        mask: Callable[[str], str] = str,
    ) -> None:
        """Take what becomes of the brokers' words, which may quote a password."""
        self._seconds, self.mask = seconds, mask
        self._reasons: OrderedDict[str, tuple[float, str]] = OrderedDict()

    def note(self, broker: str, reason: str) -> None:
        """Record a connection that failed now."""
        self._reasons.pop(broker, None)
        self._reasons[broker] = (self._seconds(), self.mask(reason))
        if len(self._reasons) > MAX_BROKERS:
            self._reasons.popitem(last=False)

    def of_last(self, seconds: float) -> list[str]:
        """Return the brokers, each with its reason, that refused within so many seconds."""
        since_seconds = self._seconds() - seconds
        return [
            f"{broker}: {reason}"
            for broker, (at_seconds, reason) in self._reasons.items()
            if at_seconds >= since_seconds
        ]


_refusals: ContextVar[RefusedConnections | None] = ContextVar("refusals", default=None)


@contextmanager
def remembering(refusals: RefusedConnections) -> Iterator[None]:
    """Collect why brokers refuse connections, instead of logging it.

    What a client begins meanwhile, as a task that goes on connecting, collects there from then on.
    """
    token = _refusals.set(refusals)
    try:
        yield
    finally:
        _refusals.reset(token)


class Demotion:
    """Makes a debug line of what is no news: a filter for the loggers of aiokafka."""

    def __init__(self, *, seconds: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._said_at: dict[str, float] = {}

    def __call__(self, record: logging.LogRecord) -> bool:
        """Return whether a line passes; it may have become a debug line."""
        if record.levelno >= logging.WARNING:
            if _is_remembered(record):
                return False
            if not self._is_news(record.msg):
                record.levelno = logging.DEBUG
                record.levelname = logging.getLevelName(logging.DEBUG)
        _mask(record)
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
    refusals, name = _refusals.get(), REFUSED.get(record.msg)
    if refusals is None or name is None or not isinstance(record.args, tuple):
        return False
    *broker, error = record.args
    refusals.note(name % tuple(broker), _reason_of(error))
    return True


def _mask(record: logging.LogRecord) -> None:
    """Mask the password in a line that is written of a connection, whatever the line is."""
    refusals = _refusals.get()
    if refusals:
        record.msg, record.args = refusals.mask(record.getMessage()), None


def _reason_of(error: object) -> str:
    """Return what an error says, and what is behind it: of a lost connection that is the reason."""
    said = str(error) or type(error).__name__
    cause = getattr(error, "__cause__", None)
    return f"{said}: {cause}" if cause and str(cause) else said
