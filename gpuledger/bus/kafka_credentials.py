"""What a connection to the brokers shows and trusts: read again when its files change.

The clients of aiokafka keep what they were opened with; what they are given here asks for the
current certificate, authorities and password whenever a connection is opened.
"""

import ssl
import time
from collections.abc import Callable
from typing import Any, Final, Self

import structlog
from typing_extensions import override

from gpuledger.certificates import Validity, authorities_of, load_own, trusting
from gpuledger.runtime import Check
from gpuledger.runtime.file_watch import LOOK_SECONDS, FilesInForce, FileWatch
from gpuledger.runtime.http.credentials import NO_CREDENTIALS, BasicCredentials
from gpuledger.settings import KafkaSettings, Secret
from gpuledger.settings.secret import MASK

_log = structlog.get_logger(__name__)
_MAX_RECENT: Final = 8


class KafkaCredentials:
    """The certificates and passwords in force."""

    _context: ssl.SSLContext
    sent: BasicCredentials = NO_CREDENTIALS
    """The passwords, the former ones too: to be masked in what a broker says."""

    def __init__(
        self,
        settings: KafkaSettings,
        *,
        check: Check,
        look_seconds: float = LOOK_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
        time_seconds: Callable[[], float] = time.time,
    ) -> None:
        """Read the files; raises `SettingsError` naming one that cannot be used."""
        self._settings = settings
        secrets = (settings.sasl_password, settings.ssl_key_password)
        files = (settings.ssl_ca_file, settings.ssl_cert_file, settings.ssl_key_file)
        named = (*files, *(secret.file for secret in secrets if secret))
        watch = FileWatch(
            (file for file in named if file), look_seconds=look_seconds, monotonic=monotonic
        )
        self._files = FilesInForce(
            self._take,
            validities=self._take(),
            watch=watch,
            check=check,
            on_read=lambda files: _log.info("kafka_credentials_read", files=files),
            time_seconds=time_seconds,
        )

    def context(self) -> ssl.SSLContext:
        """Return the TLS context for a connection that is opened now."""
        self.look()
        return self._context

    def password(self) -> str:
        """Return the password for a login now; empty where there is none."""
        self.look()
        return self._password

    def look(self) -> None:
        """Read the files again where they changed; with a mistake in them the old ones stay."""
        self._files.look()

    def _take(self) -> list[Validity]:
        password = _current("sasl_password", self._settings.sasl_password)
        key_password = _current("ssl_key_password", self._settings.ssl_key_password)
        validities: list[Validity] = []
        if self._settings.security_protocol.endswith("SSL"):
            self._context, validities = tls_context(self._settings)
        self._password = password
        # A connection that was opened with the former one may still be answered.
        recent = dict.fromkeys((password, key_password, *self.sent.secrets))
        self.sent = BasicCredentials(tuple(filter(None, recent))[:_MAX_RECENT])
        return validities


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


def tls_context(settings: KafkaSettings) -> tuple[ssl.SSLContext, list[Validity]]:
    """Return the TLS context, and how long its certificates are valid.

    Raises `SettingsError` naming the setting whose file cannot be used.
    """
    validities: list[Validity] = []
    if settings.ssl_ca_file:
        setting, file = "kafka.ssl_ca_file", settings.ssl_ca_file
        context = trusting(setting=setting, file=file)
        validities += authorities_of(context, setting=setting, file=file)
    else:
        context = ssl.create_default_context()
    context.check_hostname = settings.ssl_check_hostname
    if settings.ssl_cert_file and settings.ssl_key_file:
        validities += load_own(
            context,
            prefix="kafka.ssl_",
            cert_file=settings.ssl_cert_file,
            key_file=settings.ssl_key_file,
            password=_current("ssl_key_password", settings.ssl_key_password),
        )
    return context, validities


def _current(name: str, secret: Secret | None) -> str:
    """Return a secret as its file has it now, empty where there is none; raises `SettingsError`."""
    return secret.read(name=f"kafka.{name}") if secret else ""
