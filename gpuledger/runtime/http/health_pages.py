"""The health pages `/livez`, `/readyz` and `/metrics`: an ASGI application and its server.

The pages only show state. TLS and users are in `gpuledger.runtime.http.web_config`.
"""

import gzip
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from http import HTTPStatus
from typing import Final

import orjson
import structlog
from prometheus_client import REGISTRY, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder, generate_latest
from prometheus_client.registry import Collector

from gpuledger.errors import UserError
from gpuledger.runtime.http.asgi import AsgiApp, Receive, Scope, Send, header, refuse, respond
from gpuledger.runtime.http.server import serve
from gpuledger.runtime.http.web_config import WebGuard
from gpuledger.runtime.logs import Repeats
from gpuledger.runtime.readiness import Readiness
from gpuledger.settings.groups import parse_listen

Page = Callable[[], bytes]
"""A function that returns metrics in the Prometheus text format."""
# Metrics are so repetitive that a higher level costs more than it saves.
_GZIP_LEVEL: Final = 1
_METHODS: Final = ("GET", "HEAD")
_log = structlog.get_logger(__name__)
_repeats: Final = Repeats()


@asynccontextmanager
async def serve_health(
    *,
    listen: str,
    readiness: Readiness,
    page: Page | None = None,
    guard: WebGuard | None = None,
    others: AsgiApp | None = None,
) -> AsyncIterator[str]:
    """Serve the pages while the context is open; yields the bound `host:port`.

    `page` is appended to the process's own metrics, `guard` handles TLS and users, and `others`
    answers all other paths. Raises `UserError` if the server cannot listen on the address.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call]  # the client's own
    app = HealthPages(readiness, page=page, guard=guard, others=others)
    host, port = parse_listen(listen)
    context = guard.context if guard else None
    async with AsyncExitStack() as stack:
        # Only the start is inside `try`, because an OSError in the caller's code has another cause.
        try:
            host, port = await stack.enter_async_context(
                serve(app, host=host, port=port, context=context)
            )
        except OSError as error:
            raise UserError(
                f"http.listen: cannot listen on {listen}: {error.strerror or error};"
                " choose another address (GPULEDGER_HTTP__LISTEN)"
            ) from error
        yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class HealthPages:
    """The ASGI application that every component serves."""

    def __init__(
        self,
        readiness: Readiness,
        *,
        page: Page | None = None,
        guard: WebGuard | None = None,
        others: AsgiApp | None = None,
    ) -> None:
        self._readiness, self._page, self._guard = readiness, page, guard
        self._others = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; if that fails, answer with an error instead of ending the server."""
        try:
            await self._answer(scope, receive, send)
        except Exception:  # noqa: BLE001  # an error in a page must not stop the server
            if count := _repeats.count("page_failed"):
                _log.exception("page_failed", path=scope["path"], count=count)
            with suppress(RuntimeError):  # raised if the answer was already started
                await refuse(send, HTTPStatus.INTERNAL_SERVER_ERROR, Connection="close")

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        # These two answers close the connection, so that the request's body is never read.
        if scope["method"] not in _METHODS:
            await refuse(send, HTTPStatus.METHOD_NOT_ALLOWED, Allow="GET, HEAD", Connection="close")
        elif header(scope, "content-length").strip("0") or header(scope, "transfer-encoding"):
            await refuse(send, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, Connection="close")
        elif scope["path"] in ("/livez", "/health"):  # the latter for dcgm-exporter's chart
            await respond(send, b"ok\n")
        elif scope["path"] == "/readyz":
            await self._readyz(send)
        elif self._guard and not await self._guard.admits(scope, send):
            pass  # the guard has answered
        elif scope["path"] == "/metrics":
            await self._metrics(scope, send)
        elif self._others:
            await self._others(scope, receive, send)
        else:
            body = b"not found; available: /livez, /readyz, /metrics\n"
            await respond(send, body, status=HTTPStatus.NOT_FOUND)

    async def _readyz(self, send: Send) -> None:
        """Answer with the checks as JSON; the status is 503 if the component is not ready."""
        is_ready = self._readiness.is_ready()
        await respond(
            send,
            orjson.dumps(self._readiness.report(), option=orjson.OPT_APPEND_NEWLINE),
            status=HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE,
            content_type="application/json",
        )

    async def _metrics(self, scope: Scope, send: Send) -> None:
        """Answer with metrics.

        They have the format of the component's page if it appends one, otherwise the format that
        the client prefers.
        """
        encode: Callable[[Collector], bytes] = generate_latest
        content_type = CONTENT_TYPE_PLAIN_0_0_4
        if self._page is None:
            # If the version in the client's header is not a number, use the text format.
            with suppress(TypeError, ValueError):
                encode, content_type = choose_encoder(header(scope, "accept"))
        # An appended page is always in the text format, because OpenMetrics does not allow counters
        # without _total. All clients accept the text format, which the content type declares.
        text = encode(REGISTRY) + (self._page() if self._page else b"")
        headers = {"vary": "Accept-Encoding"}
        if _accepts_gzip(header(scope, "accept-encoding")):
            text = gzip.compress(text, compresslevel=_GZIP_LEVEL, mtime=0)
            headers["content-encoding"] = "gzip"
        await respond(send, text, content_type=content_type, headers=headers)


def _accepts_gzip(accepted: str) -> bool:
    choices = (choice.partition(";q=") for choice in accepted.replace(" ", "").split(","))
    weights = {coding.lower(): weight for coding, _, weight in choices}
    weight = weights.get("gzip", weights.get("*", "0"))
    # `q=0` excludes gzip; a missing weight is the highest. Every Prometheus accepts gzip.
    return not weight or bool(weight.strip("0."))
