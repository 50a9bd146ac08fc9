"""The health pages over HTTP: `/livez`, `/readyz`, `/metrics`. They show; they decide nothing."""

import gzip
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Final

import orjson
from prometheus_client import REGISTRY, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder, generate_latest

from gpuledger.errors import UserError
from gpuledger.runtime.http.auth import OPEN_PAGES, WebGuard
from gpuledger.runtime.http.exchange import Handler, HttpRequest, Response
from gpuledger.runtime.http.server import serve_pages
from gpuledger.runtime.readiness import Readiness
from gpuledger.settings.groups import parse_listen

Page = Callable[[], bytes]
"""Gives metrics in the Prometheus text format."""
# A page of metrics repeats itself so much that a higher level costs more than it saves.
_GZIP_LEVEL: Final = 1
_NOT_FOUND: Final = Response(status=404, body=b"there are /livez, /readyz and /metrics\n")


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
    disable_created_metrics()  # type: ignore[no-untyped-call]  # the client's own
    show = _pages(readiness, page)
    handler = partial(guard.answer, handler=show) if guard else show
    async with AsyncExitStack() as stack:
        host, port = await _listen(stack, handler, listen, guard)
        yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _listen(
    stack: AsyncExitStack, handler: Handler, listen: str, guard: WebGuard | None
) -> tuple[str, int]:
    host, port = parse_listen(listen)
    context = guard.context if guard and guard.has_tls else None
    serving = serve_pages(handler, host=host, port=port, context=context, probes=OPEN_PAGES)
    try:
        return await stack.enter_async_context(serving)
    except OSError as error:
        raise UserError(
            f"http.listen: cannot listen on {listen}: {error.strerror or error};"
            " GPULEDGER_HTTP__LISTEN names another address"
        ) from error


def _pages(readiness: Readiness, page: Page | None) -> Handler:
    pages: dict[str, Callable[[HttpRequest], Response]] = {
        "/livez": _livez,
        # What the probes of dcgm-exporter's chart ask, of liveness and readiness alike.
        "/health": _livez,
        "/readyz": partial(_readyz, readiness=readiness),
        "/metrics": partial(_metrics_with, page=page) if page else _metrics,
    }

    async def show(request: HttpRequest) -> Response:
        write = pages.get(request.path)
        return write(request) if write else _NOT_FOUND

    return show


def _livez(_: HttpRequest) -> Response:
    """Answer: that the event loop gets here is all that it says."""
    return Response(body=b"ok\n")


def _readyz(_: HttpRequest, *, readiness: Readiness) -> Response:
    return Response(
        status=200 if readiness.is_ready() else 503,
        body=orjson.dumps(readiness.report(), option=orjson.OPT_APPEND_NEWLINE),
        content_type="application/json",
    )


def _metrics(request: HttpRequest) -> Response:
    try:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
    except (TypeError, ValueError):  # what it says of a version that is no number
        encode, content_type = generate_latest, CONTENT_TYPE_PLAIN_0_0_4
    return _compressed(Response(body=encode(REGISTRY), content_type=content_type), request)


def _metrics_with(request: HttpRequest, *, page: Page) -> Response:
    """Answer in the text format whatever is asked for: OpenMetrics has no counters without _total.

    A client that prefers another format takes this one too, as the content type says what it is.
    """
    text = generate_latest(REGISTRY) + page()
    return _compressed(Response(body=text, content_type=CONTENT_TYPE_PLAIN_0_0_4), request)


def _compressed(response: Response, request: HttpRequest) -> Response:
    """Return the response in gzip where the client takes it, as every Prometheus does."""
    headers = {**response.headers, "Vary": "Accept-Encoding"}
    if not _takes_gzip(request.headers.get("accept-encoding", "")):
        return replace(response, headers=headers)
    body = gzip.compress(response.body, compresslevel=_GZIP_LEVEL, mtime=0)
    return replace(response, body=body, headers={**headers, "Content-Encoding": "gzip"})


def _takes_gzip(accept_encoding: str) -> bool:
    """Return whether gzip is asked for; `q=0` refuses it."""
    choices = (choice.partition(";q=") for choice in accept_encoding.replace(" ", "").split(","))
    weights = {coding.lower(): weight for coding, _, weight in choices}
    weight = weights.get("gzip", weights.get("*", "0"))
    return not weight or weight.strip("0.") != ""
