"""What a client of the health pages asks for, and what it is answered."""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any, Final

_TEXT: Final = "text/plain; charset=utf-8"


@dataclass(frozen=True, kw_only=True)
class HttpRequest:
    """What a client asks for."""

    method: str
    """GET or HEAD."""
    path: str
    """The page, without what follows a question mark."""
    headers: Mapping[str, str]
    """Its headers, their names in small letters; of two of one name the first."""
    certificate: Mapping[str, Any] = field(default_factory=dict)
    """The client's certificate; empty where it has shown none."""


@dataclass(frozen=True, kw_only=True)
class Response:
    """What it is answered."""

    body: bytes
    """The page."""
    status: int = 200
    """HTTP's code."""
    content_type: str = _TEXT
    """What the page is."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Further headers."""


Handler = Callable[[HttpRequest], Awaitable[Response]]


class BadRequestError(Exception):
    """The client is told this status, and the connection is closed."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


def refusal(status: HTTPStatus, **headers: str) -> Response:
    """Return the answer to what is not done."""
    return Response(status=status, body=f"{status.phrase}\n".encode(), headers=headers)


# What others say, made fit to be shown to people. Pure.

MAX_CHARACTERS: Final = 2000
"""How much of it is shown."""


def readable(text: bytes | str, *, max_characters: int = MAX_CHARACTERS) -> str:
    """Return the begin of what a server sent such that logs, JSON and terminals can take it.

    Bytes are read as UTF-8; what is none, or no character to be printed, is replaced.
    """
    encoded = text if isinstance(text, bytes) else text.encode(errors="replace")
    # A character takes up to four bytes.
    shown = encoded[: 4 * max_characters].decode(errors="replace").strip()[:max_characters]
    return "".join(one if one.isprintable() or one in "\n\t" else "\ufffd" for one in shown)


# `Retry-After`: how long a server asks to be left alone. Pure.

MAX_SECONDS: Final = 600.0
"""The longest wait that is granted: a server that is back must not go unnoticed for hours."""
# What the standard library raises of dates that are none, are in no calendar or in no time zone.
_NO_DATE: Final = (ValueError, TypeError, OverflowError, IndexError)


def retry_after_seconds(header: str, *, now: datetime) -> float:
    """Return the seconds to wait, of 0 to `MAX_SECONDS`, from a header in seconds or as a date.

    It is 0 where the header says nothing that can be read, or a time that has passed.
    """
    seconds = 0.0
    try:
        seconds = float(header)
    except ValueError:
        with suppress(*_NO_DATE):
            seconds = (parsedate_to_datetime(header) - now).total_seconds()
    return min(seconds, MAX_SECONDS) if seconds > 0 else 0.0  # not a number is not above 0 either
