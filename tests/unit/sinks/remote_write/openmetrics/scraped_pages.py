"""Pages to scrape, and a sink within the test that scrapes them."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from prometheus_client import REGISTRY

from gpuledger.runtime import Readiness
from gpuledger_simulator.clock import ScaledClock
from gpuledger_sinks.remote_write.openmetrics.exposition import TEXT
from gpuledger_sinks.remote_write.openmetrics.scraping import run_scraping
from gpuledger_sinks.settings import OpenMetricsSettings, RemoteWriteSettings
from tests.unit.sinks.builders import running
from tests.unit.sinks.receiver import Answer, Receiver
from tests.unit.sinks.remote_write.oracle import Series, parse_compressed

SPEED = 100
"""How many seconds of the sink's clock are one: what it scrapes may take long on a busy machine."""
INTERVAL_SECONDS = 10.0


@dataclass
class Page:
    """A page that says one text after the other, the last one again and again."""

    texts: list[str]
    content_type: str = TEXT
    url: str = ""
    asked: list[web.Request] = field(default_factory=list)
    hangs: asyncio.Event | None = None
    """Until it is set, nothing is answered."""

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(request)
        if self.hangs is not None:
            await self.hangs.wait()
        text = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]
        return web.Response(body=text.encode(), headers={"Content-Type": self.content_type})


@asynccontextmanager
async def showing(*texts: str, content_type: str = TEXT) -> AsyncIterator[Page]:
    page = Page(list(texts), content_type)
    app = web.Application()
    app.router.add_get("/metrics", page.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    page.url = f"http://{host}:{port}/metrics"
    try:
        yield page
    finally:
        if page.hangs is not None:
            page.hangs.set()
        await runner.cleanup()


@asynccontextmanager
async def scraping(
    url: str,
    receiver: Receiver,
    *,
    page: dict[str, Any] | None = None,
    **changes: Any,  # noqa: ANN401  # as RemoteWriteSettings takes them
) -> AsyncIterator[Readiness]:
    """Scrape a page and send it, often; yields the checks."""
    readiness = Readiness()
    openmetrics = {"interval_seconds": INTERVAL_SECONDS, "job": "test"}
    clock = ScaledClock(epoch_ns=time.time_ns(), speed=SPEED)
    settings = RemoteWriteSettings(
        url=f"{receiver.url}/api/v1/write",
        openmetrics=OpenMetricsSettings(url=url, **{**openmetrics, **(page or {})}),
        **changes,
    )
    async with running(run_scraping(settings, readiness, clock=clock)):
        yield readiness


def received(by: Receiver, name: str, **labels: str) -> list[Series]:
    """Return the samples that came of series of a name, in the order in which they came."""
    wanted = {"__name__": name, **labels}.items()
    return [
        one
        for request in by.received
        for one in parse_compressed(request.body)
        if wanted <= dict(one.labels).items()
    ]


def counted(metric: str, **labels: str) -> float:
    found = REGISTRY.get_sample_value(metric, {"sink": "remote_write", **labels})
    return found or 0.0


def written(body: bytes) -> Answer:
    """Take requests of either version, and say what was written."""
    samples = str(len(parse_compressed(body)))
    return Answer(204, headers={"X-Prometheus-Remote-Write-Samples-Written": samples})


def answering(statuses: Sequence[int]) -> Callable[[bytes], Answer]:
    """Answer with one status after the other to what has samples, then take all."""
    left = list(statuses)

    def answer(body: bytes) -> Answer:
        if not parse_compressed(body) or not left:
            return written(body)
        return Answer(left.pop(0), "no")

    return answer
