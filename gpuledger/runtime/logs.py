"""Logs to standard error: one JSON object a line, those of libraries included.

Here lives the set-up. What is worth a line is the caller's business: one a batch, none a record.
"""

import logging
import sys
from datetime import UTC, datetime
from typing import Any, Final

import orjson
import structlog
from structlog.types import EventDict, Processor

from gpuledger.settings.groups import LogSettings
from gpuledger.settings.secret import mask_addresses

_FIRST_KEYS: Final = ("timestamp", "level", "logger", "event")


def _add_timestamp(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Add the time, in UTC: milliseconds, as nobody compares lines more closely than that."""
    time = datetime.now(tz=UTC).isoformat(timespec="milliseconds")
    event["timestamp"] = time.replace("+00:00", "Z")
    return event


def _order_keys(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Return the event with the keys first that every line has, in the same order everywhere."""
    return {**{key: event.pop(key) for key in _FIRST_KEYS if key in event}, **event}


_SHARED: Final[list[Processor]] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_logger_name,
    structlog.stdlib.add_log_level,
    _add_timestamp,
    _order_keys,
]
# Of libraries, what whoever wrote to a connection is told anyway, as an exception.
_SAID_OTHERWISE: Final = frozenset({"socket.send() raised exception."})


class _Handler(logging.StreamHandler[Any]):
    """Our own handler, so that a second set-up replaces it and no other."""


def configure_logs(settings: LogSettings) -> None:
    """Send the logs of structlog and of all libraries to standard error."""
    level = getattr(logging, settings.level.upper())
    handler = _Handler(sys.stderr)
    handler.setFormatter(_formatter(settings))
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
    """Let everything of our own pass (structlog hands over a dict), of libraries only warnings."""
    if isinstance(record.msg, dict):
        return True
    return record.levelno >= logging.WARNING and record.msg not in _SAID_OTHERWISE


def _formatter(settings: LogSettings) -> logging.Formatter:
    remove_meta = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    rendering: list[Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(_to_json)]
        if settings.format == "json"
        else [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    )
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=_SHARED, processors=[remove_meta, *rendering, _mask]
    )


def _mask(_logger: object, _method: str, line: Any) -> str:  # noqa: ANN401  # structlog's own form
    """Mask the passwords in addresses, wherever they stand: in a traceback, in a library's line."""
    return mask_addresses(line)


def _to_json(event: dict[str, Any], **_: Any) -> str:  # noqa: ANN401  # structlog's own options
    # What JSON has no form for is written as its text, which is a mask where it is a secret.
    return orjson.dumps(event, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
