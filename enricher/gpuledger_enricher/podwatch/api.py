"""The interface to the Kubernetes API server: requests, response bodies, and one error class.

This module has the interface, its errors, and the client for an address without credentials.
`client` has the client for all other configurations, and `connect` chooses one of the two. Other
modules decode the bytes, and the reflector decides when to send requests.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, TypeVar

import aiohttp
import msgspec
from typing_extensions import override

from gpuledger import __version__
from gpuledger.errors import UnavailableError
from gpuledger.runtime.http.client import read_begin, retry_after_seconds, translating
from gpuledger.runtime.http.credentials import BasicCredentials
from gpuledger.runtime.readiness import Check
from gpuledger.settings.secret import shown_url
from gpuledger.texts import readable
from gpuledger_enricher.podwatch.objects import Status
from gpuledger_enricher.podwatch.pod_settings import KubernetesSettings

Method = Literal["POST", "PUT"]
JSON: Final = "application/json"
USER_AGENT: Final = f"gpuledger-podwatch/{__version__}"
_NO_CREDENTIALS: Final = ": its credentials were refused; check the service account's token"
_NO_PERMISSION: Final = (
    ": grant its account get, list and watch on pods, nodes and namespaces in a ClusterRole"
)
_REMEDIES: Final[dict[int, str]] = {
    HTTPStatus.UNAUTHORIZED: _NO_CREDENTIALS,
    HTTPStatus.FORBIDDEN: _NO_PERMISSION,
}
# An expired version has three names: `Expired`, with 410, for a list or a watch; `Gone` on older
# servers; `ResourceVersionTooLarge`, with 504. A server returns `ResourceVersionTooLarge` if it is
# behind the server that returned the version. If its etcd was restored from a backup, it never
# reaches this version.
_EXPIRED_REASONS: Final = frozenset({"Expired", "Gone", "ResourceVersionTooLarge"})
_SHOWN_CHARACTERS: Final = 200
_SUCCESS: Final = frozenset({HTTPStatus.OK, HTTPStatus.CREATED})
_decode_status: Final = msgspec.json.Decoder(Status).decode
ErrorT = TypeVar("ErrorT", bound="KubernetesError")


class KubernetesError(UnavailableError):
    """The API server did not respond, or responded with an error or invalid data."""

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        reason: str = "",
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message + _REMEDIES.get(status or 0, ""))
        self.detail = message
        """The message without the advice at its end, which applies only to lists and watches."""
        self.status = status
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds

    def mask(self, sent: BasicCredentials) -> None:
        """Mask the credentials that were sent, wherever they are in the error's texts."""
        self.detail = sent.mask(self.detail)
        self.args = tuple(sent.mask(str(argument)) for argument in self.args)

    @property
    def expired(self) -> bool:
        """Whether the server does not have the requested version, so that a new list is needed."""
        return self.status == HTTPStatus.GONE or self.reason in _EXPIRED_REASONS


class AnswerTooLargeError(KubernetesError):
    """The API server's response is larger than the limit."""


class SilentError(KubernetesError):
    """The API server sent no data within the idle timeout."""


class Answer:
    """The body of a successful response."""

    def __init__(self, response: aiohttp.ClientResponse, *, server: str) -> None:
        self._response = response
        self._server = server

    async def read(self, *, max_bytes: int) -> bytes:
        """Return the whole body.

        Raise `AnswerTooLargeError` for more than `max_bytes`, `SilentError` if no data comes, and
        `KubernetesError` if the connection breaks.
        """
        body = bytearray()
        async with aclosing(self.chunks()) as chunks:
            async for chunk in chunks:
                body += chunk
                if len(body) > max_bytes:
                    raise AnswerTooLargeError(
                        f"the API server {self._server} sent more than {max_bytes} bytes"
                    )
        return bytes(body)

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yield the body in chunks as they come.

        Raise `KubernetesError` if the connection breaks and `SilentError` if no data comes.
        """
        with (
            translating(partial(_unreadable, KubernetesError, self._server)),
            translating(
                partial(_unreadable, SilentError, self._server), of=aiohttp.ServerTimeoutError
            ),
        ):
            while chunk := await self._response.content.readany():
                yield chunk


class Request(NamedTuple):
    """A request to the API server."""

    method: str
    path: str
    time_limits: aiohttp.ClientTimeout
    query: Mapping[str, str] = MappingProxyType({})
    body: Mapping[str, object] | None = None
    """The body, which is sent as JSON; `None` for a request without a body."""
    accept: str = JSON
    """Accepted media type of the response."""


class Api(ABC):
    """A client of an API server; subclasses send requests with different credentials."""

    def __init__(self, settings: KubernetesSettings) -> None:
        self._connect_seconds = settings.connect_timeout_seconds

    def get(
        self,
        path: str,
        *,
        query: Mapping[str, str],
        idle_timeout_seconds: float,
        total_seconds: float,
        accept: str = JSON,
    ) -> AbstractAsyncContextManager[Answer]:
        """Send a GET request and open its response; raise `KubernetesError` unless it succeeds.

        `idle_timeout_seconds` limits the time without data, `total_seconds` the whole request;
        `accept` is the media type of the response.
        """
        time_limits = self._limits(idle_seconds=idle_timeout_seconds, total_seconds=total_seconds)
        return self.request(Request("GET", path, time_limits, query=query, accept=accept))

    def send(
        self, method: Method, path: str, *, body: Mapping[str, object], total_seconds: float
    ) -> AbstractAsyncContextManager[Answer]:
        """Send JSON and open the response; raise `KubernetesError` unless the request succeeds."""
        time_limits = self._limits(idle_seconds=total_seconds, total_seconds=total_seconds)
        return self.request(Request(method, path, time_limits, body=body))

    @abstractmethod
    def request(self, request: Request) -> AbstractAsyncContextManager[Answer]:
        """Send a request and open its response; raise `KubernetesError` unless it succeeds."""

    def _limits(self, *, idle_seconds: float, total_seconds: float) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(
            total=total_seconds, connect=self._connect_seconds, sock_read=idle_seconds
        )


@asynccontextmanager
async def open_anonymous_client(settings: KubernetesSettings, check: Check) -> AsyncIterator[Api]:
    """Yield a client of the API server at `settings.url`, which needs no credentials.

    The check passes at once.
    """
    check.ok("no credentials needed")
    async with aiohttp.ClientSession(headers={"User-Agent": USER_AGENT}) as session:
        yield AnonymousClient(settings, session)


class AnonymousClient(Api):
    """A client of an API server without credentials, such as `kubectl proxy` or the simulator's."""

    def __init__(self, settings: KubernetesSettings, session: aiohttp.ClientSession) -> None:
        super().__init__(settings)
        self._server = settings.url.rstrip("/")
        self._session = session

    @override
    def request(self, request: Request) -> AbstractAsyncContextManager[Answer]:
        sending = self._session.request(
            request.method,
            self._server + request.path,
            params=request.query,
            json=request.body,
            headers={"Accept": request.accept},
            timeout=request.time_limits,
            # A redirect would send the request to a server that is not configured.
            allow_redirects=False,
        )
        # A user name in the address is a credential, too.
        sent = BasicCredentials.sent(self._server, {})
        server = shown_url(self._server)
        return answered(sending, server=server, sent=sent)


@asynccontextmanager
async def answered(
    request: Awaitable[aiohttp.ClientResponse], *, server: str, sent: BasicCredentials
) -> AsyncIterator[Answer]:
    """Send a request and open the response, which must have status 200 or 201.

    Raise `KubernetesError` for any other status, and if the connection fails. A response may quote
    the credentials that were sent. They are masked in every error, including the errors that are
    raised while the response is read.
    """
    try:
        with translating(partial(_unreadable, KubernetesError, server)):
            response = await request
        async with response:
            if response.status not in _SUCCESS:
                raise await _refusal(response)
            yield Answer(response, server=server)
    except KubernetesError as error:
        error.mask(sent)
        raise


async def _refusal(response: aiohttp.ClientResponse) -> KubernetesError:
    """Return the error for an unsuccessful response, with the message in the response, if any."""
    body = await read_begin(response)
    try:
        status = _decode_status(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        # Not a Status: a proxy or a load balancer on the way sent its own page.
        status = Status(message=readable(body, max_characters=_SHOWN_CHARACTERS))
    message = readable(status.message or response.reason or "")
    header = response.headers.get("Retry-After", "")
    return KubernetesError(
        f"the API server answered {response.status}: {message}",
        status=response.status,
        reason=status.why,
        retry_after_seconds=retry_after_seconds(header, now=datetime.now(tz=UTC)),
    )


def _unreadable(kind: Callable[[str], ErrorT], server: str, why: str) -> ErrorT:
    return kind(f"cannot read from the API server {server}: {why}")
