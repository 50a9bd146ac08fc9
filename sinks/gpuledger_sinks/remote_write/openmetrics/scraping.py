"""A remote-write sink that scrapes a page in the place of Kafka, to try a receiver.

What is scraped goes through the encoder, the client and the retries of the sink. It is scraped on
time, whatever the receiver does: what waits for it is bounded in bytes, and beyond that scrapes are
skipped and counted. Nothing of it is kept: what waits when the process ends is lost, which is said.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Final

import structlog

from gpuledger.clock import NS_PER_MS, NS_PER_SECOND, Clock, SystemClock
from gpuledger.runtime import Check, CheckSeverity, Readiness
from gpuledger.runtime.logs import Repeats
from gpuledger.runtime.tasks import end_tasks
from gpuledger.settings.secret import shown_url
from gpuledger_sinks.errors import PartialWriteError, RejectedError, retry_receiver
from gpuledger_sinks.metrics import (
    SCRAPES_TOTAL,
    SENT_TOTAL,
    UNWRITTEN_SAMPLES_TOTAL,
    WAITING_BYTES,
    count_dropped,
    count_scrapes_from_zero,
)
from gpuledger_sinks.registry import REMOTE_WRITE
from gpuledger_sinks.remote_write.openmetrics.exposition import Exposition
from gpuledger_sinks.remote_write.openmetrics.scrape_client import (
    ScrapeClient,
    ScrapeError,
    instance_of,
    open_scrape_client,
)
from gpuledger_sinks.remote_write.openmetrics.scraped_series import (
    EncodedScrape,
    Scrape,
    ScrapedSeries,
    ScrapeRequest,
    TimeLimits,
)
from gpuledger_sinks.remote_write.request_writer import Writer
from gpuledger_sinks.remote_write.wire import encode_metadata
from gpuledger_sinks.remote_write.write_client import is_out_of_order, open_client
from gpuledger_sinks.settings import RemoteWriteSettings

NAME: Final = REMOTE_WRITE.name
FINAL_STATUSES: Final = frozenset(range(400, 500)) - {
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    HTTPStatus.TOO_MANY_REQUESTS,
}
"""What is not sent again, to the letter of the protocol: nothing is lost by it but a scrape."""
SCRAPE_BYTES: Final = 1_000
"""What a scrape takes in memory beside its page."""
_END_SECONDS: Final = 1.5
"""How long what waits may still be sent when the process ends."""
_CANCEL_SECONDS: Final = 0.5
_MS_PER_SECOND: Final = 1_000
_log = structlog.get_logger(__name__)
_repeats: Final = Repeats()


async def run_scraping(
    settings: RemoteWriteSettings, readiness: Readiness, *, clock: Clock | None = None
) -> None:
    """Scrape the page and send what it says, until cancelled.

    Raises UserError for settings that cannot be used.
    """
    clock = clock or SystemClock()
    count_scrapes_from_zero(NAME, REMOTE_WRITE.drop_reasons)
    series = ScrapedSeries(
        job=settings.openmetrics.job,
        instance=instance_of(settings.openmetrics.url),
        external_labels=settings.external_labels,
        limits=TimeLimits(
            max_ahead_ms=round(settings.max_future_seconds * _MS_PER_SECOND),
            max_age_ms=round(settings.max_age_seconds * _MS_PER_SECOND) or None,
        ),
    )
    async with (
        open_scrape_client(settings.openmetrics, readiness=readiness) as client,
        _open_sender(settings, readiness, clock=clock, series=series) as sender,
    ):
        _log.info(
            "scraping_started",
            target=shown_url(settings.openmetrics.url),
            url=shown_url(settings.url),
        )
        check = readiness.check("remote_write.openmetrics")
        check.ok("nothing scraped yet")
        await Scraper(
            client=client,
            series=series,
            sender=sender,
            interval_seconds=settings.openmetrics.interval_seconds,
            max_waiting_bytes=settings.queue_bytes,
            check=check,
            clock=clock,
        ).run()


class ScrapeSender:
    """Sends scrapes one after the other, each in its requests; bounded by who adds to it."""

    def __init__(
        self, *, writer: Writer, receiver: str, check: Check, samples_per_request: int
    ) -> None:
        self._writer, self._receiver, self._check = writer, receiver, check
        self._samples_per_request = samples_per_request
        self._waiting: deque[tuple[EncodedScrape, int]] = deque()
        self._added = asyncio.Event()
        self._is_ending = False
        self._task = asyncio.create_task(self._run())
        self.waiting_bytes = 0

    def add(self, scrape: EncodedScrape, *, size_bytes: int) -> None:
        """Send a scrape behind those that wait; raises what has ended the sending, a defect."""
        if self._task.done():
            self._task.result()
        self._waiting.append((scrape, size_bytes))
        self.waiting_bytes += size_bytes
        self._added.set()

    async def end(self) -> None:
        """Let what waits be sent for a moment; log how much is left of it."""
        self._is_ending = True
        self._added.set()
        await end_tasks(self._task, grace_seconds=_END_SECONDS, seconds=_CANCEL_SECONDS)
        if self._waiting:
            samples = sum(len(scrape.timed) for scrape, _ in self._waiting)
            _log.warning("scrapes_discarded", count=len(self._waiting), samples=samples)

    async def _run(self) -> None:
        while self._waiting or not self._is_ending:
            if not self._waiting:
                self._added.clear()
                await self._added.wait()
                continue
            scrape, size_bytes = self._waiting[0]
            for request in scrape.requests(self._samples_per_request):
                await self._send(request)
            self._waiting.popleft()
            self.waiting_bytes -= size_bytes

    async def _send(self, request: ScrapeRequest) -> None:
        written = 0
        try:
            written = await self._writer.write(request, ticks=1)
        except PartialWriteError as error:
            written = error.written
            self._tell_refusal(error, "partial", samples=request.samples - written)
        except RejectedError as error:
            reason = "out_of_order" if is_out_of_order(str(error)) else "rejected"
            self._tell_refusal(error, reason, samples=request.samples)
            return
        SENT_TOTAL.labels(sink=NAME).inc(written)
        UNWRITTEN_SAMPLES_TOTAL.labels(sink=NAME).inc(request.samples - written)

    def _tell_refusal(self, error: RejectedError, reason: str, *, samples: int) -> None:
        count_dropped(NAME, reason, samples)
        self._check.failed(f"rejected: {self._receiver}: {error}")
        if number := _repeats.count("samples", more=samples):
            _log.warning("samples_rejected", count=number, error=str(error))


@asynccontextmanager
async def _open_sender(
    settings: RemoteWriteSettings, readiness: Readiness, *, clock: Clock, series: ScrapedSeries
) -> AsyncIterator[ScrapeSender]:
    check = readiness.check("remote_write.receiver", severity=CheckSeverity.WARNING)
    check.ok("nothing sent yet")
    async with open_client(
        settings,
        readiness=readiness,
        metadata=lambda: encode_metadata(series.metrics()),
        final=FINAL_STATUSES,
    ) as client:
        receiver = shown_url(settings.url)
        writer = Writer(
            client=client,
            retry=retry_receiver(sink=NAME, check=check, clock=clock, receiver=receiver),
            clock=clock,
            poison_seconds=settings.poison_seconds,
        )
        sender = ScrapeSender(
            writer=writer,
            receiver=receiver,
            check=check,
            samples_per_request=settings.samples_per_request,
        )
        WAITING_BYTES.labels(sink=NAME).set_function(lambda: sender.waiting_bytes)
        try:
            yield sender
        finally:
            await sender.end()


class Scraper:
    """Scrapes a target at multiples of the interval from its start on."""

    def __init__(
        self,
        *,
        client: ScrapeClient,
        series: ScrapedSeries,
        sender: ScrapeSender,
        interval_seconds: float,
        max_waiting_bytes: int,
        check: Check,
        clock: Clock,
    ) -> None:
        self._client, self._series, self._sender = client, series, sender
        self._interval_ns = round(interval_seconds * NS_PER_SECOND)
        self._max_waiting_bytes = max_waiting_bytes
        self._check, self._clock = check, clock

    async def run(self) -> None:
        """Scrape until cancelled."""
        due_ns = self._clock.monotonic_ns()
        while True:
            await self._scrape_unless_full()
            due_ns += self._interval_ns
            late_ns = self._clock.monotonic_ns() - due_ns
            if late_ns >= self._interval_ns:
                missed = late_ns // self._interval_ns
                _count("skipped", missed)
                due_ns += missed * self._interval_ns
            await self._clock.sleep(max(0, due_ns - self._clock.monotonic_ns()) / NS_PER_SECOND)

    async def _scrape_unless_full(self) -> None:
        if (waiting_bytes := self._sender.waiting_bytes) >= self._max_waiting_bytes:
            _count("skipped")
            self._check.failed(
                f"not scraped: {waiting_bytes} bytes wait for the receiver, as many as"
                " remote_write.queue_bytes allows"
            )
            return
        time_ms = self._clock.time_ns() // NS_PER_MS
        begun_ns = self._clock.monotonic_ns()
        exposition, size_bytes = await self._scrape()
        scrape = Scrape(
            time_ms=time_ms,
            duration_seconds=(self._clock.monotonic_ns() - begun_ns) / NS_PER_SECOND,
            exposition=exposition,
        )
        encoded = self._series.add(scrape)
        for reason, count in encoded.dropped.items():
            count_dropped(NAME, reason, count)
            if number := _repeats.count(reason, more=count):
                _log.warning("scraped_samples_dropped", reason=reason, count=number)
        self._sender.add(encoded, size_bytes=size_bytes + SCRAPE_BYTES)

    async def _scrape(self) -> tuple[Exposition | None, int]:
        """Return what the page says, `None` where the scrape failed, and its bytes."""
        try:
            exposition, size_bytes = await self._client.scrape()
        except ScrapeError as error:
            _count(error.outcome)
            self._check.failed(str(error))
            return None, 0
        _count("taken")
        self._check.ok(f"{len(exposition.samples)} samples")
        return exposition, size_bytes


def _count(outcome: str, count: int = 1) -> None:
    SCRAPES_TOTAL.labels(sink=NAME, outcome=outcome).inc(count)
