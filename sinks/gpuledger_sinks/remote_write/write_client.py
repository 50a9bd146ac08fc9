"""The client of a remote-write receiver.

Defines the headers, and which responses judge the samples. Only such responses may lead to dead
letters; otherwise a wrong address or wrong credentials would move the whole stream to the
dead-letter topic. Neither a status nor a message proves that the receiver itself has answered. A
response that looks like a rejection of samples therefore counts only if the same address accepts a
request without samples. `credentials` handles authentication and trust, `protocol_in_force` the
version.
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
# Prometheus, Mimir, Thanos and VictoriaMetrics reject samples with these statuses; proxies reject
# large requests with 413. Any other status concerns the address, the credentials or the protocol,
# and retries may succeed.
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
"""Matches messages of Prometheus, Mimir and Thanos about samples that are out of order, duplicate
or too old. No proxy uses this wording."""
_WITHOUT_SAMPLES: Final = {version: encode_request(version, ()) for version in Version}
"""For each version, a request without series. Prometheus, Mimir, Thanos and VictoriaMetrics answer
it with 2xx."""
_REPORTED: Final = (
    *FAMILIES,
    *map(maxima_of, FAMILIES),
    COUNTERS,
    *HEALTH_FAMILIES,
    *INCIDENT_FAMILIES,
)
METADATA_SECONDS: Final = 300.0
"""Interval at which metadata is sent in 1.0; 2.0 requests contain it with each series."""


class Payload(Protocol):
    """Samples that can be sent in either version."""

    @property
    def samples(self) -> int:
        """The number of samples."""

    def encode(self, version: Version) -> bytes:
        """Return the uncompressed body of a request with these samples."""


class _Refusal(NamedTuple):
    words: str
    is_sure: bool
    """Whether the rejection certainly comes from the receiver and concerns the samples."""
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
        """Write to the receiver at `url`; in 1.0, add the result of `metadata` to samples when due.

        A response status in `final` rejects samples permanently, even if a proxy has sent it.
        """
        self._final = frozenset(final)
        self._http, self._url, self._credentials = http, url, credentials
        self._protocol = protocol
        self._metadata, self._monotonic = metadata, monotonic
        self._metadata_due_seconds: float | None = None
        self._is_answering = True

    async def write(self, message: Payload, *, attempt: int) -> int:
        """Send samples; return how many were written.

        In 1.0, the receiver does not report this, so all samples count as written.

        Raises PartialWriteError if the receiver has written only a part and rejects the rest, and
        RejectedError if it rejects these samples permanently. If the response does not prove that
        the receiver itself rejects the samples, it must first accept a request without samples and
        reject these samples again.

        Raises ReceiverUnavailableError if the samples must be sent again. This is the case without
        a response, after 5xx or 429, and after any other response that does not judge the samples,
        for example because of a wrong address or version.
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
            # Sent again, because the cause of the first rejection may no longer exist.
            await self._require_empty_taken(version)
            answer = await self._send(message, version, attempt=attempt)
            if isinstance(answer, int):
                return answer
        raise RejectedError(answer.words)

    async def _try_v1(self, message: Payload, refusal: _Refusal, *, attempt: int) -> int | None:
        """Write in 1.0 after a 400, which may mean that 2.0 is not supported.

        A receiver that supports only 1.0 may answer 400 to a body that it cannot decode. Returns
        the number of samples written, or `None` if 1.0 may not be tried or the receiver is
        unavailable in 1.0. Raises RejectedError if the receiver rejects the samples in 1.0 as well.
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
        """Send samples once; return how many were written, or their possible rejection."""
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
        """Return the possible rejection of samples, or their number if all were written.

        Raises PartialWriteError if a part was written, and ReceiverUnavailableError if the response
        does not judge the samples.
        """
        if answer.status in self._final and not written:
            words = f"{answer.status} {answer.text}".rstrip()
            return _Refusal(words, is_sure=True, status=answer.status)
        # Receivers declare a content type. An HTML page comes from a proxy. Go's server declares no
        # content type when a client uses plain HTTP at a TLS port. 413 may also come from a proxy.
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
        """Return whether the receiver reports samples written, and therefore supports 2.0."""
        if samples_written(answer.headers) is None:
            return False
        self._protocol.confirm()
        return True

    def _take_metadata(self) -> bytes:
        """Return the metadata to send with this request, and mark it as sent; empty if not due."""
        now_seconds = self._monotonic()
        if self._metadata_due_seconds is not None and now_seconds < self._metadata_due_seconds:
            return b""
        # Marked as sent even if the request fails, so that a receiver that cannot read metadata
        # accepts the next attempt.
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
            # The receiver may have been restarted and have lost the metadata.
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
    # retried if they judge the samples. 401 and 404 do not judge samples; dropping samples because
    # of them would lose data through wrong settings.
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
    """Return whether a message reports that the receiver already has this sample or a newer one."""
    return bool(_BEHIND_NEWER.search(message))


def is_out_of_order(message: str) -> bool:
    """Return whether a message reports that a sample is out of order, out of bounds or too old."""
    return bool(_OUT_OF_ORDER.search(message))


def _swallows(answer: HttpAnswer) -> _UnsupportedVersionError:
    return _UnsupportedVersionError(f"{answer.status} without a report of written samples")


def _is_taken(answer: HttpAnswer) -> bool:
    # A 2xx of the receiver contains no HTML page; a page comes from a proxy, such as a login page.
    return answer.is_success and not answer.is_page
