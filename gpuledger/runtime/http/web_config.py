"""The web configuration file (TLS, client certificates, users) of Prometheus' exporter toolkit.

`WebGuard` reads the file and its certificates, rereads them if they change, and decides whether a
client may see a page. bcrypt is slow on purpose, so correct passwords are remembered as keyed
digests, and only one password is verified at a time, outside of the event loop.
"""

import asyncio
import base64
import hmac
import re
import secrets
import ssl
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import structlog
import yaml

from gpuledger.certificates import Validity, load_authorities, load_own
from gpuledger.codec import explain_invalid
from gpuledger.errors import UserError
from gpuledger.runtime.file_watch import FilesInForce, FileWatch
from gpuledger.runtime.http.asgi import Scope, Send, header, refuse
from gpuledger.runtime.readiness import Check
from gpuledger.settings.yaml_errors import explain_yaml
from gpuledger.small_files import read_small_file
from gpuledger.texts import shorten_middle

Version = Literal["TLS12", "TLS13"]
ClientAuth = Literal["NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"]
_TLS: Final = "tls_server_config."
_MAX_BYTES: Final = 1024 * 1024
"""Maximum file size; a user takes about 80 bytes."""
# A cost above 16 would take minutes per login.
_HASH: Final = re.compile(r"\$2[abxy]\$(0\d|1[0-6])\$[./A-Za-z0-9]{53}")
_MAX_WAITING: Final = 8
_log = structlog.get_logger(__name__)


class TlsServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS configuration; paths are relative to the file."""

    cert_file: Path
    """PEM file with the server's certificate and its chain."""
    key_file: Path
    """PEM file with its private key."""
    client_auth_type: ClientAuth = "NoClientCert"
    """Whether clients may or must present a certificate."""
    client_ca_file: Path | None = None
    """PEM file with the CA certificates that verify client certificates."""
    client_allowed_sans: list[str] = []
    """Allowed subject alternative names of client certificates; empty allows any name."""
    min_version: Version = "TLS12"
    """The oldest accepted TLS version."""
    max_version: Version = "TLS13"
    """The newest accepted TLS version."""

    def __post_init__(self) -> None:
        """Raise `ValueError` if fields contradict each other."""
        if (self.client_auth_type == "NoClientCert") != (self.client_ca_file is None):
            raise ValueError("client_auth_type and client_ca_file must be set together")
        if self.client_allowed_sans and self.client_ca_file is None:
            raise ValueError("client_allowed_sans requires client_auth_type and client_ca_file")
        if self.min_version > self.max_version:
            raise ValueError("min_version is newer than max_version")

    def admits(self, certificate: Mapping[str, Any] | None) -> bool:
        """Return whether a client with this certificate may see a page."""
        if not certificate:
            return self.client_auth_type != "RequireAndVerifyClientCert"
        names = {name for _, name in certificate.get("subjectAltName", ())}
        return not self.client_allowed_sans or not names.isdisjoint(self.client_allowed_sans)


class WebConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a web configuration file."""

    tls_server_config: TlsServerConfig | None = None
    """TLS configuration; absent means plain HTTP."""
    basic_auth_users: dict[str, str] = {}
    """Users with the bcrypt hashes of their passwords; if empty, no login is required."""

    def __post_init__(self) -> None:
        """Raise `ValueError` if neither TLS nor users are set, or if a hash is invalid.

        A file that is still being written may contain neither.
        """
        if self.tls_server_config is None and not self.basic_auth_users:
            raise ValueError("tls_server_config and basic_auth_users are missing; set one of them")
        for name, hashed in self.basic_auth_users.items():
            if not _HASH.fullmatch(hashed):
                remedy = f"cost up to 16; run `htpasswd -nBC 10 {name}`"
                raise ValueError(f"basic_auth_users.{name}: expected a bcrypt hash, {remedy}")


def read_web_config(file: Path) -> WebConfig:
    """Return the configuration in the file; raise `UserError` with the file and field."""
    try:
        loaded = yaml.safe_load(read_small_file(file, max_bytes=_MAX_BYTES).decode()) or {}
        return msgspec.convert(loaded, WebConfig, dec_hook=lambda _, name: file.parent / name)
    except OSError as error:
        raise UserError(f"http.web_config_file: cannot read {file}: {error.strerror}") from error
    except yaml.YAMLError as error:
        mistake = f"invalid YAML: {explain_yaml(error)}"
    except msgspec.ValidationError as error:
        mistake = shorten_middle(explain_invalid(WebConfig, error))
    except (ValueError, RecursionError):  # not UTF-8, an invalid date, too many brackets
        mistake = "invalid YAML"
    raise UserError(f"http.web_config_file: {file}: {mistake}")


class BasicAuth:
    """The users of a web configuration."""

    def __init__(self, users: Mapping[str, str]) -> None:
        """Take the users with the bcrypt hashes of their passwords; there is at least one user."""
        self._users = users
        self._key = secrets.token_bytes(32)
        self._right: set[bytes] = set()
        self._one_at_a_time = asyncio.Lock()
        self._waiting = 0

    async def status_for(self, authorization: str) -> HTTPStatus:
        """Return 200 for a valid `Authorization` header, 401 for an invalid one.

        Returns 503 if too many requests wait for the verification of a password.
        """
        from bcrypt import checkpw  # noqa: PLC0415  # only components with users load it

        encoded = authorization[6:] if authorization[:6].lower() == "basic " else ""
        try:
            name, password = base64.b64decode(encoded, validate=True).decode().split(":", 1)
        except ValueError:  # not base64, not UTF-8, or no colon
            return HTTPStatus.UNAUTHORIZED
        # An unknown name must take as long as a known one, or the time would reveal valid names.
        hashed = self._users.get(name, next(iter(self._users.values()))).encode()
        shown = password.encode()[:72]  # bcrypt ignores further bytes; newer versions reject them
        digest = hmac.digest(self._key, b"\0".join((name.encode(), hashed, shown)), "sha256")
        if digest in self._right:
            return HTTPStatus.OK
        if self._waiting >= _MAX_WAITING:
            return HTTPStatus.SERVICE_UNAVAILABLE
        self._waiting += 1
        try:
            async with self._one_at_a_time:
                is_right = digest in self._right or await asyncio.to_thread(checkpw, shown, hashed)
        finally:
            self._waiting -= 1
        if not is_right or name not in self._users:
            return HTTPStatus.UNAUTHORIZED
        self._right.add(digest)
        return HTTPStatus.OK


class WebGuard:
    """The current web configuration, which decides which clients may see a page."""

    def __init__(self, file: Path, *, check: Check, watch: FileWatch | None = None) -> None:
        """Read the file and its certificates; raise `UserError` with the file and field.

        After an invalid change, `check` fails and the previous version stays in force.
        """
        self._file, self._watch = file, watch or FileWatch([file])
        self._files = FilesInForce(
            self._read,
            validities=self._read(),
            watch=self._watch,
            check=check,
            on_read=lambda _: _log.info("web_config_read", file=str(file)),
        )

    def look(self) -> None:
        """Read the files again if they have changed."""
        self._files.look()

    def context(self) -> ssl.SSLContext | None:
        """Return the TLS context for the next connection; `None` means plain HTTP."""
        self.look()
        return self._context

    async def admits(self, scope: Scope, send: Send) -> bool:
        """Return whether the client may see the page; if not, answer 401, 403 or 503."""
        self.look()
        tls, status = self._config.tls_server_config, HTTPStatus.OK
        if tls and not tls.admits(scope["state"].get("certificate")):
            status = HTTPStatus.FORBIDDEN
        elif self._users:
            status = await self._users.status_for(header(scope, "authorization"))
        if status is not HTTPStatus.OK:
            # The connection may be older than a change that requires certificates.
            more = {"Retry_After": "1"} if status is HTTPStatus.SERVICE_UNAVAILABLE else {}
            await refuse(send, status, WWW_Authenticate="Basic", Connection="close", **more)
        return status is HTTPStatus.OK

    def _read(self) -> list[Validity]:
        """Read the files and use them from now on.

        If a file is invalid, raises `UserError` and changes nothing.
        """
        config, context, validities = read_web_config(self._file), None, list[Validity]()
        if tls := config.tls_server_config:
            files = [self._file, tls.cert_file, tls.key_file, tls.client_ca_file]
            self._watch.follow(filter(None, files))
            context, validities = make_context(tls, prefix=_TLS)
        self._users = BasicAuth(config.basic_auth_users) if config.basic_auth_users else None
        self._config, self._context = config, context
        return validities


def make_context(config: TlsServerConfig, *, prefix: str) -> tuple[ssl.SSLContext, list[Validity]]:
    """Return a server's TLS context, and how long its certificates are valid.

    Raises `UserError` with the field of an unusable file; `prefix` precedes the field's name.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion[f"TLSv1_{config.min_version[-1]}"]
    context.maximum_version = ssl.TLSVersion[f"TLSv1_{config.max_version[-1]}"]
    context.options |= ssl.OP_NO_RENEGOTIATION
    own, key = config.cert_file, config.key_file
    validities = load_own(context, prefix=prefix, cert_file=own, key_file=key)
    if config.client_ca_file is not None:
        # Optional in the handshake, because the kubelet's probes have no certificate. The pages
        # that require a certificate check it themselves.
        context.verify_mode = ssl.CERT_OPTIONAL
        setting, file = f"{prefix}client_ca_file", config.client_ca_file
        validities += load_authorities(context, setting=setting, file=file)
    return context, validities
