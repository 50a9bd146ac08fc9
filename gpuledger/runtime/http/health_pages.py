"""The health pages over HTTP, and what stands before them where there is a web configuration file.

`/livez`, `/readyz` and `/metrics` show; they decide nothing (`HealthPages`).

`BasicAuth` knows who is a user, by name and password. `WebGuard` refuses requests or lets them
through, and reads the file and the certificates that it names again when they change. `/livez`,
`/readyz` and `/health` are open, as a kubelet has neither password nor certificate for its probes;
over TLS they are still TLS.

bcrypt is slow on purpose. So a password that was right is remembered, as a keyed digest, and at
most one is tried at a time, off the event loop; a client that would wait too long gets a 503.
"""

import asyncio
import base64
import gzip
import hashlib
import hmac
import secrets
import ssl
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import orjson
import structlog
from prometheus_client import REGISTRY, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder, generate_latest
from prometheus_client.registry import Collector

from gpuledger.certificates import Validity
from gpuledger.errors import UnavailableError, UserError
from gpuledger.runtime.file_watch import POLL_INTERVAL_SECONDS, FilesInForce, FileWatch
from gpuledger.runtime.http.exchange import Handler, HttpRequest, Response
from gpuledger.runtime.http.server import serve_pages
from gpuledger.runtime.http.web_config import (
    WebConfig,
    make_context,
    read_web_config,
    refuse_loss,
)
from gpuledger.runtime.readiness import Check, CheckSeverity, Readiness
from gpuledger.settings.groups import parse_listen

_MAX_WAITING: Final = 8
_MAX_REMEMBERED: Final = 100
_MAX_PASSWORD_BYTES: Final = 72
"""What bcrypt looks at; newer versions refuse more than that."""
_SCHEME: Final = "basic "


class BasicAuth:
    """The users of a web configuration."""

    def __init__(self, users: Mapping[str, str]) -> None:
        """Take at least one name with its hash; raises `UserError` where there is no bcrypt."""
        try:
            import bcrypt  # noqa: PLC0415  # only who asks for passwords carries it in memory
        except ImportError as error:
            raise UserError(
                "basic_auth_users needs the package bcrypt, which is not installed"
            ) from error
        self._matches = bcrypt.checkpw
        self._users = users
        # A name that is unknown must cost what a known one does, or the time shows which exist.
        self._nobodys_hash = next(iter(users.values()))
        self._key = secrets.token_bytes(32)
        self._known: OrderedDict[bytes, bool] = OrderedDict()
        self._one_at_a_time = asyncio.Lock()
        self._waiting = 0

    async def allows(self, header: str | None) -> bool:
        """Return whether an `Authorization` header is of a user.

        Raises `UnavailableError` where too many passwords wait to be tried.
        """
        credentials = _parse(header)
        if credentials is None:
            return False
        name, password = credentials
        hashed = self._users.get(name, self._nobodys_hash)
        digest = hmac.digest(self._key, b"\0".join((hashed.encode(), password)), hashlib.sha256)
        if digest not in self._known:
            await self._try(hashed, password, digest)
        return self._known.get(digest, False) and name in self._users

    async def _try(self, hashed: str, password: bytes, digest: bytes) -> None:
        """Try a password, and remember whether it was right."""
        if self._waiting >= _MAX_WAITING:
            raise UnavailableError("too many passwords wait to be tried")
        self._waiting += 1
        try:
            async with self._one_at_a_time:
                if digest in self._known:  # who waited before this one had the same password
                    return
                shown = password[:_MAX_PASSWORD_BYTES]
                is_right = await asyncio.to_thread(self._matches, shown, hashed.encode())
        finally:
            self._waiting -= 1
        if not is_right:
            # A flood of wrong passwords pushes out wrong ones alone, never one that is right.
            wrong = [known for known, right in self._known.items() if not right]
            if len(wrong) >= _MAX_REMEMBERED:
                del self._known[wrong[0]]
        self._known[digest] = is_right


def _parse(header: str | None) -> tuple[str, bytes] | None:
    if header is None or not header.lower().startswith(_SCHEME):
        return None
    try:
        decoded = base64.b64decode(header[len(_SCHEME) :], validate=True)
        name, colon, password = decoded.partition(b":")
        return (name.decode(), password) if colon else None
    except ValueError:  # no base64, or not in ASCII, or a name that is not in UTF-8
        return None


_log = structlog.get_logger(__name__)
OPEN_PAGES: Final = frozenset({"/livez", "/readyz", "/health"})


class WebGuard:
    """The web configuration in force."""

    def __init__(
        self,
        file: Path,
        *,
        check: Check | None = None,
        poll_interval_seconds: float = POLL_INTERVAL_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the file and what it names; raises `UserError` naming file and field.

        The check, `web_config` where none is given, shows mistakes in what changes.
        """
        self._file = file
        self._watch = FileWatch(
            [file], poll_interval_seconds=poll_interval_seconds, monotonic=monotonic
        )
        self._files = FilesInForce(
            lambda: self._change(read_web_config(file)),
            validities=self._take(read_web_config(file)),
            watch=self._watch,
            check=check or Readiness().check("web_config", severity=CheckSeverity.WARNING),
            on_read=lambda _: _log.info("web_config_read", file=str(file)),
        )

    @property
    def has_tls(self) -> bool:
        """Whether the pages are served over TLS, which stays so until a restart."""
        return self._context is not None

    def context(self) -> ssl.SSLContext:
        """Return the context for the next connection: all of it is of the files as they are now.

        Raises RuntimeError without TLS.
        """
        self.look()
        if self._context is None:
            raise RuntimeError("no TLS")
        return self._context

    async def answer(self, request: HttpRequest, handler: Handler) -> Response:
        """Let a request through, or answer 401, 403 or 503; add the configured headers."""
        self.look()
        refusal = None if request.path in OPEN_PAGES else await self._refusal(request)
        response = refusal or await handler(request)
        configured = self._config.http_server_config.headers
        return replace(response, headers={**response.headers, **dict(configured.items())})

    async def _refusal(self, request: HttpRequest) -> Response | None:
        tls = self._config.tls_server_config
        if tls and (forbidden := tls.find_forbidden(request.certificate)):
            # The connection may be from before a change, when no certificate was asked for.
            body, ended = f"{forbidden}\n".encode(), {"Connection": "close"}
            return Response(status=403, body=body, headers=ended)
        if self._users is None:
            return None
        try:
            is_user = await self._users.allows(request.headers.get("authorization"))
        except UnavailableError as error:
            return Response(status=503, headers={"Retry-After": "1"}, body=f"{error}\n".encode())
        if is_user:
            return None
        return Response(status=401, headers={"WWW-Authenticate": "Basic"}, body=b"Unauthorized\n")

    def look(self) -> None:
        """Read the files again where they changed; with a mistake in them the old ones stay."""
        self._files.look()

    def _change(self, config: WebConfig) -> list[Validity]:
        if (config.tls_server_config is None) != (self._context is None):
            raise UserError(f"{self._file}: TLS cannot be switched on or off without a restart")
        try:
            refuse_loss(self._config, config)
        except UserError as error:
            raise UserError(f"{self._file}: {error}") from error
        return self._take(config)

    def _take(self, config: WebConfig) -> list[Validity]:
        tls = config.tls_server_config
        named = (tls.cert_file, tls.key_file, tls.client_ca_file) if tls else ()
        self._watch.follow([self._file, *(Path(file) for file in named if file)])
        try:
            context, validities = make_context(tls) if tls else (None, [])
        except UserError as error:
            raise UserError(f"{self._file}: {error}") from error
        self._users = BasicAuth(config.basic_auth_users) if config.basic_auth_users else None
        self._config, self._context = config, context
        return validities


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
    others: Handler | None = None,
) -> AsyncIterator[str]:
    """Serve the pages while the context is open; yields the bound `host:port`.

    `page` is written behind the process's own metrics, `guard` knows TLS and users, `others`
    answers all other paths. Raises `UserError` where the address cannot be listened on.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call]  # the client's own
    pages = HealthPages(readiness, page=page, others=others)
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

    def __init__(
        self, readiness: Readiness, *, page: Page | None = None, others: Handler | None = None
    ) -> None:
        self._readiness, self._page, self._others = readiness, page, others
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
        if write:
            return write(request)
        return await self._others(request) if self._others else _NOT_FOUND

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
