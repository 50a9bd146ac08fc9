"""The seam to the Kubernetes API server: requests that answer in bytes, and their one error.

Here live the protocol, its error and the choice of credentials. What the bytes mean is decoded
elsewhere; how often to ask is the reflector's business.
"""

import asyncio
import importlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from typing import Final, Literal, Protocol

import aiohttp
import msgspec

from enricher.podwatch.decode import decode_cut
from enricher.podwatch.objects import Status
from enricher.podwatch.settings import KubernetesSettings
from gpuledger.errors import UnavailableError
from gpuledger.runtime.http.client import read_begin, retry_after_seconds, translating
from gpuledger.runtime.http.credentials import NO_CREDENTIALS, BasicCredentials
from gpuledger.runtime.readiness import Check
from gpuledger.runtime.tasks import in_daemon_thread
from gpuledger.texts import readable

Method = Literal["POST", "PUT"]
_NO_CREDENTIALS: Final = ": its credentials were refused; check the service account's token"
_NO_PERMISSION: Final = ": grant its account get, list and watch on pods in a ClusterRole"
_REMEDIES: Final[dict[int, str]] = {
    HTTPStatus.UNAUTHORIZED: _NO_CREDENTIALS,
    HTTPStatus.FORBIDDEN: _NO_PERMISSION,
}
_EXPIRED_REASONS: Final = frozenset({"Expired", "Gone", "ResourceVersionTooLarge"})


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
        self.said = message
        """What happened, without the remedy, which is for who reads pods."""
        self.status = status
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds

    def mask(self, sent: BasicCredentials) -> None:
        """Mask the credentials that were sent in what it says."""
        self.said = sent.mask(self.said)
        self.args = tuple(sent.mask(str(one)) for one in self.args)

    @property
    def expired(self) -> bool:
        """Whether the version asked for is no longer, or not, known: only a new list helps."""
        return self.status == HTTPStatus.GONE or self.reason in _EXPIRED_REASONS


class AnswerTooLargeError(KubernetesError):
    """The API server's answer is larger than what may be held at once."""


class SilentError(KubernetesError):
    """An answer that the API server had begun said nothing for as long as it was waited for."""


class Answer(Protocol):
    """The body of a successful answer."""

    async def read(self, *, max_bytes: int) -> bytes:
        """Return the whole body.

        Raises `AnswerTooLargeError` for more than `max_bytes`, `KubernetesError` where the
        connection breaks first.
        """

    def chunks(self) -> AsyncGenerator[bytes]:
        """Yield the body as it comes.

        Raises `KubernetesError` where the connection breaks, `SilentError` where nothing comes.
        """


class Api(Protocol):
    """An API server that lets itself be asked."""

    def get(
        self,
        path: str,
        *,
        query: Mapping[str, str],
        idle_timeout_seconds: float,
        total_seconds: float,
    ) -> AbstractAsyncContextManager[Answer]:
        """Open the answer to a GET; `KubernetesError` for all but success.

        `idle_timeout_seconds` is the longest time without a byte, `total_seconds` that of it all.
        """

    def send(
        self, method: Method, path: str, *, body: Mapping[str, object], total_seconds: float
    ) -> AbstractAsyncContextManager[Answer]:
        """Send JSON and open the answer; `KubernetesError` for all but success."""


@asynccontextmanager
async def open_api(
    settings: KubernetesSettings, *, check: Check | None = None
) -> AsyncIterator[Api]:
    """Open the API server that the settings, the cluster or the user's kubeconfig name.

    The check tells of credentials that change and cannot be read then. Raises `UserError` where no
    configuration is found or it cannot be read.
    """
    # The client library takes seconds to import: nobody who does not need it pays for that, whoever
    # runs this loop goes on meanwhile, and a signal does not wait for it.
    module = f"enricher.podwatch.{'anonymous_client' if settings.url else 'client'}"
    seam = await in_daemon_thread(lambda: importlib.import_module(module))
    opening = seam.open_plain if settings.url else seam.open_client
    async with opening(settings, check or Check()) as api:
        yield api


# Answers over HTTP: bodies as they come, and every way not to get one as a `KubernetesError`.
#
# What a refusal says is read as any server's answer is, in `gpuledger.runtime.http.client`. Who is
# asked, and with which credentials, is known elsewhere.

_SHOWN_CHARACTERS: Final = 200
_SUCCESS: Final = frozenset({HTTPStatus.OK, HTTPStatus.CREATED})
_decode_status: Final = msgspec.json.Decoder(Status).decode


@asynccontextmanager
async def answered(
    request: Awaitable[aiohttp.ClientResponse],
    *,
    server: str,
    time_limits: aiohttp.ClientTimeout,
    sent: BasicCredentials = NO_CREDENTIALS,
) -> AsyncIterator[Answer]:
    """Send a request and give its answer; `KubernetesError` for all but 200 and 201.

    Whatever the server says may quote the credentials that were `sent`: they are masked in each
    error, also in one that whoever reads the answer makes of it.
    """
    try:
        async with _answered(request, server=server, time_limits=time_limits) as answer:
            yield answer
    except KubernetesError as error:
        error.mask(sent)
        raise


@asynccontextmanager
async def _answered(
    request: Awaitable[aiohttp.ClientResponse], *, server: str, time_limits: aiohttp.ClientTimeout
) -> AsyncIterator[Answer]:
    """Send a request and give its answer.

    The deadlines are kept here once more: aiohttp's own stand in the connection and go with it.
    """
    with translating(partial(_unreachable, server)):
        async with asyncio.timeout(_seconds_to_answer(time_limits)):
            response = await request
    async with response:
        if response.status not in _SUCCESS:
            raise await _refusal(response)
        yield _HttpAnswer(response, server=server, idle_timeout_seconds=time_limits.sock_read)


def limits(
    *, connect_seconds: float, idle_timeout_seconds: float, total_seconds: float
) -> aiohttp.ClientTimeout:
    """Return the patience for one request."""
    return aiohttp.ClientTimeout(
        total=total_seconds, sock_connect=connect_seconds, sock_read=idle_timeout_seconds
    )


class _HttpAnswer:
    def __init__(
        self, response: aiohttp.ClientResponse, *, server: str, idle_timeout_seconds: float | None
    ) -> None:
        self._response = response
        self._server = server
        self._idle_timeout_seconds = idle_timeout_seconds

    async def read(self, *, max_bytes: int) -> bytes:
        chunks = []
        read_bytes = 0
        async with aclosing(self.chunks()) as found:
            async for chunk in found:
                chunks.append(chunk)
                read_bytes += len(chunk)
                if read_bytes > max_bytes:
                    raise AnswerTooLargeError(
                        f"the API server {self._server} answers with over {max_bytes} bytes"
                    )
        return b"".join(chunks)

    async def chunks(self) -> AsyncGenerator[bytes]:
        with (
            translating(partial(_unreachable, self._server)),
            translating(partial(_silent, self._server), of=aiohttp.ServerTimeoutError),
        ):
            while chunk := await self._next():
                yield chunk

    async def _next(self) -> bytes:
        """Return what has come, or nothing at the end; never wait for longer than may be silent."""
        silence = asyncio.timeout(self._idle_timeout_seconds)
        try:
            async with silence:
                return await self._response.content.readany()
        except TimeoutError as error:
            if silence.expired():
                raise aiohttp.ServerTimeoutError from error
            raise
        except RuntimeError as error:  # what aiohttp says of a connection that was closed here
            raise aiohttp.ClientConnectionError(str(error)) from error


async def _refusal(response: aiohttp.ClientResponse) -> KubernetesError:
    """Make the error of an answer that is not 200: the server's own words where it has any."""
    status = _status_of(await read_begin(response))
    message = readable(status.message or response.reason or "")
    header = response.headers.get("Retry-After", "")
    return KubernetesError(
        f"the API server answered {response.status}: {message}",
        status=response.status,
        reason=status.why,
        retry_after_seconds=retry_after_seconds(header, now=datetime.now(tz=UTC)),
    )


def _status_of(body: bytes) -> Status:
    """Read the Status object; what a proxy in between says is taken as it is."""
    try:
        return decode_cut(_decode_status, body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Status(message=readable(body, max_characters=_SHOWN_CHARACTERS))


def _unreachable(server: str, why: str) -> KubernetesError:
    return KubernetesError(_unreadable(server, why))


def _silent(server: str, why: str) -> SilentError:
    return SilentError(_unreadable(server, why))


def _unreadable(server: str, why: str) -> str:
    return f"the API server {server} cannot be read: {why}"


def _seconds_to_answer(time_limits: aiohttp.ClientTimeout) -> float:
    """Return how long a connection and the head of its answer may take together."""
    parts = (time_limits.sock_connect or 0.0) + (time_limits.sock_read or 0.0)
    return min(parts, time_limits.total or parts)
