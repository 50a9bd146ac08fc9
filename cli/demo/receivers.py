"""Stand-ins for Prometheus and Alertmanager: they take what the sinks send, and count.

Used where no real receiver is named, so that the demo needs nothing but Python. What a receiver
would answer to a wrong request is not played: that is for tests on the real ones.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial

import msgspec
from aiohttp import web


class Alert(msgspec.Struct, frozen=True, rename="camel"):
    """An alert as Alertmanager takes it."""

    starts_at: datetime
    """Since when it fires."""
    ends_at: datetime
    """Until when; ahead of now while it fires."""
    labels: dict[str, str] = {}
    """Its identity."""
    annotations: dict[str, str] = {}
    """Words for people."""


@dataclass
class Received:
    """What has come in so far."""

    url: str
    """Where the receivers listen."""
    writes: int = 0
    """Remote-write requests."""
    write_bytes: int = 0
    """Their bytes."""
    alerts: dict[frozenset[tuple[str, str]], Alert] = field(default_factory=dict)
    """The alerts that were posted, by their labels, each as it was told last."""

    def firing(self, now: datetime) -> list[Alert]:
        """Return the alerts that fire at that time, the youngest first."""
        firing = [alert for alert in self.alerts.values() if alert.ends_at > now]
        return sorted(firing, key=lambda alert: alert.starts_at, reverse=True)


@asynccontextmanager
async def serve_receivers() -> AsyncIterator[Received]:
    """Serve both on a free port of this machine while the context is open."""
    app = web.Application(client_max_size=32 * 2**20)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    received = Received(url="")
    app.router.add_post("/api/v1/write", partial(_take_write, received=received))
    app.router.add_post("/api/v2/alerts", partial(_take_alerts, received=received))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        received.url = f"http://{host}:{port}"
        yield received
    finally:
        await runner.cleanup()


async def _take_write(request: web.Request, received: Received) -> web.Response:
    received.writes += 1
    received.write_bytes += len(await request.read())
    return web.Response(status=204)


async def _take_alerts(request: web.Request, received: Received) -> web.Response:
    posted = msgspec.json.decode(await request.read(), type=list[Alert])
    received.alerts |= {frozenset(alert.labels.items()): alert for alert in posted}
    return web.Response(status=200)
