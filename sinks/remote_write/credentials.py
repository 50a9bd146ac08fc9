"""What the sender shows to a receiver, and whom it trusts: read again when their files change.

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

from gpuledger.errors import SettingsError
from gpuledger.file_watch import FileWatch
from gpuledger.service import Check
from gpuledger.settings import Secret
from sinks.remote_write.settings import RemoteWriteSettings

_log = structlog.get_logger(__name__)
_TOKEN: Final = re.compile(r"[!-~]+")
"""What a header may carry of a token: nothing blank, nothing beyond ASCII."""


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """What one request goes with."""

    headers: Mapping[str, str]
    """`Authorization`, where the receiver asks for it."""
    trust: ssl.SSLContext | bool
    """The authorities behind the receiver's certificate; true means those of the system."""


class ReceiverCredentials:
    """The credentials in force."""

    def __init__(
        self,
        settings: RemoteWriteSettings,
        *,
        check: Check,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the files; raises `SettingsError` naming one that cannot be used."""
        self._settings, self._check = settings, check
        self._watch = FileWatch(_files(settings), monotonic=monotonic)
        self._current = read_credentials(settings)
        self._pass_check()

    def current(self) -> Credentials:
        """Return what a request goes with now; with a mistake in the files, the former."""
        if self._watch.has_changed():
            try:
                self._current = read_credentials(self._settings)
            except SettingsError as error:
                self._check.failed(f"{error}; the former credentials stay in force")
            else:
                self._pass_check()
                _log.info("receiver_credentials_read", files=list(map(str, self._watch.files)))
        return self._current

    def _pass_check(self) -> None:
        self._check.ok(", ".join(map(str, self._watch.files)) or "none of them in a file")


def read_credentials(settings: RemoteWriteSettings) -> Credentials:
    """Return what the settings and their files have; raises `SettingsError` naming the setting."""
    return Credentials(headers=_login(settings), trust=_trust(settings.ca_file))


def _files(settings: RemoteWriteSettings) -> list[Path]:
    secrets = (settings.password, settings.bearer_token)
    authorities = [Path(settings.ca_file)] if settings.ca_file else []
    return [*(secret.file for secret in secrets if secret and secret.file), *authorities]


def _login(settings: RemoteWriteSettings) -> dict[str, str]:
    if settings.bearer_token is not None:
        return {"Authorization": f"Bearer {_token(settings.bearer_token)}"}
    if settings.password is not None:
        password = settings.password.read(name="remote_write.password")
        pair = f"{settings.username}:{password}"
        return {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}
    return {}


def _token(secret: Secret) -> str:
    token = secret.read(name="remote_write.bearer_token").strip()
    if not _TOKEN.fullmatch(token):
        where = f" in {secret.file}" if secret.file else ""
        raise SettingsError(
            f"remote_write.bearer_token: what stands{where} is no token: expected one word of ASCII"
        )
    return token


def _trust(ca_file: str) -> ssl.SSLContext | bool:
    if not ca_file:
        return True
    try:
        return ssl.create_default_context(cafile=Path(ca_file))
    except OSError as error:
        raise SettingsError(f"remote_write.ca_file {ca_file}: {error}; name a PEM file") from error
