"""What a sink shows to a receiver, whom it trusts, and by what way it goes to it.

Files are read again when they change. A request takes what is in force when it is sent, so that one
that is tried again, as after a 401, goes with what the files have by then. Files that cannot be
used leave the former in force, which the check shows until they are mended.

Here also lives what an answer over HTTP says of how a receiver is set (`explain`): its address, its
login, the protocol to speak. Whether a refusal is final is decided by each receiver's own client.
"""

import base64
import os
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Final

import structlog

from gpuledger.certificates import Validity, authorities_of, load_own, trusting
from gpuledger.errors import SettingsError
from gpuledger.runtime import Check, CheckSeverity, Readiness
from gpuledger.runtime.file_watch import FilesInForce, FileWatch
from gpuledger.runtime.http.client import (
    HttpAnswer,
    HttpClient,
    NoAnswerError,
    NotConnectedError,
    Proxy,
    ProxyError,
    Route,
    open_http,
)
from gpuledger.runtime.http.no_proxy import NoProxyEntry, is_reached_directly
from gpuledger.runtime.http.token_endpoint import DEADLINE_SECONDS, TokenEndpoint
from gpuledger.runtime.retry import Backoff
from gpuledger.runtime.tokens import BearerToken, TokenInForce, TokenSource
from gpuledger.settings import Secret
from gpuledger.settings.secret import shown_url
from gpuledger_sinks.aws_keys import AssumedRole, GivenKeys, role_of
from gpuledger_sinks.fetched_login import FetchedLogin
from gpuledger_sinks.receiver_settings import MinTlsVersion, ReceiverSettings, Sigv4Settings
from gpuledger_sinks.registry import REMOTE_WRITE
from gpuledger_sinks.sigv4 import AwsKeys, signature_headers

_log = structlog.get_logger(__name__)
_LOGINS: Final = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN})
_TLS_VERSIONS: Final[Mapping[MinTlsVersion, ssl.TLSVersion]] = {
    "1.2": ssl.TLSVersion.TLSv1_2,
    "1.3": ssl.TLSVersion.TLSv1_3,
}
_NO_KEYS: Final = AwsKeys(access_key_id="", secret_access_key="")
_DEFAULT_TLS_VERSION: Final = "1.2"
"""Of what Python's own contexts speak, the lowest."""
_NO_TLS: Final = re.compile(r"\bno TLS with\b|\bin the TLS handshake\b")
_PASSING: Final = frozenset(
    {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS}
)
_CLIENT_ERRORS: Final = HTTPStatus.BAD_REQUEST // 100
_TOKEN: Final = re.compile(r"[!-~]+")
"""What a header may carry of a token: nothing blank, nothing beyond ASCII."""


@dataclass(frozen=True, kw_only=True)
class CredentialsInForce:
    """What one request goes with."""

    headers: Mapping[str, str] = field(repr=False)
    """`Authorization`, where the receiver asks for one that is not fetched, and headers whose
    values are in files."""
    trust: ssl.SSLContext | bool
    """The authorities behind the receiver's certificate, and the own one; true means those of the
    system, and none."""
    server_name: str = ""
    """What the receiver's certificate must name; empty means the address' host."""
    proxy: Proxy | None = None
    """The proxy, and the login there."""
    no_proxy: Sequence[NoProxyEntry] = ()
    """What is reached without it."""
    token_trust: ssl.SSLContext | bool = True
    """The authorities behind the token endpoint's certificate."""
    client_secret: str = field(default="", repr=False)
    """The login at the token endpoint."""
    aws_keys: AwsKeys | None = None
    """What is signed with, where no role is assumed."""

    def route(self, url: str) -> Route:
        """Return by what way the receiver is reached."""
        return Route(trust=self.trust, server_name=self.server_name, proxy=self.proxy_for(url))

    def token_route(self, url: str) -> Route:
        """Return by what way the token endpoint is reached."""
        return Route(trust=self.token_trust, proxy=self.proxy_for(url))

    def proxy_for(self, url: str) -> Proxy | None:
        """Return the proxy to reach an address by; `None` where it is reached directly."""
        return None if is_reached_directly(url, self.no_proxy) else self.proxy


class ReceiverCredentials:
    """The credentials in force, and requests that go with them."""

    def __init__(
        self,
        settings: ReceiverSettings,
        *,
        section: str,
        check: Check,
        sigv4: Sigv4Settings | None = None,
        environ: Mapping[str, str] = os.environ,
        token_check: Check | None = None,
        token_deadline_seconds: float = DEADLINE_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
        time_seconds: Callable[[], float] = time.time,
    ) -> None:
        """Read the files; raises `SettingsError` naming one that cannot be used.

        `section` is the name of the settings' section.
        """
        self._settings, self._section = settings, section
        self._address = f"{section}.{settings.ADDRESS}"
        self._sigv4 = sigv4 or Sigv4Settings()
        oauth = settings.oauth
        secrets = (
            self._sigv4.secret_access_key,
            self._sigv4.session_token,
            settings.password,
            settings.bearer_token,
            settings.proxy_password,
            oauth.client_secret,
        )
        named = (
            *(settings.ca_file, settings.cert_file, settings.key_file, oauth.ca_file),
            *settings.header_files.values(),
        )
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
        self._login = self._fetched_login(
            check=token_check or Check(),
            environ=environ,
            deadline_seconds=token_deadline_seconds,
            time_seconds=time_seconds,
            monotonic=monotonic,
        )

    def current(self) -> CredentialsInForce:
        """Return what a request goes with now; with a mistake in the files, the former."""
        self.look()
        return self._current

    def look(self) -> None:
        """Read the files again where they have changed."""
        self._files.look()

    async def post(
        self, http: HttpClient, url: str, *, data: bytes, headers: Mapping[str, str]
    ) -> HttpAnswer:
        """Return the receiver's answer to a request with the login that counts now.

        One that is fetched and refused is renewed once. Raises NoAnswerError, also where none is to
        be had.
        """

        async def send(login: Mapping[str, str]) -> HttpAnswer:
            return await self._post(http, url, data, {**headers, **self.current().headers, **login})

        if self._login is None:
            return await send({})
        return await self._login.post(send, url=url, data=data)

    def _fetched_login(
        self,
        *,
        check: Check,
        environ: Mapping[str, str],
        deadline_seconds: float,
        time_seconds: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> FetchedLogin[BearerToken] | FetchedLogin[AwsKeys] | None:
        """Return the login that is fetched; `None` where it stands in the settings."""
        oauth, sigv4 = self._settings.oauth, self._sigv4
        if oauth.token_url:
            endpoint = TokenEndpoint(
                oauth,
                group=f"{self._section}.oauth",
                secret=lambda: self.current().client_secret,
                post=self._post_to_endpoint,
                deadline_seconds=deadline_seconds,
                time_seconds=time_seconds,
            )
            tokens = TokenInForce(
                endpoint, check=check, time_seconds=time_seconds, monotonic=monotonic
            )
            return FetchedLogin(tokens, headers_of=lambda token, *_: _bearer(token.text))
        if not sigv4.region:
            return None

        def sign(keys: AwsKeys, url: str, data: bytes) -> Mapping[str, str]:
            return signature_headers(
                url,
                data,
                keys=keys,
                region=sigv4.region,
                service=sigv4.service,
                time_seconds=time_seconds(),
            )

        keys = TokenInForce(
            self._aws_keys(environ, deadline_seconds=deadline_seconds, time_seconds=time_seconds),
            check=check,
            time_seconds=time_seconds,
            monotonic=monotonic,
            # Those of files cost nothing to look at again.
            backoff=Backoff(max_seconds=1.0) if sigv4.access_key_id else None,
        )
        # AWS answers 403 to keys that have ended, or are none.
        return FetchedLogin(keys, headers_of=sign, refusing=_LOGINS)

    def _aws_keys(
        self,
        environ: Mapping[str, str],
        *,
        deadline_seconds: float,
        time_seconds: Callable[[], float],
    ) -> TokenSource[AwsKeys]:
        group = f"{self._section}.sigv4"
        role = role_of(self._sigv4, group=group, environ=environ)
        if role is None:
            return GivenKeys(lambda: self.current().aws_keys or _NO_KEYS)
        role_arn, file = role
        return AssumedRole(
            group=group,
            role_arn=role_arn,
            token_file=file,
            sts_url=self._sigv4.exchange_url,
            post=self._post_to_endpoint,
            deadline_seconds=deadline_seconds,
            time_seconds=time_seconds,
        )

    async def _post(
        self, http: HttpClient, url: str, data: bytes, headers: Mapping[str, str]
    ) -> HttpAnswer:
        route = self.current().route(url)
        with self._naming_settings(route.proxy, address=self._address):
            return await http.post(url, data=data, headers=headers, route=route)

    async def _post_to_endpoint(
        self, url: str, form: bytes, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        # A connection of its own: nothing that the receiver is told is the endpoint's business.
        route = self.current().token_route(url)
        with self._naming_settings(route.proxy):
            async with open_http(headers={}, timeout_seconds=DEADLINE_SECONDS) as http:
                return await http.post_form(url, form, headers, route=route)

    @contextmanager
    def _naming_settings(self, proxy: Proxy | None, *, address: str = "") -> Iterator[None]:
        """Say of what goes wrong on the way where to look, and that there is a proxy on it.

        `address` is the setting of the one that is gone to, where whoever asked does not name it.
        """
        try:
            yield
        except NoAnswerError as error:
            if _NO_TLS.search(str(error)):
                lowest = f"{self._section}.min_tls_version {self._settings.min_tls_version}"
                raise NoAnswerError(f"{error}: is {lowest} beyond what it speaks?") from error
            # Of an answer that is late nothing says that the address is wrong.
            if address and isinstance(error, NotConnectedError):
                raise NoAnswerError(f"{error}: look at {address}") from error
            if proxy is None:
                raise
            setting = f"{self._section}.proxy_url"
            by = f"{setting} {shown_url(proxy.url)}"
            if not isinstance(error, ProxyError):
                raise NoAnswerError(f"{error} (by {by})") from error
            login = f"{self._section}.proxy_username and .proxy_password"
            raise NoAnswerError(f"{error}: look at {by}, and at {login}") from error

    def _take(self) -> list[Validity]:
        # All are read before any is put in force: a key and a password that were changed together
        # go together, and a mistake in one leaves all as they were.
        settings, section = self._settings, self._section
        headers = {**_headers_of_files(settings, section), **_login(settings, section)}
        trust, validities = _trust(settings, section)
        token_trust, more = _trust_of_endpoint(settings, section)
        secret = settings.oauth.client_secret
        self._current = CredentialsInForce(
            headers=headers,
            trust=trust,
            server_name=settings.server_name,
            proxy=_proxy(settings, section),
            no_proxy=[NoProxyEntry.parse(text) for text in settings.no_proxy],
            token_trust=token_trust,
            client_secret=_text(secret, f"{section}.oauth.client_secret"),
            aws_keys=_keys(self._sigv4, f"{section}.sigv4"),
        )
        return validities + more


def watch_credentials(
    settings: ReceiverSettings,
    *,
    section: str,
    readiness: Readiness,
    sigv4: Sigv4Settings | None = None,
) -> ReceiverCredentials:
    """Return the credentials of a receiver, looked at each second, with their check.

    Raises `SettingsError` naming a file that cannot be used.
    """
    check = readiness.check(f"{section}.credentials", severity=CheckSeverity.WARNING)
    token_check = None
    if settings.oauth.token_url or (sigv4 and sigv4.region):
        token_check = readiness.check(f"{section}.token", severity=CheckSeverity.WARNING)
        token_check.waits("not asked for yet")
    credentials = ReceiverCredentials(
        settings, section=section, check=check, sigv4=sigv4, token_check=token_check
    )
    readiness.add_periodic(credentials.look, check=check)
    return credentials


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def _text(secret: Secret | None, name: str) -> str:
    """Return a secret as its file has it now; empty where there is none."""
    return secret.read(name=name) if secret else ""


def _keys(sigv4: Sigv4Settings, group: str) -> AwsKeys | None:
    if not sigv4.access_key_id:
        return None
    return AwsKeys(
        access_key_id=sigv4.access_key_id,
        secret_access_key=_text(sigv4.secret_access_key, f"{group}.secret_access_key").strip(),
        session_token=_text(sigv4.session_token, f"{group}.session_token").strip(),
    )


def _proxy(settings: ReceiverSettings, section: str) -> Proxy | None:
    if not settings.proxy_url:
        return None
    return Proxy(
        url=settings.proxy_url,
        username=settings.proxy_username,
        password=_text(settings.proxy_password, f"{section}.proxy_password"),
    )


def _headers_of_files(settings: ReceiverSettings, section: str) -> dict[str, str]:
    headers: dict[str, str] = {}
    for name, file in settings.header_files.items():
        setting = f"{section}.header_files"
        headers[name] = Secret.load(Path(file), name=setting, is_known=True).reveal()
    return headers


def _login(settings: ReceiverSettings, section: str) -> dict[str, str]:
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
        return _bearer(token)
    if settings.password is not None:
        password = settings.password.read(name=f"{section}.password")
        pair = f"{settings.username}:{password}"
        return {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}
    return {}


def _trust(
    settings: ReceiverSettings, section: str
) -> tuple[ssl.SSLContext | bool, list[Validity]]:
    """Return whom connections trust and what they show, and how long its certificates are valid."""
    ca_file = Path(settings.ca_file) if settings.ca_file else None
    context, validities = _trust_in(ca_file, settings, f"{section}.ca_file")
    if settings.cert_file:
        if isinstance(context, bool):
            context = _context(ssl.create_default_context(), settings)
        validities += load_own(
            context,
            prefix=f"{section}.",
            cert_file=Path(settings.cert_file),
            key_file=Path(settings.key_file),
        )
    return context, validities


def _trust_of_endpoint(
    settings: ReceiverSettings, section: str
) -> tuple[ssl.SSLContext | bool, list[Validity]]:
    return _trust_in(settings.oauth.ca_file, settings, f"{section}.oauth.ca_file")


def _trust_in(
    ca_file: Path | None, settings: ReceiverSettings, setting: str
) -> tuple[ssl.SSLContext | bool, list[Validity]]:
    """Return what trusts the authorities of a file, and how long they are valid."""
    if ca_file:
        context = _context(trusting(setting=setting, file=ca_file), settings)
        return context, authorities_of(context, setting=setting, file=ca_file)
    if settings.min_tls_version == _DEFAULT_TLS_VERSION:
        # aiohttp's own context then, which is made once for all requests.
        return True, []
    return _context(ssl.create_default_context(), settings), []


def _context(context: ssl.SSLContext, settings: ReceiverSettings) -> ssl.SSLContext:
    context.minimum_version = _TLS_VERSIONS[settings.min_tls_version]
    return context


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
        fetched = ".oauth or .sigv4" if section == REMOTE_WRITE.name else "or .oauth"
        kinds = f"{section}.username and .password, .bearer_token, {fetched}"
        return f"{shown}: look at the login ({kinds})"
    if answer.status == HTTPStatus.PROXY_AUTHENTICATION_REQUIRED:
        return f"{shown}: look at the proxy's login ({section}.proxy_username and .proxy_password)"
    if answer.status // 100 == HTTPStatus.MULTIPLE_CHOICES // 100:
        # Followed by nobody: a login must not go where somebody else's answer leads.
        leads_to = answer.leads_to or "nowhere"
        return f"{shown}: it leads to {leads_to}: look at {setting}, which is not followed there"
    # These and 5xx pass by themselves: they say nothing of the settings.
    if answer.status // 100 == _CLIENT_ERRORS and answer.status not in _PASSING:
        return f"{shown}: look at {setting}: its scheme, host, port and path"
    return shown
