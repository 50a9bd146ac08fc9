r"""Requests out of bytes and bytes out of answers, by h11. Pure: no sockets, no waiting.

h11 reads what RFC 9112 allows a server to be lenient about. Where two programs in a row are lenient
in different ways, the one behind finds a request that the one before has not seen; so all of that
is refused here: line ends that are a bare `\n`, folded lines, a length that is said twice or beside
a transfer coding. Pages take no bodies, so all that a client sends is heads of requests, and that
is why each byte of it may be held to what a head may look like.
"""

import asyncio
import re
import ssl
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

import h11
from typing_extensions import override

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
    query: str = ""
    """What follows the question mark, as it was sent."""
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
    """The client gets this status, and the connection is closed."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


def refusal(status: HTTPStatus, **headers: str) -> Response:
    """Return the answer to what is not done."""
    return Response(status=status, body=f"{status.phrase}\n".encode(), headers=headers)


MAX_HEAD_BYTES: Final = 16_384
MAX_HEADERS: Final = 64
"""Far more than any scraper or probe sends, proxies between included."""
_METHODS: Final = (b"GET", b"HEAD")
_VERSIONS: Final = (b"1.0", b"1.1")
_END: Final = b"\r\n\r\n"
# A bare \n, a bare \r, a line that begins with a space: a \n is looked at with the byte before it.
_LENIENT: Final = re.compile(rb"[^\r]\n|\r[^\n]|\n[ \t]")
_LENGTH: Final = re.compile(rb"\ncontent-length[ \t]*:", re.IGNORECASE)


class Exchange:
    """One connection's requests and answers, one after the other."""

    def __init__(self) -> None:
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._unread = bytearray()
        self._last = b" "  # no \n may come first
        self._is_refused = False
        self._has_body = True

    def receive(self, data: bytes) -> None:
        """Record what has come; raises BadRequestError where it can be no part of a request."""
        if _LENIENT.search(self._last + data):
            raise self._refuse(HTTPStatus.BAD_REQUEST)
        self._last = data[-1:]
        self._unread += data
        self._h11.receive_data(data)

    def next_request(self, *, certificate: Mapping[str, Any]) -> HttpRequest | None:
        """Return the next whole request, or nothing while more must come. Raises BadRequestError.

        Each request is answered before the next is asked for.
        """
        try:
            event = self._h11.next_event()
        except h11.RemoteProtocolError as error:
            raise self._refuse(HTTPStatus(error.error_status_hint)) from error
        if not isinstance(event, h11.Request):
            return None
        head, _, self._unread = self._unread.partition(_END)
        self._has_body = event.method != b"HEAD"
        if wrong := _find_wrong(event, bytes(head)):
            raise self._refuse(wrong)
        self._h11.next_event()  # its end, as it has no body
        headers: dict[str, str] = {}
        for name, value in event.headers:
            headers.setdefault(name.decode(), value.decode("latin-1"))
        path, _, query = event.target.decode().partition("?")
        return HttpRequest(
            method=event.method.decode(),
            path=path,
            query=query,
            headers=headers,
            certificate=certificate,
        )

    def answer(self, response: Response) -> bytes:
        """Return the bytes that answer the last request, or what was none."""
        status = HTTPStatus(response.status)
        headers = {
            "Content-Type": response.content_type,
            "Content-Length": str(len(response.body)),
            **response.headers,
            **({"Connection": "close"} if self._is_refused else {}),
        }
        parts: list[h11.Event] = [
            h11.Response(
                status_code=status, reason=status.phrase.encode(), headers=list(headers.items())
            ),
            h11.Data(data=response.body if self._has_body else b""),
            h11.EndOfMessage(),
        ]
        return b"".join(self._h11.send(part) or b"" for part in parts)

    def stays(self) -> bool:
        """Return whether a next request may follow the answer, and make ready for it."""
        if self._h11.our_state is not h11.DONE or self._h11.their_state is not h11.DONE:
            return False
        self._h11.start_next_cycle()
        return True

    def _refuse(self, status: HTTPStatus) -> BadRequestError:
        self._is_refused = True
        return BadRequestError(status)


def _find_wrong(event: h11.Request, head: bytes) -> HTTPStatus | None:
    """Return why a request is refused that h11 accepts; nothing where it is a page's."""
    names = {name for name, _ in event.headers}
    length = dict(event.headers).get(b"content-length", b"0")
    has_coding = b"transfer-encoding" in names
    # h11 makes one of several lengths that are equal, and passes a length over beside a coding.
    is_ambiguous = len(_LENGTH.findall(head)) > 1 or (has_coding and b"content-length" in names)
    if is_ambiguous or len(event.headers) > MAX_HEADERS or not event.target.startswith(b"/"):
        return HTTPStatus.BAD_REQUEST
    if len(head) > MAX_HEAD_BYTES:  # which h11 holds against those alone that have no end yet
        return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
    if event.http_version not in _VERSIONS:
        return HTTPStatus.HTTP_VERSION_NOT_SUPPORTED
    if event.method not in _METHODS:
        return HTTPStatus.METHOD_NOT_ALLOWED
    return HTTPStatus.REQUEST_ENTITY_TOO_LARGE if has_coding or length.strip(b"0") else None


READ_BYTES: Final = 16_384
_PIECE_BYTES: Final = 65_536


class Channel:
    """A connection in the clear; how long to wait for its bytes is the caller's."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        # Written is what the client's machine has taken: nothing waits here for one that does not.
        writer.transport.set_write_buffer_limits(high=0)

    @property
    def certificate(self) -> Mapping[str, Any]:
        """The client's certificate; empty where it has shown none."""
        return {}

    async def open(self) -> None:
        """Agree with the client on what is spoken. Raises OSError."""

    async def read(self) -> bytes:
        """Return what has come; nothing where the client has ended. Raises OSError."""
        return await self._reader.read(READ_BYTES)

    async def write(self, data: bytes) -> None:
        """Send, and wait until all of it is taken. Raises OSError."""
        self._writer.write(data)
        await self._writer.drain()

    def close(self) -> None:
        """End the connection, without waiting for a client that does not take what was sent."""
        transport = self._writer.transport
        transport.close()
        if transport.get_write_buffer_size():
            transport.abort()

    def abort(self) -> None:
        """End the connection at once: who reads finds its end, who writes an OSError."""
        self._writer.transport.abort()


class TlsChannel(Channel):
    """A connection within TLS, as its server.

    TLS runs between two buffers in memory and not in asyncio's transport: that sets 256 KiB aside
    for each connection before its client has said a word, ten times of what OpenSSL itself needs.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, context: ssl.SSLContext
    ) -> None:
        super().__init__(reader, writer)
        self._context = context
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls: ssl.SSLObject | None = None

    @property
    @override
    def certificate(self) -> Mapping[str, Any]:
        return (self._tls and self._tls.getpeercert()) or {}

    @override
    async def open(self) -> None:
        # Of a client that says nothing OpenSSL need not know.
        await self._receive()
        self._tls = self._context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                pass
            else:
                return
            finally:
                await self._flush()  # of a handshake that failed too: that says to the client why
            await self._receive()

    @override
    async def read(self) -> bytes:
        tls = self._require_open()
        while True:
            try:
                return tls.read(READ_BYTES)
            except ssl.SSLZeroReturnError:
                return b""
            except ssl.SSLWantReadError:
                await self._flush()
                if not await self._receive():
                    return b""

    @override
    async def write(self, data: bytes) -> None:
        tls = self._require_open()
        for start in range(0, len(data), _PIECE_BYTES):
            tls.write(data[start : start + _PIECE_BYTES])
            await self._flush()

    @override
    def close(self) -> None:
        if self._tls is not None and not self._writer.is_closing():
            with suppress(ssl.SSLError):  # the client's own farewell is not waited for
                self._tls.unwrap()
            self._writer.write(self._outgoing.read())
        super().close()

    async def _receive(self) -> bool:
        """Receive what has arrived; return whether anything has.

        Raises OSError during the handshake.
        """
        data = await super().read()
        if not data and self._tls is None:
            raise ConnectionResetError
        self._incoming.write(data)
        return bool(data)

    async def _flush(self) -> None:
        await super().write(self._outgoing.read())

    def _require_open(self) -> ssl.SSLObject:
        if self._tls is None:
            raise ConnectionError("not open")
        return self._tls
