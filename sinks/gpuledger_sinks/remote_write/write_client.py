"""The seam to a remote-write receiver: one method.

Here live the headers and which answers are the receiver's word on the samples: to put events aside
for any other would empty the stream into the dead letters while an address or a login is wrong. So
what looks like a refusal of samples counts as one only where the same receiver takes a request
without samples: neither a status nor words tell a receiver from what stands in its place. The
login, and whom to trust, are of `credentials`; which version is spoken, of `protocol_in_force`.
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
_WITHOUT_SAMPLES: Final = {version: encode_request(version, ()) for version in Version}
"""A request without series, which those four answer with 2xx."""
_REPORTED: Final = (
    *FAMILIES,
    *map(maxima_of, FAMILIES),
    COUNTERS,
    *HEALTH_FAMILIES,
    *INCIDENT_FAMILIES,
)
METADATA_SECONDS: Final = 300.0
"""How often a receiver of 1.0 is told what metrics mean; 2.0 says it with each series."""


class Payload(Protocol):
    """What can be sent in either version."""

    @property
    def samples(self) -> int:
        """How many samples it has."""

    def encode(self, version: Version) -> bytes:
        """Return the body of a request, not compressed."""


class _Refusal(NamedTuple):
    words: str
    is_sure: bool
    """Whether only a receiver can have said it, and of samples."""
    status: int


class _UnsupportedVersionError(GpuledgerError):
    """The receiver does not speak 2.0; the message says how it shows."""


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
        """Take the receiver; what `metadata` returns is told with samples in 1.0, where it is due.

        The statuses of `final` refuse samples for good, whoever answers so.
        """
        self._final = frozenset(final)
        self._http, self._url, self._credentials = http, url, credentials
        self._protocol = protocol
        self._metadata, self._monotonic = metadata, monotonic
        self._metadata_due_seconds: float | None = None
        self._is_answering = True

    async def write(self, message: Payload, *, attempt: int) -> int:
        """Send samples; return how many of them the receiver says to have written.

        Raises PartialWriteError where it has written some and refuses the others; RejectedError
        where it refuses these samples, takes a request without any, and refuses them again; and
        ReceiverUnavailableError where it is to be tried again: no answer, 5xx, 429, or one that
        says nothing of the samples, as of a wrong address, login or version.
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
            # What refused them may be gone by now, as may what took the request without samples.
            await self._require_empty_taken(version)
            answer = await self._send(message, version, attempt=attempt)
            if isinstance(answer, int):
                return answer
        raise RejectedError(answer.words)

    async def _try_v1(self, message: Payload, refusal: _Refusal, *, attempt: int) -> int | None:
        """Return what is written by 1.0 where 400 may mean that 2.0 is not spoken.

        A receiver of 1.0 may answer so to what it cannot decode. Raises RejectedError where it
        speaks 1.0 and refuses the samples in that, too; returns `None` where it does not speak it.
        """
        if self._protocol.is_confirmed or not self._protocol.may_fall_back:
            return None
        try:
            written = await self._write(message, Version.V1, attempt=attempt)
        except ReceiverUnavailableError:
            return None
        self._protocol.fall_back(f"{refusal.words}, and takes the same in 1.0")
        return written

    async def _require_empty_taken(self, version: Version) -> None:
        answer = await self._post(_WITHOUT_SAMPLES[version], version)
        if not _is_taken(answer):
            raise self._unavailable(answer)
        if version is Version.V2 and not self._is_confirmed_by(answer):
            raise _swallows(answer)

    async def _send(self, message: Payload, version: Version, *, attempt: int) -> "int | _Refusal":
        """Return how many samples are written, or with what words they may be refused."""
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
        """Return with what words samples may be refused; raises what else an answer means."""
        if answer.status in self._final and not written:
            words = f"{answer.status} {answer.text}".rstrip()
            return _Refusal(words, is_sure=True, status=answer.status)
        # Receivers say what their words are. A page is a proxy's, and Go's server says nothing of
        # what it writes to who speaks plain HTTP at a port for TLS; but 413 is a bound, whoever has
        # set it.
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
        """Return whether an answer to a request of 2.0 shows that it was read as such."""
        if samples_written(answer.headers) is None:
            return False
        self._protocol.confirm()
        return True

    def _take_metadata(self) -> bytes:
        """Return what is to be told of the metrics with this request, which tells it."""
        now_seconds = self._monotonic()
        if self._metadata_due_seconds is not None and now_seconds < self._metadata_due_seconds:
            return b""
        # Told once, whatever becomes of it: a receiver that chokes on it takes the next attempt.
        self._metadata_due_seconds = now_seconds + METADATA_SECONDS
        return self._metadata()

    async def _post(self, body: bytes, version: Version, *, attempt: int = 0) -> HttpAnswer:
        # Receivers such as Mimir compute their Retry-After from the attempt.
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
            # It may have been started anew, and forgotten what it was told.
            self._is_answering = True
            self._metadata_due_seconds = None
        return answer

    def _unsupported(
        self, words: str, version: Version, retry_after_seconds: float = 0.0
    ) -> ReceiverUnavailableError:
        return ReceiverUnavailableError(
            f"{shown_url(self._url)}: {words}: it does not speak remote-write {version}: look at"
            " remote_write.protocol",
            retry_after_seconds=retry_after_seconds,
        )

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
    settings: RemoteWriteSettings,
    *,
    readiness: Readiness | None = None,
    monotonic: Callable[[], float] = time.monotonic,
) -> AsyncIterator[RemoteWriteClient]:
    """Open a client; raises SettingsError where a file of its credentials cannot be used.

    A check of `readiness` shows files that change and cannot be used then.
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
    """Return whether a receiver says that it has a newer sample of the series, or this one."""
    return bool(_BEHIND_NEWER.search(message))


def is_out_of_order(message: str) -> bool:
    """Return whether a receiver says that a series is beyond a sample's time already."""
    return bool(_OUT_OF_ORDER.search(message))


def _swallows(answer: HttpAnswer) -> _UnsupportedVersionError:
    return _UnsupportedVersionError(f"{answer.status}, and it does not say what it has written")


def _is_taken(answer: HttpAnswer) -> bool:
    # A receiver's 2xx says nothing: a page is a proxy's, as one to log in on.
    return answer.is_success and not answer.is_page
