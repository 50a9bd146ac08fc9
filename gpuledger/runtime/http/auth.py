"""What stands between a client and the pages where there is a web configuration file.

`BasicAuth` knows who is a user, by name and password. `WebGuard` refuses requests or lets them
through, and reads the file and the certificates that it names again when they change. `/livez`,
`/readyz` and `/health` are open, as a kubelet has neither password nor certificate for its probes;
over TLS they are still TLS.

bcrypt is slow on purpose. So a password that was right is remembered, as a keyed digest, and at
most one is tried at a time, off the event loop; a client that would wait too long gets a 503.
"""

import asyncio
import base64
import hashlib
import hmac
import secrets
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import structlog

from gpuledger.certificates import Validity
from gpuledger.errors import UnavailableError, UserError
from gpuledger.runtime.file_watch import POLL_INTERVAL_SECONDS, FilesInForce, FileWatch
from gpuledger.runtime.http.exchange import Handler, HttpRequest, Response
from gpuledger.runtime.http.web_config import (
    WebConfig,
    make_context,
    read_web_config,
    refuse_loss,
)
from gpuledger.runtime.readiness import Check, CheckSeverity, Readiness

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
