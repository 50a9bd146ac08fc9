"""What a client of the health pages asks for, and what it is answered."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
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
