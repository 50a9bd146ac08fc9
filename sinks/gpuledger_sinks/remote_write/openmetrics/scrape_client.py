"""The seam to the page that is scraped: one method."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import urlsplit

from gpuledger import __version__
from gpuledger.errors import GpuledgerError
from gpuledger.runtime import Readiness
from gpuledger.runtime.http.client import HttpClient, NoAnswerError, TooLargeError, open_http
from gpuledger.runtime.tasks import in_daemon_thread
from gpuledger.settings.secret import shown_url
from gpuledger_sinks.credentials import ReceiverCredentials, explain, watch_credentials
from gpuledger_sinks.remote_write.openmetrics.exposition import (
    ACCEPTED,
    TEXT,
    Exposition,
    NoExpositionError,
    parse_exposition,
)
from gpuledger_sinks.settings import OpenMetricsSettings

_SECTION: Final = "remote_write.openmetrics"
_PORTS: Final = {"http": 80, "https": 443}


class ScrapeError(GpuledgerError):
    """A scrape failed; the message says why."""

    def __init__(self, message: str, *, outcome: str) -> None:
        super().__init__(message)
        self.outcome = outcome
        """What it came to, as the metrics call it."""


class ScrapeClient:
    """Scrapes one page."""

    def __init__(
        self, *, http: HttpClient, settings: OpenMetricsSettings, credentials: ReceiverCredentials
    ) -> None:
        self._http, self._settings, self._credentials = http, settings, credentials
        self._url = settings.url

    async def scrape(self) -> tuple[Exposition, int]:
        """Return what the page says, and how many bytes it has; raises ScrapeError."""
        try:
            answer, body = await self._credentials.get(
                self._http,
                self._url,
                headers={"Accept-Encoding": "gzip"},
                max_bytes=self._settings.max_body_bytes,
            )
        except NoAnswerError as error:
            raise ScrapeError(str(error), outcome="unreachable") from error
        except TooLargeError as error:
            words = f"{error}: look at {_SECTION}.max_body_bytes"
            raise ScrapeError(words, outcome="too_large") from error
        if not answer.is_success:
            words = explain(answer, url=self._url, setting=f"{_SECTION}.url")
            raise ScrapeError(words, outcome="refused")
        content_type = answer.content_type if answer.has_type else TEXT
        try:
            # In a thread: a large page takes seconds, and a signal is heeded meanwhile.
            exposition = await in_daemon_thread(
                lambda: parse_exposition(
                    body, content_type=content_type, max_samples=self._settings.max_samples
                )
            )
        except NoExpositionError as error:
            words = f"{shown_url(self._url)}: {error}"
            raise ScrapeError(words, outcome="unreadable") from error
        return exposition, len(body)


@asynccontextmanager
async def open_scrape_client(
    settings: OpenMetricsSettings, *, readiness: Readiness
) -> AsyncIterator[ScrapeClient]:
    """Open a client; raises SettingsError where a file of its credentials cannot be used."""
    credentials = watch_credentials(settings, section=_SECTION, readiness=readiness)
    headers = {
        "Accept": ACCEPTED,
        "User-Agent": f"gpuledger/{__version__}",
        "X-Prometheus-Scrape-Timeout-Seconds": f"{settings.deadline_seconds:g}",
    }
    async with open_http(headers=headers, timeout_seconds=settings.deadline_seconds) as http:
        yield ScrapeClient(http=http, settings=settings, credentials=credentials)


def instance_of(url: str) -> str:
    """Return the label `instance` of a page: its host and port, where that is not said its own."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{host}:{parts.port or _PORTS[parts.scheme]}"
