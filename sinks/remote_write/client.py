"""The seam to a remote-write receiver: one method.

Here live the headers, the credentials and what the status of an answer means. The body of an answer
is shown to people and never interpreted.
"""

import base64
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Final

import cramjam

from gpuledger import __version__
from gpuledger.errors import SettingsError
from gpuledger.service.http.client import HttpAnswer, HttpClient, NoAnswerError, open_http
from sinks.errors import ReceiverUnavailableError, RejectedError
from sinks.remote_write.settings import RemoteWriteSettings

_PROTOCOL_HEADERS: Final = {
    "Content-Encoding": "snappy",
    "Content-Type": "application/x-protobuf",
    "User-Agent": f"gpuledger/{__version__}",
    "X-Prometheus-Remote-Write-Version": "0.1.0",
}
# These refuse the sender, not what it sends: once its token or its URL is right again the same
# request is taken. To give the events up would empty the stream into the dead letters.
_REFUSES_SENDER: Final = frozenset(
    {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND}
)


class RemoteWriteClient:
    """Writes to one receiver."""

    def __init__(self, *, http: HttpClient, url: str) -> None:
        self._http = http
        self._url = url

    async def write(self, body: bytes, *, attempt: int) -> None:
        """Send a `WriteRequest`; return when the receiver has taken it.

        Raises ReceiverUnavailableError where it is to be tried again (no answer, 5xx, 429, or the
        sender is refused: 401, 403, 404), and RejectedError where it must not be (any other 4xx).
        """
        # Receivers such as Mimir compute their Retry-After from the attempt.
        headers = {"Retry-Attempt": str(attempt)} if attempt else {}
        data = bytes(cramjam.snappy.compress_raw(body))
        try:
            answer = await self._http.post(self._url, data=data, headers=headers)
        except NoAnswerError as error:
            raise ReceiverUnavailableError(str(error)) from error
        if not answer.is_success:
            raise _refusal(answer)


@asynccontextmanager
async def open_client(settings: RemoteWriteSettings) -> AsyncIterator[RemoteWriteClient]:
    """Open a client; raises SettingsError where the CA file cannot be used."""
    async with open_http(
        headers=request_headers(settings),
        timeout_seconds=settings.timeout_seconds,
        trust=_trust(settings.ca_file),
    ) as http:
        yield RemoteWriteClient(http=http, url=settings.url)


def request_headers(settings: RemoteWriteSettings) -> dict[str, str]:
    """Give the headers of every request: the user's first, the protocol's over them."""
    return {**settings.headers, **_credentials(settings), **_PROTOCOL_HEADERS}


def _credentials(settings: RemoteWriteSettings) -> dict[str, str]:
    if settings.bearer_token is not None:
        return {"Authorization": f"Bearer {settings.bearer_token.reveal().strip()}"}
    if settings.password is not None:
        pair = f"{settings.username}:{settings.password.reveal()}"
        return {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}
    return {}


def _trust(ca_file: str) -> ssl.SSLContext | bool:
    if not ca_file:
        return True
    try:
        return ssl.create_default_context(cafile=Path(ca_file))
    except OSError as error:
        raise SettingsError(f"remote_write.ca_file {ca_file}: {error}; name a PEM file") from error


def _refusal(answer: HttpAnswer) -> ReceiverUnavailableError | RejectedError:
    message = f"{answer.status} {answer.text}"
    is_client_error = answer.status // 100 == HTTPStatus.BAD_REQUEST // 100
    is_for_later = answer.status == HTTPStatus.TOO_MANY_REQUESTS or answer.status in _REFUSES_SENDER
    if is_client_error and not is_for_later:
        return RejectedError(message)
    return ReceiverUnavailableError(message, retry_after_seconds=answer.retry_after_seconds)
