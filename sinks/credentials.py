"""What a sink shows to a receiver, and whom it trusts: read again when their files change.

A request takes what is in force when it is sent, so that one that is tried again, as after a 401,
goes with what the files have by then. Files that cannot be used leave the former in force, which
the check tells until they are mended.
"""

import base64
import re
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from gpuledger.certificates import Validity, authorities_of, load_own, trusting
from gpuledger.errors import SettingsError
from gpuledger.runtime import Check, CheckSeverity, Readiness
from gpuledger.runtime.file_watch import FilesInForce, FileWatch
from gpuledger.settings import Secret
from sinks.login import LoginSettings

_log = structlog.get_logger(__name__)
_TOKEN: Final = re.compile(r"[!-~]+")
"""What a header may carry of a token: nothing blank, nothing beyond ASCII."""


@dataclass(frozen=True, kw_only=True)
class CredentialsInForce:
    """What one request goes with."""

    headers: Mapping[str, str]
    """`Authorization`, where the receiver asks for it."""
    trust: ssl.SSLContext | bool
    """The authorities behind the receiver's certificate, and the own one; true means those of the
    system, and none."""


class ReceiverCredentials:
    """The credentials in force."""

    def __init__(
        self,
        settings: LoginSettings,
        *,
        section: str,
        check: Check,
        monotonic: Callable[[], float] = time.monotonic,
        time_seconds: Callable[[], float] = time.time,
    ) -> None:
        """Read the files; raises `SettingsError` naming one that cannot be used.

        `section` is the name of the settings' section.
        """
        self._settings, self._section = settings, section
        watch = FileWatch(_files(settings), monotonic=monotonic)
        self._files = FilesInForce(
            self._take,
            validities=self._take(),
            watch=watch,
            check=check,
            on_read=lambda files: _log.info("receiver_credentials_read", files=files),
            time_seconds=time_seconds,
        )

    def current(self) -> CredentialsInForce:
        """Return what a request goes with now; with a mistake in the files, the former."""
        self.look()
        return self._current

    def look(self) -> None:
        """Read the files again where they have changed."""
        self._files.look()

    def _take(self) -> list[Validity]:
        headers = _login(self._settings, self._section)
        trust, validities = _trust(self._settings, self._section)
        self._current = CredentialsInForce(headers=headers, trust=trust)
        return validities


def watch_credentials(
    settings: LoginSettings, *, section: str, readiness: Readiness
) -> ReceiverCredentials:
    """Return the credentials of a receiver, looked at each second, with their check.

    Raises `SettingsError` naming a file that cannot be used.
    """
    check = readiness.check(f"{section}.credentials", severity=CheckSeverity.WARNING)
    credentials = ReceiverCredentials(settings, section=section, check=check)
    readiness.look_each_second(credentials.look)
    return credentials


def _files(settings: LoginSettings) -> list[Path]:
    secrets = (settings.password, settings.bearer_token)
    named = (settings.ca_file, settings.cert_file, settings.key_file)
    return [
        *(secret.file for secret in secrets if secret and secret.file),
        *(Path(file) for file in named if file),
    ]


def _login(settings: LoginSettings, section: str) -> dict[str, str]:
    if settings.bearer_token is not None:
        token = _token(settings.bearer_token, name=f"{section}.bearer_token")
        return {"Authorization": f"Bearer {token}"}
    if settings.password is not None:
        password = settings.password.read(name=f"{section}.password")
        pair = f"{settings.username}:{password}"
        return {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}
    return {}


def _token(secret: Secret, *, name: str) -> str:
    token = secret.read(name=name).strip()
    if not _TOKEN.fullmatch(token):
        where = f" in {secret.file}" if secret.file else ""
        raise SettingsError(f"{name}: what stands{where} is no token: expected one word of ASCII")
    return token


def _trust(settings: LoginSettings, section: str) -> tuple[ssl.SSLContext | bool, list[Validity]]:
    """Return whom connections trust and what they show, and how long its certificates are valid."""
    if not settings.ca_file and not settings.cert_file:
        return True, []
    context, validities = ssl.create_default_context(), []
    if settings.ca_file:
        setting, file = f"{section}.ca_file", Path(settings.ca_file)
        context = trusting(setting=setting, file=file)
        validities = authorities_of(context, setting=setting, file=file)
    if settings.cert_file:
        validities += load_own(
            context,
            prefix=f"{section}.",
            cert_file=Path(settings.cert_file),
            key_file=Path(settings.key_file),
        )
    return context, validities
