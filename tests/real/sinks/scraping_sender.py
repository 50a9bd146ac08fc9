"""A sender for the public remote-write suites: it scrapes a page and sends its samples.

Run it as `python -m tests.real.sinks.scraping_sender PAGE RECEIVER PROTOCOL JOB`. Only scraping is
implemented here, as far as the suites require it: times in the page and exemplars are ignored.
Series, requests, retries and the protocol are those of the sink.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from functools import cache
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import msgspec
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gpuledger.bus.protocol import Record
from gpuledger.clock import NS_PER_SECOND, SystemClock
from gpuledger.keys import key_in
from gpuledger.ledger.families import Family, FamilyMetric
from gpuledger.ledger.series import SeriesGroup, SeriesValues
from gpuledger.runtime import Readiness
from gpuledger_sinks.errors import RejectedError, retry_receiver
from gpuledger_sinks.remote_write.active_series import ActiveSeries
from gpuledger_sinks.remote_write.node_intervals import IntervalSamples
from gpuledger_sinks.remote_write.request_writer import Writer
from gpuledger_sinks.remote_write.write_client import open_client
from gpuledger_sinks.settings import RemoteWriteSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric
    from prometheus_client.samples import Sample

INTERVAL_SECONDS = 1.0
OPENMETRICS = "application/openmetrics-text"
FINAL_STATUSES = [status for status in range(400, 500) if status not in {415, 429}]
"""The suites expect no retries after any other 4xx.

The sink does retry these, until its address and login are right.
"""
SCRAPE = Family(
    labels=(),
    metrics=(
        FamilyMetric(name="up", help="Whether the scrape succeeded."),
        FamilyMetric(name="scrape_duration_seconds", help="Duration of the scrape."),
        FamilyMetric(name="scrape_samples_scraped", help="Number of samples in the page."),
    ),
)
"""Series of each scrape, as Prometheus names them."""
NO_NODE = key_in("", "")
"""Empty labels are not sent."""
PARTS = {"le", "quantile"}
NO_RECORD = Record("", 0, 0, 0, None, None)

ScrapedSample = tuple[SeriesGroup, float, int | None]
"""Series, value, and start in milliseconds."""


async def send_pages(
    page: str, receiver: str, *, protocol: str, job: str, interval_seconds: float = INTERVAL_SECONDS
) -> None:
    """Scrape a page and send its samples until cancelled."""
    settings = msgspec.convert({"url": receiver, "protocol": protocol}, RemoteWriteSettings)
    settings = msgspec.structs.replace(settings, final_statuses=FINAL_STATUSES)
    target = {"job": job, "instance": urlsplit(page).netloc}
    series, clock = ActiveSeries(external_labels=target), SystemClock()
    async with open_client(settings) as client:
        check = Readiness().check("receiver")
        retry = retry_receiver(sink="remote_write", check=check, clock=clock)
        writer = Writer(client=client, retry=retry, clock=clock, poison_seconds=0)
        while True:
            time_ns = time.time_ns()
            is_up = True
            try:
                scraped = await asyncio.to_thread(scrape, page, target=frozenset(target))
            except (OSError, ValueError):
                is_up, scraped = False, []
            of_scrape = (float(is_up), (time.time_ns() - time_ns) / NS_PER_SECOND, len(scraped))
            values: dict[SeriesGroup, SeriesValues] = {
                group: (value,) for group, value, _ in scraped
            }
            samples = IntervalSamples(
                node=NO_NODE,
                time_ns=time_ns,
                values={**values, SeriesGroup(SCRAPE, ()): of_scrape},
                starts_ms={group: (start,) for group, _, start in scraped if start is not None},
                record=NO_RECORD,
            )
            try:
                await writer.write(series.encode(samples), ticks=1)
            except RejectedError as error:
                sys.stderr.write(f"{error}\n")
            await asyncio.sleep(interval_seconds)


def scrape(page: str, *, target: frozenset[str]) -> list[ScrapedSample]:
    """Return the samples of a page; raises OSError and ValueError."""
    with urlopen(Request(page, headers={"Accept": OPENMETRICS}), timeout=5) as answer:  # noqa: S310  # the tests' own page
        kind, text = answer.headers.get_content_type(), answer.read().decode()
    parse = parse_openmetrics if kind == OPENMETRICS else parse_text
    return [one for metric in parse(text) for one in _samples_of(metric, text, target)]


def _samples_of(metric: Metric, text: str, target: frozenset[str]) -> Iterator[ScrapedSample]:
    created = f"{metric.name}_created"
    starts = {_key(sample): sample.value for sample in metric.samples if sample.name == created}
    # The parser of the text format appends `_total` to the names of counters.
    is_plain = f"# TYPE {metric.name} counter\n" in text and f"{metric.name}_total" not in text
    for sample in metric.samples:
        if sample.name == created:
            continue
        name = metric.name if is_plain else sample.name
        labels = {
            f"exported_{label}" if label in target else label: value
            for label, value in sample.labels.items()
        }
        family = _family(name, metric.type, metric.documentation, tuple(labels))
        start = starts.get(_key(sample))
        start_ms = None if start is None else round(start * 1000)
        yield SeriesGroup(family, tuple(labels.values())), sample.value, start_ms


def _key(sample: Sample) -> frozenset[tuple[str, str]]:
    return frozenset(label for label in sample.labels.items() if label[0] not in PARTS)


@cache
def _family(name: str, kind: str, help_text: str, labels: tuple[str, ...]) -> Family:
    return Family(labels=labels, metrics=(FamilyMetric(name=name, help=help_text, kind=kind),))


async def main() -> None:
    page, receiver, protocol, job = sys.argv[1:]
    sending = asyncio.create_task(send_pages(page, receiver, protocol=protocol, job=job))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, sending.cancel)
    await asyncio.wait([sending])
    if not sending.cancelled():
        sending.result()


if __name__ == "__main__":
    asyncio.run(main())
