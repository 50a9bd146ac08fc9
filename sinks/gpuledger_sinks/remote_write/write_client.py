"""The seam to a remote-write receiver: one method.

Defines the headers, and which responses judge the samples. Any other response must not make dead
letters, because a wrong address or wrong credentials would move the whole stream to the dead-letter
topic. A response that looks like a rejection of samples therefore counts only if the same receiver
accepts a request without samples. Neither a status nor a message distinguishes a receiver from
something else at its address. `credentials` handles authentication and trust, `protocol_in_force`
the version.
"""

import re
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Final, NamedTuple, Protocol

import cramjam

from gpuledger import __version__
from gpuledger.errors import GpuledgerError
from gpuledger.ledger.families import FAMILIES, INCIDENT_FAMILIES
from gpuledger.ledger.health import HEALTH_FAMILIES
from gpuledger.ledger.interval_values import maxima_of
from gpuledger.ledger.usage import COUNTERS
from gpuledger.runtime import CheckSeverity, Readiness
from gpuledger.runtime.http.client import HttpAnswer, HttpClient, NoAnswerError, open_http
from gpuledger.settings.secret import shown_url
from gpuledger_sinks.credentials import ReceiverCredentials, explain, watch_credentials
from gpuledger_sinks.errors import PartialWriteError, ReceiverUnavailableError, RejectedError
from gpuledger_sinks.metrics import measure_request
from gpuledger_sinks.registry import REMOTE_WRITE
from gpuledger_sinks.remote_write.active_series import metrics_of
from gpuledger_sinks.remote_write.protocol_in_force import ProtocolInForce, samples_written
from gpuledger_sinks.remote_write.wire import Version, encode_metadata, encode_request
from gpuledger_sinks.settings import RemoteWriteSettings

_PROTOCOL_HEADERS: Final = {"Content-Encoding": "snappy", "User-Agent": f"gpuledger/{__version__}"}
_VERSION_HEADERS: Final = {
    Version.V1: {
        "Content-Type": "application/x-protobuf",
        "X-Prometheus-Remote-Write-Version": "0.1.0",
    },
    Version.V2: {
        "Content-Type": "application/x-protobuf;proto=io.prometheus.write.v2.Request",
        "X-Prometheus-Remote-Write-Version": "2.0.0",
    },
}
# Prometheus, Mimir, Thanos and VictoriaMetrics reject samples with these, and proxies a large body.
# Any other status concerns the address, the credentials or the protocol, and may change.
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
"""The wording of Prometheus, Mimir and Thanos, which nothing in front of them uses."""
_WITHOUT_SAMPLES: Final = {version: encode_request(version, ()) for version in Version}
"""A request without series, which these four receivers answer with 2xx."""
_REPORTED: Final = (
    *FAMILIES,
    *map(maxima_of, FAMILIES),
    COUNTERS,
    *HEALTH_FAMILIES,
    *INCIDENT_FAMILIES,
)
METADATA_SECONDS: Final = 300.0
"""Interval at which metadata is sent to a receiver of 1.0; 2.0 sends it with each series."""


class Payload(Protocol):
    """Samples that can be sent in either version."""

    @property
    def samples(self) -> int:
        """The number of samples."""

    def encode(self, version: Version) -> bytes:
        """Return the uncompressed body of a request."""


class _Refusal(NamedTuple):
    words: str
    is_sure: bool
    """Whether only a receiver can have sent it, and because of the samples."""
    status: int


class _UnsupportedVersionError(GpuledgerError):
    """The receiver does not support 2.0; the message shows why."""


class RemoteWriteClient:
    """Writes to one receiver."""

    def __init__(
        self,
        *,
        http: HttpClient,
        url: str,
        credentials: ReceiverCredentials,
        protocol: ProtocolInForce,
        metadata: Callable[[], bytes] = bytes,
        final: Collection[int] = (),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the receiver; in 1.0, the result of `metadata` is added to samples when due.

        A response status in `final` rejects samples permanently, whatever sent it.
        """
        self._final = frozenset(final)
        self._http, self._url, self._credentials = http, url, credentials
        self._protocol = protocol
        self._metadata, self._monotonic = metadata, monotonic
        self._metadata_due_seconds: float | None = None
        self._is_answering = True

    async def write(self, message: Payload, *, attempt: int) -> int:
        """Send samples; return how many of them the receiver reports as written.

        Raises PartialWriteError if it has written some and rejects the others. Raises RejectedError
        if it rejects these samples, accepts a request without any, and rejects them again. Raises
        ReceiverUnavailableError if they must be sent again: without a response, or with 5xx, 429 or
        another one that does not judge the samples, such as for a wrong address or version.
        """
        try:
            return await self._write(message, self._protocol.version, attempt=attempt)
        except _UnsupportedVersionError as error:
            if not self._protocol.may_fall_back:
                raise self._unsupported(str(error), Version.V2) from error
            self._protocol.fall_back(str(error))
            return await self._write(message, Version.V1, attempt=attempt)

    async def _write(self, message: Payload, version: Version, *, attempt: int) -> int:
        answer = await self._send(message, version, attempt=attempt)
        if isinstance(answer, int):
            return answer
        is_perhaps_v1 = not answer.is_sure or answer.status in self._final
        if is_perhaps_v1 and version is Version.V2 and answer.status == HTTPStatus.BAD_REQUEST:
            written = await self._try_v1(message, answer, attempt=attempt)
            if written is not None:
                return written
        if not answer.is_sure:
            # The cause may be gone by now, or the receiver that accepted the empty request.
            await self._require_empty_taken(version)
            answer = await self._send(message, version, attempt=attempt)
            if isinstance(answer, int):
                return answer
        raise RejectedError(answer.words)

    async def _try_v1(self, message: Payload, refusal: _Refusal, *, attempt: int) -> int | None:
        """Write by 1.0, because 400 may mean that 2.0 is not supported; return the samples written.

        A receiver of 1.0 may answer 400 to a body that it cannot decode. Raises RejectedError if
        it supports 1.0 and rejects the samples in it as well; returns `None` if it does not.
        """
        if self._protocol.is_confirmed or not self._protocol.may_fall_back:
            return None
        try:
            written = await self._write(message, Version.V1, attempt=attempt)
        except ReceiverUnavailableError:
            return None
        self._protocol.fall_back(f"{refusal.words}; the receiver accepts the same samples in 1.0")
        return written

    async def _require_empty_taken(self, version: Version) -> None:
        answer = await self._post(_WITHOUT_SAMPLES[version], version)
        if not _is_taken(answer):
            raise self._unavailable(answer)
        if version is Version.V2 and not self._is_confirmed_by(answer):
            raise _swallows(answer)

    async def _send(self, message: Payload, version: Version, *, attempt: int) -> "int | _Refusal":
        """Return how many samples are written, or the message with which they may be rejected."""
        body = message.encode(version)
        if version is Version.V1:
            body += self._take_metadata()
        answer = await self._post(body, version, attempt=attempt)
        written = samples_written(answer.headers) if version is Version.V2 else None
        if version is Version.V2 and not self._is_confirmed_by(answer):
            if _is_taken(answer):
                raise _swallows(answer)
            if answer.status == HTTPStatus.UNSUPPORTED_MEDIA_TYPE:
                raise _UnsupportedVersionError(f"{answer.status} {answer.text}".rstrip())
        if _is_taken(answer):
            return message.samples if written is None else min(written, message.samples)
        if version is Version.V1 and answer.status == HTTPStatus.UNSUPPORTED_MEDIA_TYPE:
            words = f"{answer.status} {answer.text}".rstrip()
            if not self._protocol.may_fall_back:
                raise self._unsupported(words, version, answer.retry_after_seconds)
            self._protocol.return_to_v2(words)
        return self._refusal(answer, written=written, samples=message.samples)

    def _refusal(
        self, answer: HttpAnswer, *, written: int | None, samples: int
    ) -> "int | _Refusal":
        """Return the possible rejection of samples; raises an error for any other response."""
        if answer.status in self._final and not written:
            words = f"{answer.status} {answer.text}".rstrip()
            return _Refusal(words, is_sure=True, status=answer.status)
        # Receivers declare a content type. A page comes from a proxy, and Go's server declares none
        # to clients that use plain HTTP at a TLS port. 413 is a limit, whoever has set it.
        is_receivers_word = written is not None or (answer.has_type and not answer.is_page)
        if answer.status != HTTPStatus.REQUEST_ENTITY_TOO_LARGE and not (
            answer.status in _MAY_REFUSE_SAMPLES and is_receivers_word
        ):
            raise self._unavailable(answer)
        words = f"{answer.status} {answer.text}"
        if written is not None and written >= samples:
            return samples
        if written:
            raise PartialWriteError(words, written=written, samples=samples)
        is_sure = written is not None or is_out_of_order(words)
        return _Refusal(words, is_sure=is_sure, status=answer.status)

    def _is_confirmed_by(self, answer: HttpAnswer) -> bool:
        """Return whether a response shows that the request was read as 2.0."""
        if samples_written(answer.headers) is None:
            return False
        self._protocol.confirm()
        return True

    def _take_metadata(self) -> bytes:
        """Return the metadata to send with this request, and mark it as sent."""
        now_seconds = self._monotonic()
        if self._metadata_due_seconds is not None and now_seconds < self._metadata_due_seconds:
            return b""
        # Sent once even if the request fails: a receiver that fails on it accepts the next attempt.
        self._metadata_due_seconds = now_seconds + METADATA_SECONDS
        return self._metadata()

    async def _post(self, body: bytes, version: Version, *, attempt: int = 0) -> HttpAnswer:
        # Some receivers, such as Mimir, compute Retry-After from the attempt.
        numbered = {"Retry-Attempt": str(attempt)} if attempt else {}
        try:
            with measure_request(REMOTE_WRITE.name, len(body)):
                answer = await self._credentials.post(
                    self._http,
                    self._url,
                    data=bytes(cramjam.snappy.compress_raw(body)),
                    headers={**_VERSION_HEADERS[version], **numbered},
                )
        except NoAnswerError as error:
            self._is_answering = False
            raise ReceiverUnavailableError(str(error)) from error
        if not self._is_answering:
            # It may have been restarted and have lost the metadata.
            self._is_answering = True
            self._metadata_due_seconds = None
        return answer

    def _unsupported(
        self, words: str, version: Version, retry_after_seconds: float = 0.0
    ) -> ReceiverUnavailableError:
        return ReceiverUnavailableError(
            f"{shown_url(self._url)}: {words}: no support for remote-write {version}; check"
            " remote_write.protocol",
            retry_after_seconds=retry_after_seconds,
        )

    # The protocol requires retries after 5xx and allows them after 429. Other 4xx must not be
    # retried if they judge the samples. 401 or 404 do not: dropping samples because of them would
    # lose data because of wrong settings.
    def _unavailable(self, answer: HttpAnswer) -> ReceiverUnavailableError:
        return ReceiverUnavailableError(
            explain(answer, url=self._url, setting="remote_write.url"),
            retry_after_seconds=answer.retry_after_seconds,
        )


@asynccontextmanager
async def open_client(
    settings: RemoteWriteSettings,
    *,
    readiness: Readiness | None = None,
    monotonic: Callable[[], float] = time.monotonic,
) -> AsyncIterator[RemoteWriteClient]:
    """Open a client; raises SettingsError if a file of its credentials cannot be used.

    A check of `readiness` reports files that later change and cannot be used.
    """
    readiness = readiness or Readiness()
    credentials = watch_credentials(
        settings, section="remote_write", readiness=readiness, sigv4=settings.sigv4
    )
    check = readiness.check("remote_write.protocol", severity=CheckSeverity.WARNING)
    async with open_http(
        headers={**settings.headers, **_PROTOCOL_HEADERS}, timeout_seconds=settings.timeout_seconds
    ) as http:
        yield RemoteWriteClient(
            http=http,
            final=settings.final_statuses,
            url=settings.url,
            credentials=credentials,
            protocol=ProtocolInForce(settings.protocol, check=check),
            monotonic=monotonic,
            metadata=_own_metadata,
        )


def _own_metadata() -> bytes:
    return encode_metadata(metric for family in _REPORTED for metric in metrics_of(family))


_BEHIND_NEWER: Final = re.compile(
    r"out[ -]of[ -]order|duplicate[ -](sample|timestamp)", re.IGNORECASE
)


def is_behind_newer(message: str) -> bool:
    """Return whether a message reports a newer sample of the series, or the same one."""
    return bool(_BEHIND_NEWER.search(message))


def is_out_of_order(message: str) -> bool:
    """Return whether a message reports that a sample is out of order, out of bounds or too old."""
    return bool(_OUT_OF_ORDER.search(message))


def _swallows(answer: HttpAnswer) -> _UnsupportedVersionError:
    return _UnsupportedVersionError(f"{answer.status} without a report of written samples")


def _is_taken(answer: HttpAnswer) -> bool:
    # A receiver's 2xx has no page: a page is a proxy's, such as a login page.
    return answer.is_success and not answer.is_page
