"""The seam to a remote-write receiver: one method.

Here live the headers and what the status of an answer means. The body of an answer is shown to
people and never interpreted. The login, and whom to trust, are of `credentials`.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Final

import cramjam

from gpuledger import __version__
from gpuledger.runtime import Readiness
from gpuledger.runtime.http.client import HttpAnswer, HttpClient, NoAnswerError, open_http
from sinks.credentials import ReceiverCredentials, watch_credentials
from sinks.errors import ReceiverUnavailableError, RejectedError
from sinks.settings import RemoteWriteSettings

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

    def __init__(self, *, http: HttpClient, url: str, credentials: ReceiverCredentials) -> None:
        self._http, self._url, self._credentials = http, url, credentials

    async def write(self, body: bytes, *, attempt: int) -> None:
        """Send a `WriteRequest`; return when the receiver has taken it.

        Raises ReceiverUnavailableError where it is to be tried again (no answer, 5xx, 429, or the
        sender is refused: 401, 403, 404), and RejectedError where it must not be (any other 4xx).
        """
        # Receivers such as Mimir compute their Retry-After from the attempt.
        numbered = {"Retry-Attempt": str(attempt)} if attempt else {}
        credentials = self._credentials.current()
        data = bytes(cramjam.snappy.compress_raw(body))
        try:
            answer = await self._http.post(
                self._url,
                data=data,
                headers={**numbered, **credentials.headers},
                trust=credentials.trust,
            )
        except NoAnswerError as error:
            raise ReceiverUnavailableError(str(error)) from error
        if not answer.is_success:
            raise _refusal(answer)


@asynccontextmanager
async def open_client(
    settings: RemoteWriteSettings, *, readiness: Readiness | None = None
) -> AsyncIterator[RemoteWriteClient]:
    """Open a client; raises SettingsError where a file of its credentials cannot be used.

    A check of `readiness` tells of files that change and cannot be used then.
    """
    credentials = watch_credentials(
        settings, section="remote_write", readiness=readiness or Readiness()
    )
    async with open_http(
        headers={**settings.headers, **_PROTOCOL_HEADERS}, timeout_seconds=settings.timeout_seconds
    ) as http:
        yield RemoteWriteClient(http=http, url=settings.url, credentials=credentials)


def _refusal(answer: HttpAnswer) -> ReceiverUnavailableError | RejectedError:
    message = f"{answer.status} {answer.text}"
    is_client_error = answer.status // 100 == HTTPStatus.BAD_REQUEST // 100
    is_for_later = answer.status == HTTPStatus.TOO_MANY_REQUESTS or answer.status in _REFUSES_SENDER
    if is_client_error and not is_for_later:
        return RejectedError(message)
    return ReceiverUnavailableError(message, retry_after_seconds=answer.retry_after_seconds)
