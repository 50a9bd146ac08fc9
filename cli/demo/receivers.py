"""Stand-ins for Prometheus and Alertmanager: they take what the sinks send, and count.

Used where no real receiver is named, so that the demo needs nothing but Python. What a receiver
would answer to a wrong request is not played: that is for tests on the real ones.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from aiohttp import web


@dataclass
class Received:
    """What has come in so far."""

    url: str
    """Where the receivers listen."""
    writes: int = 0
    """Remote-write requests."""


@asynccontextmanager
async def serve_receivers() -> AsyncIterator[Received]:
    """Serve both on a free port of this machine while the context is open."""
    app = web.Application(client_max_size=32 * 2**20)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    received = Received(url="")
    app.router.add_post("/api/v1/write", partial(_take_write, received=received))
    app.router.add_post("/api/v2/alerts", _take_alerts)
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
    await request.read()
    return web.Response(status=204)


async def _take_alerts(request: web.Request) -> web.Response:
    await request.read()
    return web.Response(status=200)
