"""The seam to every HTTP server that is asked: what it answers, bounded and readable.

A server may answer anything: its own page, a proxy's, or bytes that are no HTTP. The status decides
what an answer means; the body is shown to people, so that a part of it is enough, and that nothing
which is wrong with it may change what the status says. What a server quotes of the credentials that
were sent to it is masked. aiohttp's exceptions end here.
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
"""How much is read of a body that is only shown."""
_READ_BYTES: Final = 8 * MAX_CHARACTERS
"""How much of it is looked at: enough to show, whatever is masked."""
BODY_SECONDS: Final = 5.0
"""How long is waited for it once the status is known."""
# aiohttp raises its own errors for most of what a server can do wrong; its parser lets a ValueError
# through, and a connection that ends in the middle is a RuntimeError.
_BROKEN: Final = (aiohttp.ClientError, OSError, ValueError, RuntimeError)
_OF_PROXY: Final = (aiohttp.ClientHttpProxyError, aiohttp.ClientProxyConnectionError)
_NOT_CONNECTED: Final = (aiohttp.ClientConnectorError, aiohttp.ClientConnectorCertificateError)
_OF_TLS: Final = aiohttp.ClientSSLError
_NO_COMMON_TLS: Final = frozenset(
    {"TLSV1_ALERT_PROTOCOL_VERSION", "UNSUPPORTED_PROTOCOL", "NO_PROTOCOLS_AVAILABLE"}
)
"""What OpenSSL calls it where the other side speaks no version of TLS that is spoken here."""
_PAGES: Final = frozenset({"text/html", "application/xhtml+xml"})
_UNPACKED: Final = frozenset({"gzip", "deflate"})
_GZIP_OR_ZLIB: Final = 47  # the window's size that lets zlib see by itself which of the two it is
_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


class NoAnswerError(UnavailableError):
    """A server did not answer in time, or not in HTTP; the message says what it did instead."""


class NotConnectedError(NoAnswerError):
    """No connection to the server could be opened: nothing is there, or not under that name."""


class ProxyError(NoAnswerError):
    """The proxy before the server cannot be reached, or refuses to reach it."""


@dataclass(frozen=True, kw_only=True)
class Proxy:
    """A proxy that requests go through, and the login there."""

    url: str
    """Without a login."""
    username: str = ""
    password: str = field(default="", repr=False)

    @property
    def headers(self) -> dict[str, str]:
        """What it is shown; empty without a login."""
        if not self.username:
            return {}
        pair = f"{self.username}:{self.password}".encode()
        return {"Proxy-Authorization": f"Basic {base64.b64encode(pair).decode()}"}


@dataclass(frozen=True, kw_only=True)
class Route:
    """By what way a server is reached, and by what it is known to be the right one."""

    trust: ssl.SSLContext | bool = True
    """The authorities behind the certificate, the own one and the TLS versions; true means the
    system's, none and the default."""
    server_name: str = ""
    """What the certificate must name, and is asked for (SNI); empty means the address' host."""
    proxy: Proxy | None = None


DIRECT: Final = Route()
"""By no proxy, with the system's authorities."""


@dataclass(frozen=True, kw_only=True)
class HttpAnswer:
    """What a server answered."""

    status: int
    """HTTP's code, whatever it is."""
    content_type: str
    """What the server says that the body is, without parameters."""
    text: str
    """The begin of the body, for people; empty where the answer is a success."""
    retry_after_seconds: float
    """How long the server asks to be left alone; 0 where it does not."""

    has_type: bool = True
    """Whether the server said what the body is."""
    leads_to: str = ""
    """Where a redirect leads, without its query; empty where that is not said."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """All headers of it, by names in any case; a server's, so never shown as they are."""

    @property
    def is_success(self) -> bool:
        """Whether the status is 2xx."""
        return self.status // 100 == HTTPStatus.OK // 100

    @property
    def is_page(self) -> bool:
        """Whether it is a page for people, as proxies give."""
        return self.content_type in _PAGES


class HttpClient:
    """Asks servers over connections that are kept."""

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
        """Return the answer to a POST, never following it elsewhere. Raises NoAnswerError.

        It goes over no connection that was opened by another route.
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
        """Return the status and the whole body of the answer to a POST, whatever the status.

        For answers that are read by a program. Raises NoAnswerError without the address, also for a
        longer body, and ssl.SSLCertVerificationError where the certificate is not trusted.
        """
        sent = self._sent(url, headers, route)
        try:
            with _attributing_errors(route.proxy), translating(NoAnswerError, sent=sent):
                async with self._requesting(url, headers, route, data=form) as response:
                    body = bytearray()
                    async for piece in response.content.iter_any():
                        body += piece
                        if len(body) > MAX_BODY_BYTES:
                            raise ValueError(
                                f"answered with more than {MAX_BODY_BYTES // 1024} KiB"
                            )
                    return response.status, bytes(body)
        except NoAnswerError as error:
            if isinstance(error.__cause__, aiohttp.ClientConnectorCertificateError):
                found = error.__cause__.certificate_error
                if isinstance(found, ssl.SSLCertVerificationError):
                    raise found from error
            raise

    def _requesting(
        self, url: str, headers: Mapping[str, str], route: Route, *, data: bytes
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        proxy = route.proxy
        # With TLS the proxy is asked for a tunnel, in which it sees nothing of the request.
        has_tunnel = url.lower().startswith("https://")
        to_proxy = proxy.headers if proxy else {}
        return self._session.post(
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


@contextmanager
def _attributing_errors(proxy: Proxy | None) -> Iterator[None]:
    """Raise `ProxyError` for an error that is the proxy's, and not the server's behind it.

    And `NotConnectedError` where the server was not reached.
    """
    try:
        yield
    except NoAnswerError as error:
        cause = error.__cause__
        # Errors before a connection stands name whom it was to be with.
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
    """Open a client whose every request carries `headers` and has ended after `timeout_seconds`."""
    async with aiohttp.ClientSession(
        headers={**headers, "Accept-Encoding": "identity"},
        auto_decompress=False,  # else a server that packs badly, or unasked, has said nothing
        timeout=aiohttp.ClientTimeout(total=timeout_seconds),
        cookie_jar=aiohttp.DummyCookieJar(),  # a server that sets ever new ones would fill the jar
    ) as session:
        yield HttpClient(session)


async def read_answer(response: aiohttp.ClientResponse, *, sent: BasicCredentials) -> HttpAnswer:
    """Return a response's text, with the credentials in `sent` masked.

    The body of a success is left unread.
    """
    is_success = response.status // 100 == HTTPStatus.OK // 100
    body = b"" if is_success else await read_begin(response)
    if response.headers.get("Content-Encoding", "").lower() in _UNPACKED:
        # In bounds, as a few bytes may unpack to gigabytes; what is not packed so stays as it is.
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
    """Return the beginning of a body: what arrived before its limit, its end or its deadline."""
    body = bytearray()
    with suppress(*_BROKEN):
        async with asyncio.timeout(timeout_seconds):
            # What is unpacked comes in pieces as well, each no larger than the buffer.
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
    """Raise what `error_of` makes of the reason, where a request or the reading of its body fails.

    The credentials that were `sent` are masked in it. For who reads a body as it comes, and so does
    without `HttpClient`; with `of`, failures of these kinds alone.
    """
    try:
        yield
    except of as error:
        match error:  # without the URL, which aiohttp's own texts may quote with its password
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
                text = "an address that nothing can be sent to"
            case TimeoutError():
                text = "not done in time"
            case _:
                text = str(error)
        raise error_of(readable(sent.mask(text)) or type(error).__name__) from error


def _why_not_connected(error: aiohttp.ClientConnectorError) -> str:
    where, cause = f"{error.host}:{error.port}", error.os_error
    if isinstance(cause, ssl.SSLError) and cause.reason in _NO_COMMON_TLS:
        return f"no TLS with {where}: it speaks none of our versions"
    if isinstance(cause, ConnectionResetError):
        return f"{where} ends the connection in the TLS handshake"
    # Of a certificate the library's text has what is wrong with it.
    return (
        str(error) if isinstance(error, _OF_TLS) else f"cannot connect to {where}: {_reason(cause)}"
    )


def _reason(error: OSError) -> str:
    """Return why there is no connection, by the system's own name for it where it has one.

    asyncio's text repeats the address instead; of names that are not found there is but a text.
    """
    if error.errno and error.errno > 0 and not isinstance(error, socket.gaierror):
        return os.strerror(error.errno)
    return error.strerror or str(error)


MAX_SECONDS: Final = 600.0
"""The longest wait that is granted: a server that is back must not go unnoticed for hours."""
# What the standard library raises of dates that are none, are in no calendar or in no time zone.
_NO_DATE: Final = (ValueError, TypeError, OverflowError, IndexError)


def retry_after_seconds(header: str, *, now: datetime) -> float:
    """Return the seconds to wait, of 0 to `MAX_SECONDS`, from a `Retry-After`.

    The header may have seconds or a date. It is 0 where the header says nothing that can be read,
    or a time that has passed.
    """
    seconds = 0.0
    try:
        seconds = float(header)
    except ValueError:
        with suppress(*_NO_DATE):
            seconds = (parsedate_to_datetime(header) - now).total_seconds()
    return min(seconds, MAX_SECONDS) if seconds > 0 else 0.0  # not a number is not above 0 either
