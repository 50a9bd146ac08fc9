"""The health pages over HTTP: `/livez`, `/readyz`, `/metrics`. They show; they decide nothing."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import orjson
from aiohttp import web
from prometheus_client import REGISTRY
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder, generate_latest

from gpuledger.errors import UserError
from gpuledger.service.readiness import Readiness
from gpuledger.service.web_guard import WebGuard
from gpuledger.settings.address import parse_listen

# A probe that hangs must not use up the time that a deployable has for its own end.
_SHUTDOWN_SECONDS: Final = 1.0
_READINESS: Final = web.AppKey("readiness", Readiness)
Page = Callable[[], bytes]
"""Gives metrics in the Prometheus text format."""


@asynccontextmanager
async def serve_health(
    *,
    listen: str,
    readiness: Readiness,
    page: Page | None = None,
    guard: WebGuard | None = None,
) -> AsyncIterator[str]:
    """Serve the pages while the context is open; gives the bound `host:port`.

    `page` is written behind the process's own metrics, `guard` knows TLS and users. Raises
    `UserError` where the address cannot be listened on.
    """
    app = _app(readiness, page, guard)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS)
    await runner.setup()
    try:
        await _listen(runner, listen, guard)
        host, port = runner.addresses[0][:2]
        yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    finally:
        await runner.cleanup()


async def _listen(runner: web.AppRunner, listen: str, guard: WebGuard | None) -> None:
    host, port = parse_listen(listen)
    context = guard.context() if guard else None
    try:
        await web.TCPSite(runner, host, port, ssl_context=context).start()
    except OSError as error:
        raise UserError(
            f"http.listen: cannot listen on {listen}: {error.strerror or error};"
            " GPULEDGER_HTTP__LISTEN names another address"
        ) from error


def _app(readiness: Readiness, page: Page | None, guard: WebGuard | None) -> web.Application:
    app = web.Application(middlewares=[guard.middleware] if guard else [])
    app[_READINESS] = readiness
    app.router.add_get("/livez", _livez)
    app.router.add_get("/readyz", _readyz)
    app.router.add_get("/metrics", _metrics_with(page) if page else _metrics)
    return app


async def _livez(_: web.Request) -> web.Response:
    """Answer: that the event loop gets here is all that it says."""
    return web.Response(text="ok\n")


async def _readyz(request: web.Request) -> web.Response:
    readiness = request.app[_READINESS]
    return web.Response(
        status=200 if readiness.is_ready() else 503,
        body=orjson.dumps(readiness.report(), option=orjson.OPT_APPEND_NEWLINE),
        content_type="application/json",
    )


async def _metrics(request: web.Request) -> web.Response:
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    return web.Response(body=encode(REGISTRY), headers={"Content-Type": content_type})


def _metrics_with(page: Page) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Answer in the text format whatever is asked for: OpenMetrics has no counters without _total.

    A client that prefers another format takes this one too, as the content type says what it is.
    """

    async def metrics(_: web.Request) -> web.Response:
        body = generate_latest(REGISTRY) + page()
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    return metrics
