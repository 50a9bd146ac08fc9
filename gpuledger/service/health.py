"""The health pages over HTTP: `/livez`, `/readyz`, `/metrics`. They show; they decide nothing."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import orjson
from aiohttp import web
from prometheus_client import REGISTRY
from prometheus_client.exposition import choose_encoder

from gpuledger.errors import UserError
from gpuledger.service.readiness import Readiness
from gpuledger.settings.address import parse_listen

# A probe that hangs must not use up the time that a deployable has for its own end.
_SHUTDOWN_SECONDS: Final = 1.0
_READINESS: Final = web.AppKey("readiness", Readiness)


@asynccontextmanager
async def serve_health(*, listen: str, readiness: Readiness) -> AsyncIterator[str]:
    """Serve the pages while the context is open; gives the bound `host:port`.

    Raises `UserError` where the address cannot be listened on.
    """
    runner = web.AppRunner(_app(readiness), access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS)
    await runner.setup()
    try:
        await _listen(runner, listen)
        host, port = runner.addresses[0][:2]
        yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    finally:
        await runner.cleanup()


async def _listen(runner: web.AppRunner, listen: str) -> None:
    host, port = parse_listen(listen)
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        raise UserError(
            f"http.listen: cannot listen on {listen}: {error.strerror or error};"
            " GPULEDGER_HTTP__LISTEN names another address"
        ) from error


def _app(readiness: Readiness) -> web.Application:
    app = web.Application()
    app[_READINESS] = readiness
    app.router.add_get("/livez", _livez)
    app.router.add_get("/readyz", _readyz)
    app.router.add_get("/metrics", _metrics)
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
