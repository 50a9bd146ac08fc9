"""The seam to the Kubernetes API server: requests, bodies as bytes, and their one error.

Here live the protocol, its error, and the client of an address that needs no credentials; `client`
has the one for all else, and `connect` chooses. What the bytes mean is decoded elsewhere; how often
to ask is the reflector's business.
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
# An expired version has three names. `Expired` is that of a list or a watch, with 410; `Gone` that
# of older servers. `ResourceVersionTooLarge`, with 504, comes from a server that is behind the one
# that gave the version, or whose etcd was restored from a backup: then it never catches up.
_EXPIRED_REASONS: Final = frozenset({"Expired", "Gone", "ResourceVersionTooLarge"})
_SHOWN_CHARACTERS: Final = 200
_SUCCESS: Final = frozenset({HTTPStatus.OK, HTTPStatus.CREATED})
_decode_status: Final = msgspec.json.Decoder(Status).decode
ErrorT = TypeVar("ErrorT", bound="KubernetesError")


class KubernetesError(UnavailableError):
    """The API server did not answer, or did not answer with what was asked for."""

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
        """What happened, without the remedy, which is for lists and watches."""
        self.status = status
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds

    def mask(self, sent: BasicCredentials) -> None:
        """Mask the credentials that were sent in its messages."""
        self.detail = sent.mask(self.detail)
        self.args = tuple(sent.mask(str(argument)) for argument in self.args)

    @property
    def expired(self) -> bool:
        """Whether the version asked for is no longer, or not, known: only a new list helps."""
        return self.status == HTTPStatus.GONE or self.reason in _EXPIRED_REASONS


class AnswerTooLargeError(KubernetesError):
    """The API server's answer is larger than what may be held at once."""


class SilentError(KubernetesError):
    """An answer had begun, and no byte of it came for the whole idle timeout."""


class Answer:
    """The body of a successful answer."""

    def __init__(self, response: aiohttp.ClientResponse, *, server: str) -> None:
        self._response = response
        self._server = server

    async def read(self, *, max_bytes: int) -> bytes:
        """Return the whole body.

        Raises `AnswerTooLargeError` for more than `max_bytes`, `KubernetesError` where the
        connection breaks first.
        """
        body = bytearray()
        async with aclosing(self.chunks()) as chunks:
            async for chunk in chunks:
                body += chunk
                if len(body) > max_bytes:
                    raise AnswerTooLargeError(
                        f"the API server {self._server} answers with over {max_bytes} bytes"
                    )
        return bytes(body)

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yield the body as it comes.

        Raises `KubernetesError` where the connection breaks, `SilentError` where nothing
        comes.
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
    """Sent as JSON."""
    accept: str = JSON
    """The wanted media type of the answer."""


class Api(ABC):
    """An API server; the ways to send a request differ by credentials."""

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
        """Open the answer to a GET; `KubernetesError` for all but success.

        `idle_timeout_seconds` is the longest time without a byte, `total_seconds` that of it all;
        `accept` says in which form the answer is wanted.
        """
        time_limits = self._limits(idle_seconds=idle_timeout_seconds, total_seconds=total_seconds)
        return self.request(Request("GET", path, time_limits, query=query, accept=accept))

    def send(
        self, method: Method, path: str, *, body: Mapping[str, object], total_seconds: float
    ) -> AbstractAsyncContextManager[Answer]:
        """Send JSON and open the answer; `KubernetesError` for all but success."""
        time_limits = self._limits(idle_seconds=total_seconds, total_seconds=total_seconds)
        return self.request(Request(method, path, time_limits, body=body))

    @abstractmethod
    def request(self, request: Request) -> AbstractAsyncContextManager[Answer]:
        """Send a request and open its answer; `KubernetesError` for all but success."""

    def _limits(self, *, idle_seconds: float, total_seconds: float) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(
            total=total_seconds, connect=self._connect_seconds, sock_read=idle_seconds
        )


@asynccontextmanager
async def open_anonymous_client(settings: KubernetesSettings, check: Check) -> AsyncIterator[Api]:
    """Open the API server at `settings.url`; the check of credentials passes, as there are none."""
    check.ok("none are needed")
    async with aiohttp.ClientSession(headers={"User-Agent": USER_AGENT}) as session:
        yield AnonymousClient(settings, session)


class AnonymousClient(Api):
    """An API server that needs no credentials, such as `kubectl proxy` or the simulator's."""

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
            # A redirect would carry the request to a server that nobody has named.
            allow_redirects=False,
        )
        # A user in the address is a credential all the same.
        sent = BasicCredentials.sent(self._server, {})
        server = shown_url(self._server)
        return answered(sending, server=server, sent=sent)


@asynccontextmanager
async def answered(
    request: Awaitable[aiohttp.ClientResponse], *, server: str, sent: BasicCredentials
) -> AsyncIterator[Answer]:
    """Send a request and open its answer; `KubernetesError` for all but 200 and 201.

    What the server answers may quote the credentials that were `sent`: they are masked in each
    error, also in one that whoever reads the answer makes of it.
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
    """Return the error of an answer that is no success, with the server's own message if any."""
    body = await read_begin(response)
    try:
        status = _decode_status(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        # No Status: a proxy in between, or a load balancer, sends a page of its own.
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
    return kind(f"the API server {server} cannot be read: {why}")
