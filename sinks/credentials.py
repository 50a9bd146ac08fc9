"""What a sink shows to a receiver, and whom it trusts: read again when their files change.

A request takes what is in force when it is sent, so that one that is tried again, as after a 401,
goes with what the files have by then. Files that cannot be used leave the former in force, which
the check shows until they are mended.

Here also lives what an answer over HTTP says of how a receiver is set (`explain`): its address, its
login, the protocol to speak. Whether a refusal is final is decided by each receiver's own client.
"""

import base64
import re
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Final

import structlog

from gpuledger.certificates import Validity, authorities_of, load_own, trusting
from gpuledger.errors import SettingsError
from gpuledger.runtime import Check, CheckSeverity, Readiness
from gpuledger.runtime.file_watch import FilesInForce, FileWatch
from gpuledger.runtime.http.client import HttpAnswer
from gpuledger.settings.secret import shown_url
from sinks.settings import LoginSettings

_log = structlog.get_logger(__name__)
_LOGINS: Final = frozenset(
    {
        HTTPStatus.UNAUTHORIZED,
        HTTPStatus.FORBIDDEN,
        HTTPStatus.PROXY_AUTHENTICATION_REQUIRED,
    }
)
_PASSING: Final = frozenset(
    {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS}
)
_CLIENT_ERRORS: Final = HTTPStatus.BAD_REQUEST // 100
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
        secrets = (settings.password, settings.bearer_token)
        named = (settings.ca_file, settings.cert_file, settings.key_file)
        files = [
            *(secret.file for secret in secrets if secret and secret.file),
            *(Path(file) for file in named if file),
        ]
        # Made before the first reading: what changes in between is read again.
        watch = FileWatch(files, monotonic=monotonic)
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
        # Both are read before either is put in force: a key and a password that were changed
        # together go together, and a mistake in one leaves both as they were.
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
    readiness.add_periodic(credentials.look, check=check)
    return credentials


def _login(settings: LoginSettings, section: str) -> dict[str, str]:
    if settings.bearer_token is not None:
        # Files end in a line feed, as most editors write them; in a header it would be refused.
        token = settings.bearer_token.read(name=f"{section}.bearer_token").strip()
        if not _TOKEN.fullmatch(token):
            file = settings.bearer_token.file
            where = f" in {file}" if file else ""
            raise SettingsError(
                f"{section}.bearer_token: what stands{where} is no token: expected one word of"
                " ASCII"
            )
        return {"Authorization": f"Bearer {token}"}
    if settings.password is not None:
        password = settings.password.read(name=f"{section}.password")
        pair = f"{settings.username}:{password}"
        return {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}
    return {}


def _trust(settings: LoginSettings, section: str) -> tuple[ssl.SSLContext | bool, list[Validity]]:
    """Return whom connections trust and what they show, and how long its certificates are valid."""
    if not settings.ca_file and not settings.cert_file:
        # aiohttp's own context then, which is made once for all requests.
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


def explain(answer: HttpAnswer, *, url: str, setting: str) -> str:
    """Return who gave an answer that is no word on what was sent, and where to look for it.

    `setting` is the name of the one that has the address; the login stands in the same section.
    """
    shown = f"{shown_url(url)}: {answer.status} {answer.text}".rstrip()
    if answer.is_success:
        return (
            f"{shown} with a page ({answer.content_type}), which is not the receiver's: the address"
            " leads elsewhere, or a proxy wants a login"
        )
    section = setting.rpartition(".")[0]
    if answer.status in _LOGINS:
        return f"{shown}: look at the login ({section}.username and .password, or .bearer_token)"
    if answer.status // 100 == HTTPStatus.MULTIPLE_CHOICES // 100:
        # Followed by nobody: a login must not go where somebody else's answer leads.
        leads_to = answer.leads_to or "nowhere"
        return f"{shown}: it leads to {leads_to}: look at {setting}, which is not followed there"
    # These and 5xx pass by themselves: they say nothing of the settings.
    if answer.status // 100 == _CLIENT_ERRORS and answer.status not in _PASSING:
        return f"{shown}: look at {setting}: its scheme, host, port and path"
    return shown
