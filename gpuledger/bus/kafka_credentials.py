"""What a connection to the brokers shows and trusts: read again when its files change.

The clients of aiokafka keep what they were opened with; what they are given here asks for the
current certificate, authorities and password whenever a connection is opened.
"""

import ssl
import time
from collections.abc import Callable
from typing import Any, Self

import structlog
from typing_extensions import override

from gpuledger.errors import SettingsError
from gpuledger.file_watch import LOOK_SECONDS, FileWatch
from gpuledger.settings import KafkaSettings, Secret
from gpuledger.settings.secret import MASK

_log = structlog.get_logger(__name__)


class KafkaCredentials:
    """The certificates and passwords in force."""

    _context: ssl.SSLContext

    def __init__(
        self,
        settings: KafkaSettings,
        *,
        look_seconds: float = LOOK_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the files; raises `SettingsError` naming one that cannot be used."""
        self._settings = settings
        secrets = (settings.sasl_password, settings.ssl_key_password)
        files = (settings.ssl_ca_file, settings.ssl_cert_file, settings.ssl_key_file)
        named = (*files, *(secret.file for secret in secrets if secret))
        self._watch = FileWatch(
            (file for file in named if file), look_seconds=look_seconds, monotonic=monotonic
        )
        self._take()

    def context(self) -> ssl.SSLContext:
        """Return the TLS context for a connection that is opened now."""
        self._look()
        return self._context

    def password(self) -> str:
        """Return the password for a login now; empty where there is none."""
        self._look()
        return self._password

    def _look(self) -> None:
        """Read the files again where they changed; with a mistake in them the old ones stay."""
        if not self._watch.has_changed():
            return
        try:
            self._take()
        except SettingsError as error:
            _log.error("kafka_credentials_refused", error=str(error))
        else:
            _log.info("kafka_credentials_read", files=[str(file) for file in self._watch.files])

    def _take(self) -> None:
        password = _current("sasl_password", self._settings.sasl_password)
        if self._settings.security_protocol.endswith("SSL"):
            self._context = tls_context(self._settings)
        self._password = password


class CurrentContext(ssl.SSLContext):
    """A client's TLS context that is, for each connection, the one in force by then."""

    _current: Callable[[], ssl.SSLContext]

    def __new__(cls, current: Callable[[], ssl.SSLContext]) -> Self:
        """Make a context of which nothing but its place is used."""
        made = super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)
        made._current = current
        return made

    @override
    def wrap_bio(self, *arguments: Any, **named: Any) -> ssl.SSLObject:
        """Begin a connection, as asyncio does, with the context in force."""
        return self._current().wrap_bio(*arguments, **named)


class CurrentPassword(str):
    """A password that is, for each login, the one in force by then; its own text is a mask."""

    __slots__ = ("_current",)
    _current: Callable[[], str]

    def __new__(cls, current: Callable[[], str]) -> Self:
        """Make a text that shows the mask."""
        made = super().__new__(cls, MASK)
        made._current = current
        return made

    @override
    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        """Return the password in force, as SCRAM takes it."""
        return self._current().encode(encoding, errors)


def tls_context(settings: KafkaSettings) -> ssl.SSLContext:
    """Make the TLS context; `SettingsError` names the file that cannot be used."""
    try:
        context = ssl.create_default_context(cafile=settings.ssl_ca_file)
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(
            f"kafka.ssl_ca_file: {settings.ssl_ca_file} cannot be used: {error}"
        ) from error
    context.check_hostname = settings.ssl_check_hostname
    if settings.ssl_cert_file:
        # Without a text OpenSSL would ask on the terminal.
        password = _current("ssl_key_password", settings.ssl_key_password)
        try:
            context.load_cert_chain(settings.ssl_cert_file, settings.ssl_key_file, password)
        except (OSError, ssl.SSLError) as error:
            raise SettingsError(
                f"kafka.ssl_cert_file: {settings.ssl_cert_file} with {settings.ssl_key_file} "
                f"cannot be used: {error}"
            ) from error
    return context


def _current(name: str, secret: Secret | None) -> str:
    """Return a secret as its file has it now, empty where there is none; raises `SettingsError`."""
    return secret.read(name=f"kafka.{name}") if secret else ""
