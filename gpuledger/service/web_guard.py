"""What stands between a client and the pages where there is a web configuration file.

Here the file and the certificates it names are read again when they change, and requests are
refused or let through. `/livez`, `/readyz` and `/health` are open, as a kubelet has neither
password nor certificate for its probes; over TLS they are still TLS.
"""

import ssl
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

import structlog

from gpuledger.errors import UnavailableError, UserError
from gpuledger.service.basic_auth import BasicAuth
from gpuledger.service.pages import Handler, Request, Response
from gpuledger.service.tls import make_context, with_current
from gpuledger.service.web_config import TlsServerConfig, WebConfig, read_web_config

_log = structlog.get_logger(__name__)
_LOOK_SECONDS: Final = 1.0
_OPEN_PAGES: Final = frozenset({"/livez", "/readyz", "/health"})
_Stamp = tuple[tuple[str, int, int], ...]


class WebGuard:
    """The web configuration in force."""

    def __init__(self, file: Path, *, look_seconds: float = _LOOK_SECONDS) -> None:
        """Read the file and what it names; raises `UserError` naming file and field."""
        self._file = file
        self._look_seconds = look_seconds
        self._looked_seconds = time.monotonic()
        self._take(read_web_config(file))
        self._stamp = self._read_stamp()

    def context(self) -> ssl.SSLContext | None:
        """Give the context to listen with, which stays current; `None` means plain HTTP."""
        tls = self._config.tls_server_config
        return with_current(make_context(tls), self._current_context) if tls else None

    async def answer(self, request: Request, handler: Handler) -> Response:
        """Let a request through, or answer 401, 403 or 503; add the configured headers."""
        self._look()
        refusal = None if request.path in _OPEN_PAGES else await self._refusal(request)
        response = refusal or await handler(request)
        configured = self._config.http_server_config.headers
        return replace(response, headers={**response.headers, **dict(configured.items())})

    async def _refusal(self, request: Request) -> Response | None:
        tls = self._config.tls_server_config
        if tls and tls.requires_clients and not _shows_certificate(request, tls):
            return Response(status=403, body=b"a client certificate is needed\n")
        if self._users is None:
            return None
        try:
            is_user = await self._users.allows(request.headers.get("authorization"))
        except UnavailableError as error:
            return Response(status=503, headers={"Retry-After": "1"}, body=f"{error}\n".encode())
        if is_user:
            return None
        return Response(status=401, headers={"WWW-Authenticate": "Basic"}, body=b"Unauthorized\n")

    def _current_context(self) -> ssl.SSLContext:
        self._look()
        if self._context is None:  # the new file asks for no TLS, but the socket is a TLS socket
            raise ssl.SSLError("no TLS")
        return self._context

    def _look(self) -> None:
        """Read the files again where they changed; with a mistake in them the old ones stay."""
        now_seconds = time.monotonic()
        if now_seconds - self._looked_seconds < self._look_seconds:
            return
        self._looked_seconds = now_seconds
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._change(read_web_config(self._file))
        except UserError as error:
            _log.error("web_config_refused", error=str(error))
        else:
            _log.info("web_config_read", file=str(self._file))

    def _change(self, config: WebConfig) -> None:
        if (config.tls_server_config is None) != (self._context is None):
            raise UserError(f"{self._file}: TLS cannot be switched on or off without a restart")
        self._take(config)

    def _take(self, config: WebConfig) -> None:
        try:
            tls = config.tls_server_config
            context = make_context(tls) if tls else None
        except UserError as error:
            raise UserError(f"{self._file}: {error}") from error
        self._users = BasicAuth(config.basic_auth_users) if config.basic_auth_users else None
        self._config, self._context = config, context

    def _read_stamp(self) -> _Stamp:
        """Give what tells whether a file changed; a missing one is a state of its own."""
        tls = self._config.tls_server_config
        named = (tls.cert_file, tls.key_file, tls.client_ca_file) if tls else ()
        return tuple(_stamp_of(Path(file)) for file in (self._file, *named) if str(file))


def _stamp_of(file: Path) -> tuple[str, int, int]:
    try:
        found = file.stat()
    except OSError:
        return str(file), 0, 0
    return str(file), found.st_mtime_ns, found.st_ino


def _shows_certificate(request: Request, tls: TlsServerConfig) -> bool:
    shown = request.certificate
    names = {name for _, name in shown.get("subjectAltName", ())}
    return bool(shown) and (not tls.client_allowed_sans or bool(names & {*tls.client_allowed_sans}))
