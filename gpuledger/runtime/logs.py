"""Sets up logs to standard error: one JSON object per line, also for libraries.

Callers decide what to log: at most one line per batch, none per record.
"""

import logging
import math
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, cast

import orjson
import structlog
from structlog.types import EventDict, Processor

from gpuledger.settings.groups import LogSettings
from gpuledger.settings.secret import mask_addresses

_FIRST_KEYS: Final = ("timestamp", "level", "logger", "event")


def _begin_line(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Return the event with its time in UTC, in milliseconds, and with the common keys first."""
    now = datetime.now(tz=UTC).isoformat(timespec="milliseconds")
    event["timestamp"] = now.replace("+00:00", "Z")
    return {**{key: event.pop(key) for key in _FIRST_KEYS if key in event}, **event}


_SHARED: Final[list[Processor]] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_logger_name,
    structlog.stdlib.add_log_level,
    _begin_line,
]
# Messages of libraries about errors that their caller also receives as an exception.
_LOGGED_OTHERWISE: Final = frozenset({"socket.send() raised exception."})


class _Handler(logging.StreamHandler[Any]):
    """A separate class, so that a second call of `configure_logs` replaces only this handler."""


def configure_logs(settings: LogSettings) -> None:
    """Send the logs of structlog and all libraries to standard error."""
    level = getattr(logging, settings.level.upper())
    handler = _Handler(sys.stderr)
    rendering: list[Processor] = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    if settings.format == "json":
        to_json = structlog.processors.JSONRenderer(_to_json)
        rendering = [structlog.processors.format_exc_info, to_json]
    remove_meta = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=_SHARED,
        processors=[
            remove_meta,
            *rendering,
            # Must be last, because a traceback or a library's message may also contain a password.
            lambda _logger, _method, line: mask_addresses(cast("str", line)),
        ],
    )
    handler.setFormatter(formatter)
    if settings.level != "debug":
        handler.addFilter(_is_worth_a_line)
    root = logging.getLogger()
    root.handlers = [*(old for old in root.handlers if not isinstance(old, _Handler)), handler]
    root.setLevel(level)
    logging.captureWarnings(capture=True)
    structlog.configure(
        processors=[*_SHARED, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
    )


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Return whether to write a line: one of gpuledger, with a dict as message, or a warning."""
    if isinstance(record.msg, dict):
        return True
    return record.levelno >= logging.WARNING and record.msg not in _LOGGED_OTHERWISE


def _to_json(event: dict[str, Any], **_: Any) -> str:  # noqa: ANN401  # structlog's own options
    # Values without a JSON form are written as text; the text of a secret is a mask.
    return orjson.dumps(event, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


_QUIET_SECONDS: Final = 60.0
_MAX_KEYS: Final = 1000


class _Line(NamedTuple):
    """When a key's line was last written, and how many lines were left out since then."""

    written_seconds: float
    left_out: int


class Repeats:
    """Limits log lines to one a minute per key, and counts the lines that are left out.

    Keys may come from outside, such as node names. At most 1,000 keys have their own lines within a
    minute. All other keys share one line, so that invented names cannot flood the log.
    """

    def __init__(
        self,
        *,
        quiet_seconds: float = _QUIET_SECONDS,
        seconds: Callable[[], float] | None = None,
    ) -> None:
        self._quiet_seconds = quiet_seconds
        self._seconds = seconds or time.monotonic
        self._lines: OrderedDict[Hashable, _Line] = OrderedDict()
        """The keys that have their own lines, ordered by the time of the last line."""
        self._others = _Line(-math.inf, 0)

    def count(self, key: Hashable, *, more: int = 1) -> int:
        """Count `more` lines with this key; return 0 if no line may be written now.

        Otherwise, the caller writes one line. The result is the number of lines that it stands for:
        itself, and those that were left out since the last line.
        """
        now_seconds = self._seconds()
        if key not in self._lines and len(self._lines) >= _MAX_KEYS:
            # The oldest key can be dropped if its last line is more than a minute ago.
            eldest, line = next(iter(self._lines.items()))
            if now_seconds - line.written_seconds < self._quiet_seconds:
                self._others, count = self._next(self._others, now_seconds, more=more)
                return count
            del self._lines[eldest]
            left_out = self._others.left_out + line.left_out
            self._others = self._others._replace(left_out=left_out)
        line = self._lines.get(key, _Line(-math.inf, 0))
        self._lines[key], count = self._next(line, now_seconds, more=more)
        if count:
            self._lines.move_to_end(key)
        return count

    def _next(self, line: _Line, now_seconds: float, *, more: int) -> tuple[_Line, int]:
        """Return the line's next state and the result of `count`."""
        if now_seconds - line.written_seconds < self._quiet_seconds:
            return _Line(line.written_seconds, line.left_out + more), 0
        return _Line(now_seconds, 0), line.left_out + more
