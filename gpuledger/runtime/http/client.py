"""An HTTP client that limits the size of answers and makes their text safe to show.

A server may answer anything: its own page, a proxy's page, or bytes that are not HTTP. The status
decides what an answer means. The body is only shown to people, so its beginning is enough, and a
broken body must not change the meaning of the status. Credentials that a server quotes are masked.
aiohttp's exceptions are translated here.
"""

import asyncio
import base64
import os
import socket
import ssl
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from types import MappingProxyType
from typing import Final
from urllib.parse import urlsplit

import aiohttp

from gpuledger.errors import UnavailableError
from gpuledger.runtime.http.credentials import NO_CREDENTIALS, BasicCredentials
from gpuledger.settings.secret import shown_url
from gpuledger.texts import MAX_CHARACTERS, readable

MAX_BODY_BYTES: Final = 64 * 1024
"""Maximum number of bytes read from a body that is only shown."""
_READ_BYTES: Final = 8 * MAX_CHARACTERS
"""Maximum number of bytes decoded from a body that is only shown; enough even after masking."""
BODY_SECONDS: Final = 5.0
"""Timeout for reading a body that is only shown, from the arrival of the status."""
# aiohttp raises its own errors for most server faults, but its parser may raise ValueError, and a
# connection that ends in the middle raises RuntimeError.
_BROKEN: Final = (aiohttp.ClientError, OSError, ValueError, RuntimeError)
_OF_PROXY: Final = (aiohttp.ClientHttpProxyError, aiohttp.ClientProxyConnectionError)
_NOT_CONNECTED: Final = (aiohttp.ClientConnectorError, aiohttp.ClientConnectorCertificateError)
_OF_TLS: Final = aiohttp.ClientSSLError
_NO_COMMON_TLS: Final = frozenset(
    {"TLSV1_ALERT_PROTOCOL_VERSION", "UNSUPPORTED_PROTOCOL", "NO_PROTOCOLS_AVAILABLE"}
)
"""The reasons that OpenSSL reports if client and server have no TLS version in common."""
_PAGES: Final = frozenset({"text/html", "application/xhtml+xml"})
_UNPACKED: Final = frozenset({"gzip", "deflate"})
_GZIP_OR_ZLIB: Final = 47  # the window size that makes zlib detect the format
_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


class NoAnswerError(UnavailableError):
    """A server did not answer in time, or not in HTTP; the message gives the cause."""


class NotConnectedError(NoAnswerError):
    """The connection failed: no server listens there, or its name cannot be resolved."""


class ProxyError(NoAnswerError):
    """The proxy cannot be reached, or refuses to connect to the server."""


@dataclass(frozen=True, kw_only=True)
class Proxy:
    """A proxy for requests, with its credentials."""

    url: str
    """The URL without credentials."""
    username: str = ""
    password: str = field(default="", repr=False)

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers for the proxy; empty without credentials."""
        if not self.username:
            return {}
        pair = f"{self.username}:{self.password}".encode()
        return {"Proxy-Authorization": f"Basic {base64.b64encode(pair).decode()}"}


@dataclass(frozen=True, kw_only=True)
class Route:
    """How to reach a server and verify its identity."""

    trust: ssl.SSLContext | bool = True
    """TLS context with CA certificates, client certificate and TLS versions; true means the
    system's CA certificates, no client certificate and default versions."""
    server_name: str = ""
    """The name that the certificate must contain, also sent as SNI; empty means the URL's host."""
    proxy: Proxy | None = None


DIRECT: Final = Route()
"""The route without a proxy, with the system's CA certificates."""


@dataclass(frozen=True, kw_only=True)
class HttpAnswer:
    """A server's answer."""

    status: int
    """The HTTP status code."""
    content_type: str
    """The body's content type, without parameters."""
    text: str
    """The beginning of the body, for people; empty for a success."""
    retry_after_seconds: float
    """The wait requested by the server; 0 if it requested none."""

    has_type: bool = True
    """Whether the answer has a `Content-Type` header."""
    leads_to: str = ""
    """A redirect's target without its query; empty if there is none."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """All headers, with case-insensitive names. They are untrusted, so never show them as they
    are."""

    @property
    def is_success(self) -> bool:
        """Whether the status is 2xx."""
        return self.status // 100 == HTTPStatus.OK // 100

    @property
    def is_page(self) -> bool:
        """Whether the body is an HTML page, as returned by many proxies."""
        return self.content_type in _PAGES


class HttpClient:
    """Sends requests over reused connections."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def post(
        self,
        url: str,
        *,
        data: bytes,
        headers: Mapping[str, str] = _NOTHING,
        route: Route = DIRECT,
    ) -> HttpAnswer:
        """Return the answer to a POST; do not follow redirects.

        Raises `NoAnswerError`. Connections are only reused by requests with the same route.
        """
        sent = self._sent(url, headers, route)
        with (
            _attributing_errors(route.proxy),
            translating(lambda reason: NoAnswerError(f"{shown_url(url)}: {reason}"), sent=sent),
        ):
            async with self._requesting(url, headers, route, data=data) as response:
                return await read_answer(response, sent=sent)

    async def post_form(
        self,
        url: str,
        form: bytes,
        headers: Mapping[str, str] = _NOTHING,
        *,
        route: Route = DIRECT,
    ) -> tuple[int, bytes]:
        """Return the status and the whole body of the answer to a POST, for any status.

        Use it for answers that are parsed. Raises `NoAnswerError` if there is no answer or the body
        exceeds `MAX_BODY_BYTES`; the message does not contain the address. Raises
        `ssl.SSLCertVerificationError` if the certificate is not trusted.
        """
        sent = self._sent(url, headers, route)
        try:
            with _attributing_errors(route.proxy), translating(NoAnswerError, sent=sent):
                async with self._requesting(url, headers, route, data=form) as response:
                    return response.status, await _whole_body(response, MAX_BODY_BYTES)
        except NoAnswerError as error:
            if isinstance(error.__cause__, aiohttp.ClientConnectorCertificateError):
                found = error.__cause__.certificate_error
                if isinstance(found, ssl.SSLCertVerificationError):
                    raise found from error
            raise

    async def get(self, url: str, *, max_bytes: int, route: Route = DIRECT) -> tuple[int, bytes]:
        """Return the status and the whole body of the answer to a GET, for any status.

        Raises `NoAnswerError`, also if the body exceeds `max_bytes`.
        """
        sent = self._sent(url, _NOTHING, route)
        with (
            _attributing_errors(route.proxy),
            translating(lambda reason: NoAnswerError(f"{shown_url(url)}: {reason}"), sent=sent),
        ):
            request = self._requesting(url, _NOTHING, route, method="GET")
            async with request as response:
                return response.status, await _whole_body(response, max_bytes)

    def _requesting(
        self,
        url: str,
        headers: Mapping[str, str],
        route: Route,
        *,
        data: bytes | None = None,
        method: str = "POST",
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        proxy = route.proxy
        # For HTTPS the proxy opens a tunnel and does not see the request's own headers.
        has_tunnel = url.lower().startswith("https://")
        to_proxy = proxy.headers if proxy else {}
        return self._session.request(
            method,
            url,
            data=data,
            headers=headers if has_tunnel else {**headers, **to_proxy},
            allow_redirects=False,
            ssl=route.trust,
            server_hostname=route.server_name or None,
            proxy=proxy.url if proxy else None,
            proxy_headers=to_proxy if has_tunnel else None,
        )

    def _sent(self, url: str, headers: Mapping[str, str], route: Route) -> BasicCredentials:
        sent = BasicCredentials.sent(url, {**self._session.headers, **headers})
        if route.proxy is None:
            return sent
        to_proxy = BasicCredentials.sent(route.proxy.url, route.proxy.headers)
        return BasicCredentials((*sent.secrets, *to_proxy.secrets))


async def _whole_body(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > max_bytes:
            raise ValueError(f"answered with more than {max_bytes // 1024} KiB")
    return bytes(body)


@contextmanager
def _attributing_errors(proxy: Proxy | None) -> Iterator[None]:
    """Raise `ProxyError` for errors of the proxy, and `NotConnectedError` for failed connections.

    All other errors are raised unchanged.
    """
    try:
        yield
    except NoAnswerError as error:
        cause = error.__cause__
        # A connection error contains the host to connect to: the server or the proxy.
        is_of_proxy = isinstance(cause, _OF_PROXY) or (
            proxy is not None
            and isinstance(cause, _NOT_CONNECTED)
            and cause.host == urlsplit(proxy.url).hostname
        )
        if is_of_proxy:
            raise ProxyError(str(error)) from cause
        if isinstance(cause, aiohttp.ClientConnectorError) and not isinstance(cause, _OF_TLS):
            raise NotConnectedError(str(error)) from cause
        raise


@asynccontextmanager
async def open_http(
    *, headers: Mapping[str, str], timeout_seconds: float
) -> AsyncIterator[HttpClient]:
    """Open a client that sends `headers` and limits each request to `timeout_seconds`."""
    async with aiohttp.ClientSession(
        headers={**headers, "Accept-Encoding": "identity"},
        auto_decompress=False,  # otherwise wrong or unrequested compression would hide the status
        timeout=aiohttp.ClientTimeout(total=timeout_seconds),
        cookie_jar=aiohttp.DummyCookieJar(),  # a server could fill a real jar with new cookies
    ) as session:
        yield HttpClient(session)


async def read_answer(response: aiohttp.ClientResponse, *, sent: BasicCredentials) -> HttpAnswer:
    """Return the answer in a response, with the credentials in `sent` masked.

    The body of a success is not read.
    """
    is_success = response.status // 100 == HTTPStatus.OK // 100
    body = b"" if is_success else await read_begin(response)
    if response.headers.get("Content-Encoding", "").lower() in _UNPACKED:
        # Limited, because a few bytes may expand to gigabytes. Invalid data stays compressed.
        with suppress(zlib.error):
            body = zlib.decompressobj(_GZIP_OR_ZLIB).decompress(body, MAX_BODY_BYTES)
    header = response.headers.get("Retry-After", "")
    return HttpAnswer(
        status=response.status,
        content_type=response.content_type,
        has_type="Content-Type" in response.headers,
        headers=response.headers,
        leads_to=shown_url(readable(sent.mask(response.headers.get("Location", "")))),
        text=readable(sent.mask(body[:_READ_BYTES].decode(errors="replace"))),
        retry_after_seconds=retry_after_seconds(header, now=datetime.now(tz=UTC)),
    )


async def read_begin(
    response: aiohttp.ClientResponse, *, timeout_seconds: float = BODY_SECONDS
) -> bytes:
    """Return the beginning of a body: at most `MAX_BODY_BYTES` that arrive within the timeout.

    If the connection fails, the bytes that have arrived are returned.
    """
    body = bytearray()
    with suppress(*_BROKEN):
        async with asyncio.timeout(timeout_seconds):
            # Decompressed data also arrives in pieces no larger than the buffer.
            while len(body) < MAX_BODY_BYTES and (piece := await response.content.readany()):
                body += piece
    return bytes(body[:MAX_BODY_BYTES])


@contextmanager
def translating(
    error_of: Callable[[str], Exception],
    *,
    of: tuple[type[BaseException], ...] | type[BaseException] = _BROKEN,
    sent: BasicCredentials = NO_CREDENTIALS,
) -> Iterator[None]:
    """Convert errors of a request, or of reading its response, to the error of `error_of`.

    `error_of` receives the reason, in which the credentials in `sent` are masked. Only errors of
    the types in `of` are replaced. Code that reads a body as a stream, and therefore does not use
    `HttpClient`, calls this function directly.
    """
    try:
        yield
    except of as error:
        match error:  # avoids the URL, which aiohttp's own texts may contain with its password
            case aiohttp.ServerTimeoutError():
                text = "silent for too long"
            case aiohttp.ClientHttpProxyError():
                text = f"the proxy answers {error.status} {error.message}"
            case aiohttp.ClientProxyConnectionError():
                text = f"the proxy cannot be reached: {error.os_error.strerror or error.os_error}"
            case aiohttp.ClientConnectorError():
                text = _why_not_connected(error)
            case aiohttp.ClientResponseError():
                text = f"no valid HTTP: {error.message}"
            case aiohttp.InvalidURL():
                text = "invalid address"
            case TimeoutError():
                text = "not done in time"
            case _:
                text = str(error)
        raise error_of(readable(sent.mask(text)) or type(error).__name__) from error


def _why_not_connected(error: aiohttp.ClientConnectorError) -> str:
    where, cause = f"{error.host}:{error.port}", error.os_error
    if isinstance(cause, ssl.SSLError) and cause.reason in _NO_COMMON_TLS:
        return f"no TLS with {where}: no TLS version in common"
    if isinstance(cause, ConnectionResetError):
        return f"{where} closed the connection in the TLS handshake"
    # For a certificate error, the library's text contains the cause.
    return (
        str(error) if isinstance(error, _OF_TLS) else f"cannot connect to {where}: {_reason(cause)}"
    )


def _reason(error: OSError) -> str:
    """Return why a connection failed: the system's message for its errno, otherwise its own text.

    asyncio's own text only repeats the address. A failed name look-up has no errno.
    """
    if error.errno and error.errno > 0 and not isinstance(error, socket.gaierror):
        return os.strerror(error.errno)
    return error.strerror or str(error)


MAX_SECONDS: Final = 600.0
"""Maximum wait that a server can request. A longer wait could delay the recovery by hours after the
server is back."""
# Raised by the standard library for invalid dates and time zones.
_NO_DATE: Final = (ValueError, TypeError, OverflowError, IndexError)


def retry_after_seconds(header: str, *, now: datetime) -> float:
    """Return the wait in a `Retry-After` header, from 0 to `MAX_SECONDS`.

    The header contains seconds or a date. Returns 0 if the header is invalid or the date has
    passed.
    """
    seconds = 0.0
    try:
        seconds = float(header)
    except ValueError:
        with suppress(*_NO_DATE):
            seconds = (parsedate_to_datetime(header) - now).total_seconds()
    return min(seconds, MAX_SECONDS) if seconds > 0 else 0.0  # also 0 for NaN
