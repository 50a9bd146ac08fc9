"""The parts of ASGI that the health pages need: types, request headers, responses."""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Final

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]
_TEXT: Final = "text/plain; charset=utf-8"
_NONE: Final[Mapping[str, str]] = MappingProxyType({})


def header(scope: Scope, name: str) -> str:
    """Return the first header with this lower-case name; empty if the request lacks it."""
    wanted = name.encode()
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == wanted), "")


async def respond(
    send: Send,
    body: bytes,
    *,
    status: int = HTTPStatus.OK,
    content_type: str = _TEXT,
    headers: Mapping[str, str] = _NONE,
) -> None:
    """Send a complete response."""
    lines = {"content-type": content_type, "content-length": str(len(body)), **headers}
    encoded = [(name.encode(), value.encode()) for name, value in lines.items()]
    await send({"type": "http.response.start", "status": int(status), "headers": encoded})
    await send({"type": "http.response.body", "body": body})


async def refuse(send: Send, status: HTTPStatus, **headers: str) -> None:
    """Send a response with this status, the status phrase as the body, and further headers."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    await respond(send, f"{status.phrase}\n".encode(), status=status, headers=named)
