"""The seam to a remote-write receiver: one method.

Here live the headers and which answers are the receiver's word on the samples: to put events aside
for any other would empty the stream into the dead letters while an address or a login is wrong. So
what looks like a refusal of samples counts as one only where the same receiver takes a request
without samples: neither a status nor words tell a receiver from what stands in its place. The
login, and whom to trust, are of `credentials`.
"""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Final

import cramjam

from gpuledger import __version__
from gpuledger.runtime import Readiness
from gpuledger.runtime.http.client import HttpAnswer, HttpClient, NoAnswerError, open_http
from sinks.credentials import ReceiverCredentials, explain, watch_credentials
from sinks.errors import ReceiverUnavailableError, RejectedError
from sinks.settings import RemoteWriteSettings

_PROTOCOL_HEADERS: Final = {
    "Content-Encoding": "snappy",
    "Content-Type": "application/x-protobuf",
    "User-Agent": f"gpuledger/{__version__}",
    "X-Prometheus-Remote-Write-Version": "0.1.0",
}
# What Prometheus, Mimir, Thanos and VictoriaMetrics refuse samples with, and proxies a body as too
# large. Any other answer is of the address, the login or the protocol, and may be another tomorrow.
_MAY_REFUSE_SAMPLES: Final = frozenset(
    {
        HTTPStatus.BAD_REQUEST,
        HTTPStatus.CONFLICT,
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        HTTPStatus.UNPROCESSABLE_ENTITY,
    }
)
_OUT_OF_ORDER: Final = re.compile(
    r"out[ -]of[ -](order|bounds)|duplicate[ -](sample|timestamp)|too[ -]old", re.IGNORECASE
)
"""How Prometheus, Mimir and Thanos say it, and nothing that stands before them does."""
_WITHOUT_SAMPLES: Final = b""
"""A `WriteRequest` without series, which those four answer with 2xx."""


class RemoteWriteClient:
    """Writes to one receiver."""

    def __init__(self, *, http: HttpClient, url: str, credentials: ReceiverCredentials) -> None:
        self._http, self._url, self._credentials = http, url, credentials

    async def write(self, body: bytes, *, attempt: int) -> None:
        """Send a `WriteRequest`; return when the receiver has taken it.

        Raises RejectedError where the receiver refuses these samples, takes a request without any,
        and refuses them again; and ReceiverUnavailableError where it is to be tried again: no
        answer, 5xx, 429, or one that says nothing of the samples, as of a wrong address or login.
        """
        refusal = await self._send(body, attempt=attempt)
        if refusal is None:
            return
        if not is_out_of_order(refusal):
            # What refused them may be gone by now, as may what took the request without samples.
            if not _is_taken(answer := await self._post(_WITHOUT_SAMPLES)):
                raise self._unavailable(answer)
            if (refusal := await self._send(body, attempt=attempt)) is None:
                return
        raise RejectedError(refusal)

    async def _send(self, body: bytes, *, attempt: int) -> str | None:
        """Return with what words the samples may be refused; `None` where they are taken."""
        answer = await self._post(body, attempt=attempt)
        if _is_taken(answer):
            return None
        # Receivers say what their words are. A page is a proxy's, and Go's server says nothing of
        # what it writes to who speaks plain HTTP at a port for TLS; but 413 is a bound, whoever has
        # set it.
        is_receivers_word = answer.has_type and not answer.is_page
        if answer.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE or (
            answer.status in _MAY_REFUSE_SAMPLES and is_receivers_word
        ):
            return f"{answer.status} {answer.text}"
        raise self._unavailable(answer)

    async def _post(self, body: bytes, *, attempt: int = 0) -> HttpAnswer:
        # Receivers such as Mimir compute their Retry-After from the attempt.
        numbered = {"Retry-Attempt": str(attempt)} if attempt else {}
        credentials = self._credentials.current()
        try:
            return await self._http.post(
                self._url,
                data=bytes(cramjam.snappy.compress_raw(body)),
                headers={**numbered, **credentials.headers},
                trust=credentials.trust,
            )
        except NoAnswerError as error:
            raise ReceiverUnavailableError(str(error)) from error

    # 5xx is to be sent again by the protocol, 429 may be; other 4xx are not, where they speak of
    # the samples. A 401 or 404 does not: to drop samples for it would lose them for a mistake in
    # the settings.
    def _unavailable(self, answer: HttpAnswer) -> ReceiverUnavailableError:
        return ReceiverUnavailableError(
            explain(answer, url=self._url, setting="remote_write.url"),
            retry_after_seconds=answer.retry_after_seconds,
        )


@asynccontextmanager
async def open_client(
    settings: RemoteWriteSettings, *, readiness: Readiness | None = None
) -> AsyncIterator[RemoteWriteClient]:
    """Open a client; raises SettingsError where a file of its credentials cannot be used.

    A check of `readiness` shows files that change and cannot be used then.
    """
    credentials = watch_credentials(
        settings, section="remote_write", readiness=readiness or Readiness()
    )
    async with open_http(
        headers={**settings.headers, **_PROTOCOL_HEADERS}, timeout_seconds=settings.timeout_seconds
    ) as http:
        yield RemoteWriteClient(http=http, url=settings.url, credentials=credentials)


_BEHIND_NEWER: Final = re.compile(
    r"out[ -]of[ -]order|duplicate[ -](sample|timestamp)", re.IGNORECASE
)


def is_behind_newer(message: str) -> bool:
    """Return whether a receiver says that it has a newer sample of the series, or this one."""
    return bool(_BEHIND_NEWER.search(message))


def is_out_of_order(message: str) -> bool:
    """Return whether a receiver says that a series is beyond a sample's time already."""
    return bool(_OUT_OF_ORDER.search(message))


def _is_taken(answer: HttpAnswer) -> bool:
    # A receiver's 2xx says nothing: a page is a proxy's, as one to log in on.
    return answer.is_success and not answer.is_page
