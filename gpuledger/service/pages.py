"""Pages over HTTP/1.1: GET and HEAD, a few at a time, nothing to be sent to it.

Here lives what a scrape and a probe need of HTTP, and the bounds that keep a bad client from
costing more: of time, of bytes, of connections. A web framework would do as well, but takes more
memory than everything else of an agent that runs on every node.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

import structlog

from gpuledger.tasks import end_tasks

_log = structlog.get_logger(__name__)
_HEAD_BYTES: Final = 16_384
_REQUEST_SECONDS: Final = 10.0
# Longer than scrapes are apart, so that a scraper keeps its connection.
_IDLE_SECONDS: Final = 75.0
_ANSWER_SECONDS: Final = 30.0
_MOST_CONNECTIONS: Final = 100
_END: Final = b"\r\n\r\n"
_TEXT: Final = "text/plain; charset=utf-8"


@dataclass(frozen=True, kw_only=True)
class Request:
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


Handler = Callable[[Request], Awaitable[Response]]


class BadRequestError(Exception):
    """The client is told this status, and the connection is closed."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


@asynccontextmanager
async def serve_pages(
    handler: Handler, *, host: str, port: int, context: ssl.SSLContext | None
) -> AsyncIterator[tuple[str, int]]:
    """Serve while the context is open; gives the bound host and port.

    Raises OSError where the address cannot be listened on.
    """
    connections = _Connections(handler)
    timeout = _REQUEST_SECONDS if context else None
    server = await asyncio.start_server(
        connections.serve,
        host,
        port,
        limit=_HEAD_BYTES,
        ssl=context,
        ssl_handshake_timeout=timeout,
    )
    try:
        host, port = server.sockets[0].getsockname()[:2]
        yield host, port
    finally:
        server.close()
        await connections.end()


class _Connections:
    """The open connections, each a task."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._is_ending = False
        self._tasks: set[asyncio.Task[Any]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request after the other until either side ends."""
        task = asyncio.current_task()
        if task is None or len(self._tasks) >= _MOST_CONNECTIONS:
            writer.close()
            return
        self._tasks.add(task)
        try:
            await self._answer_all(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, ssl.SSLError):
            pass  # the client is gone, or too slow to wait for
        except asyncio.CancelledError:
            # asyncio reports a connection's task that was cancelled as an error, with a traceback.
            if not self._is_ending:
                raise
        finally:
            self._tasks.discard(task)
            writer.close()

    async def end(self) -> None:
        """End all of them now."""
        self._is_ending = True
        await end_tasks(*self._tasks)

    async def _answer_all(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wait_seconds, stays = _REQUEST_SECONDS, True
        while stays:
            try:
                request, stays = await _read(reader, writer, wait_seconds)
                response = await self._answer(request)
            except BadRequestError as error:
                request, stays, response = _NOTHING, False, _refuse(error.status)
            writer.write(_head(response, stays=stays))
            if request.method != "HEAD":
                writer.write(response.body)
            async with asyncio.timeout(_ANSWER_SECONDS):
                await writer.drain()
            wait_seconds = _IDLE_SECONDS

    async def _answer(self, request: Request) -> Response:
        try:
            return await self._handler(request)
        except Exception:  # noqa: BLE001  # a page's mistake is the page's alone
            _log.exception("page_failed", path=request.path)
            return _refuse(HTTPStatus.INTERNAL_SERVER_ERROR)


_NOTHING: Final = Request(method="GET", path="/", headers={})


async def _read(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wait_seconds: float
) -> tuple[Request, bool]:
    """Read a request; tells whether the connection stays. Raises BadRequestError."""
    try:
        async with asyncio.timeout(wait_seconds):
            first = await reader.readexactly(1)
        async with asyncio.timeout(_REQUEST_SECONDS):
            head = first + await reader.readuntil(_END)
    except asyncio.LimitOverrunError as error:
        raise BadRequestError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE) from error
    certificate: Any = writer.get_extra_info("peercert") or {}
    return parse_request(head, certificate=certificate)


def parse_request(head: bytes, *, certificate: Mapping[str, Any]) -> tuple[Request, bool]:
    """Take a request's head apart; tells whether the connection stays.

    Raises BadRequestError for what no scraper and no probe sends.
    """
    first, *lines = head.removesuffix(_END).decode("latin-1").split("\r\n")
    parts = first.split(" ")
    if len(parts) != 3 or not parts[1].startswith("/"):  # noqa: PLR2004  # METHOD TARGET VERSION
        raise BadRequestError(HTTPStatus.BAD_REQUEST)
    method, target, version = parts
    if version not in ("HTTP/1.1", "HTTP/1.0"):
        raise BadRequestError(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED)
    if method not in ("GET", "HEAD"):
        raise BadRequestError(HTTPStatus.METHOD_NOT_ALLOWED)
    headers = _parse_headers(lines)
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        raise BadRequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    wish = headers.get("connection", "").lower()
    stays = wish == "keep-alive" if version == "HTTP/1.0" else wish != "close"
    path = target.partition("?")[0]
    return Request(method=method, path=path, headers=headers, certificate=certificate), stays


def _parse_headers(lines: list[str]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise BadRequestError(HTTPStatus.BAD_REQUEST)
        headers.setdefault(name.lower(), value.strip())
    return headers


def _refuse(status: HTTPStatus) -> Response:
    allowed = {"Allow": "GET, HEAD"} if status == HTTPStatus.METHOD_NOT_ALLOWED else {}
    return Response(status=status, body=f"{status.phrase}\n".encode(), headers=allowed)


def _head(response: Response, *, stays: bool) -> bytes:
    phrase = HTTPStatus(response.status).phrase
    lines = {
        "Content-Type": response.content_type,
        "Content-Length": str(len(response.body)),
        "Connection": "keep-alive" if stays else "close",
        **response.headers,
    }
    written = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.1 {response.status} {phrase}\r\n{written}\r\n".encode("latin-1")
