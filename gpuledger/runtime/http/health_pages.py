"""The health pages over HTTP: `/livez`, `/readyz`, `/metrics`. They show; they decide nothing."""

import gzip
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Final

import orjson
from prometheus_client import REGISTRY, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder, generate_latest
from prometheus_client.registry import Collector

from gpuledger.errors import UserError
from gpuledger.runtime.http.auth import OPEN_PAGES, WebGuard
from gpuledger.runtime.http.exchange import HttpRequest, Response
from gpuledger.runtime.http.server import serve_pages
from gpuledger.runtime.readiness import Readiness
from gpuledger.settings.groups import parse_listen

Page = Callable[[], bytes]
"""Returns metrics in the Prometheus text format."""
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
    """Serve the pages while the context is open; yields the bound `host:port`.

    `page` is written behind the process's own metrics, `guard` knows TLS and users. Raises
    `UserError` where the address cannot be listened on.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call]  # the client's own
    pages = HealthPages(readiness, page=page)
    handler = partial(guard.answer, handler=pages.show) if guard else pages.show
    host, port = parse_listen(listen)
    context = guard.context if guard and guard.has_tls else None
    async with AsyncExitStack() as stack:
        # Only what fails here is the address' fault: what the caller does meanwhile may raise, too.
        try:
            host, port = await stack.enter_async_context(
                serve_pages(handler, host=host, port=port, context=context, probes=OPEN_PAGES)
            )
        except OSError as error:
            raise UserError(
                f"http.listen: cannot listen on {listen}: {error.strerror or error};"
                " GPULEDGER_HTTP__LISTEN names another address"
            ) from error
        yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class HealthPages:
    """What each path shows."""

    def __init__(self, readiness: Readiness, *, page: Page | None = None) -> None:
        self._readiness, self._page = readiness, page
        self._pages: dict[str, Callable[[HttpRequest], Response]] = {
            "/livez": self.livez,
            # What the probes of dcgm-exporter's chart ask, of liveness and readiness alike.
            "/health": self.livez,
            "/readyz": self.readyz,
            "/metrics": self.metrics,
        }

    async def show(self, request: HttpRequest) -> Response:
        """Return the page that is asked for."""
        write = self._pages.get(request.path)
        return write(request) if write else _NOT_FOUND

    def livez(self, _: HttpRequest) -> Response:
        """Return `ok`: that the event loop gets here is all that it says."""
        return Response(body=b"ok\n")

    def readyz(self, _: HttpRequest) -> Response:
        """Return the checks as JSON; 503 while a critical one fails."""
        return Response(
            status=200 if self._readiness.is_ready() else 503,
            body=orjson.dumps(self._readiness.report(), option=orjson.OPT_APPEND_NEWLINE),
            content_type="application/json",
        )

    def metrics(self, request: HttpRequest) -> Response:
        """Return the metrics in the format that the client prefers, as far as there is a choice."""
        encode: Callable[[Collector], bytes] = generate_latest
        content_type = CONTENT_TYPE_PLAIN_0_0_4
        if self._page is None:
            # What the client says of a version may be no number: then it gets the text format.
            with suppress(TypeError, ValueError):
                encode, content_type = choose_encoder(request.headers.get("accept", ""))
        # A further page is in the text format whatever is asked for: OpenMetrics has no counters
        # without _total. A client takes that too, as the content type says what it is.
        text = encode(REGISTRY) + (self._page() if self._page else b"")
        headers = {"Vary": "Accept-Encoding"}
        accepted = request.headers.get("accept-encoding", "").replace(" ", "").split(",")
        choices = (choice.partition(";q=") for choice in accepted)
        weights = {coding.lower(): weight for coding, _, weight in choices}
        weight = weights.get("gzip", weights.get("*", "0"))
        # `q=0` refuses it, and no weight is the highest. Every Prometheus takes it.
        if not weight or weight.strip("0."):
            text = gzip.compress(text, compresslevel=_GZIP_LEVEL, mtime=0)
            headers["Content-Encoding"] = "gzip"
        return Response(body=text, content_type=content_type, headers=headers)
