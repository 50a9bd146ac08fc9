"""The seam to a remote-write receiver: one method, over aiohttp.

Here live the headers, the credentials and the reading of the answer's status. The body of an answer
is shown to people and never interpreted.
"""

import base64
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from pathlib import Path
from typing import Final

import aiohttp
import cramjam

from gpuledger import __version__
from gpuledger.addresses import shown_url
from gpuledger.errors import SettingsError
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
_MOST_RETRY_AFTER_SECONDS: Final = 600.0
_SHOWN_CHARACTERS: Final = 2000


class RemoteWriteClient:
    """Writes to one receiver."""

    def __init__(self, *, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
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
            async with self._session.post(
                self._url, data=data, headers=headers, allow_redirects=False
            ) as response:
                if response.status // 100 != HTTPStatus.OK // 100:
                    raise _refusal(response.status, response.headers, await response.text())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            shown = str(error) or type(error).__name__
            raise ReceiverUnavailableError(f"{shown_url(self._url)}: {shown}") from error


@asynccontextmanager
async def open_client(settings: RemoteWriteSettings) -> AsyncIterator[RemoteWriteClient]:
    """Open a client; raises SettingsError where the CA file cannot be used."""
    async with aiohttp.ClientSession(
        headers=request_headers(settings),
        timeout=aiohttp.ClientTimeout(total=settings.timeout_seconds),
        connector=aiohttp.TCPConnector(ssl=_trust(settings.ca_file)),
        cookie_jar=aiohttp.DummyCookieJar(),
    ) as session:
        yield RemoteWriteClient(session=session, url=settings.url)


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


def _refusal(
    status: int, headers: Mapping[str, str], text: str
) -> ReceiverUnavailableError | RejectedError:
    message = f"{status} {text.strip()[:_SHOWN_CHARACTERS]}"
    is_client_error = status // 100 == HTTPStatus.BAD_REQUEST // 100
    is_for_later = status == HTTPStatus.TOO_MANY_REQUESTS or status in _REFUSES_SENDER
    if is_client_error and not is_for_later:
        return RejectedError(message)
    wait_seconds = retry_after_seconds(headers.get("Retry-After", ""), now=datetime.now(tz=UTC))
    return ReceiverUnavailableError(message, retry_after_seconds=wait_seconds)


def retry_after_seconds(header: str, *, now: datetime) -> float:
    """Read a `Retry-After`, in seconds or as a date; 0 where it says nothing or what has passed."""
    try:
        seconds = float(header)
    except ValueError:
        seconds = _seconds_until(header, now)
    if not seconds > 0:
        return 0.0
    return min(seconds, _MOST_RETRY_AFTER_SECONDS)


def _seconds_until(date: str, now: datetime) -> float:
    try:
        return (parsedate_to_datetime(date) - now).total_seconds()
    except (ValueError, TypeError):
        return 0.0
