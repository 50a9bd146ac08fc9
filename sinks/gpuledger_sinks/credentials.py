"""Credentials, TLS trust and proxy for a sink's requests to its receiver.

Files are read again when they change. Each request uses the values current when it is sent, so a
retry, for example after a 401, uses the new values. If a file cannot be used, the previous values
stay in use, and the check fails until the file is fixed.

`explain` describes an HTTP response that points to a wrong address, wrong credentials or a wrong
protocol, and names the settings to check. The client of each receiver decides whether a rejection
is final.
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

from gpuledger.certificates import Validity, load_own, trusting
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
"""The lowest version that Python's default contexts support."""
_NO_TLS: Final = re.compile(r"\bno TLS with\b|\bin the TLS handshake\b")
_PASSING: Final = frozenset(
    {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS}
)
_CLIENT_ERRORS: Final = HTTPStatus.BAD_REQUEST // 100
_TOKEN: Final = re.compile(r"[!-~]+")
"""Valid characters of a token in a header: printable ASCII without spaces."""


@dataclass(frozen=True, kw_only=True)
class CredentialsInForce:
    """The values used for one request."""

    headers: Mapping[str, str] = field(repr=False)
    """Headers whose values are in files, and `Authorization` unless credentials are fetched."""
    trust: ssl.SSLContext | bool
    """The CAs for the receiver's certificate and the client certificate; true means the system's
    CAs and no client certificate."""
    server_name: str = ""
    """The name that the receiver's certificate must contain; empty means the host of the URL."""
    proxy: Proxy | None = None
    """The proxy with its credentials."""
    no_proxy: Sequence[NoProxyEntry] = ()
    """Destinations that are reached without the proxy."""
    token_trust: ssl.SSLContext | bool = True
    """The CAs for the token endpoint's certificate."""
    client_secret: str = field(default="", repr=False)
    """The client's secret for the token endpoint."""
    aws_keys: AwsKeys | None = None
    """The keys for signatures, unless a role is assumed."""

    def route(self, url: str) -> Route:
        """Return the route to the receiver."""
        return Route(trust=self.trust, server_name=self.server_name, proxy=self.proxy_for(url))

    def token_route(self, url: str) -> Route:
        """Return the route to the token endpoint."""
        return Route(trust=self.token_trust, proxy=self.proxy_for(url))

    def proxy_for(self, url: str) -> Proxy | None:
        """Return the proxy for an address, or `None` if the address is reached directly."""
        return None if is_reached_directly(url, self.no_proxy) else self.proxy


class ReceiverCredentials:
    """The current credentials, and requests that use them."""

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
        """Read the files of the settings; `section` is the name of the settings' section.

        Raises `SettingsError` naming a file that cannot be used.
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
        # Created before the first read, so that a change during the read is detected.
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
        """Return the values for a request sent now; after a failed reload, the previous values."""
        self.look()
        return self._current

    def look(self) -> None:
        """Read the files again if they have changed."""
        self._files.look()

    async def post(
        self, http: HttpClient, url: str, *, data: bytes, headers: Mapping[str, str]
    ) -> HttpAnswer:
        """Return the receiver's response to a request with the current credentials.

        Renews fetched credentials once if they are rejected. Raises NoAnswerError if there is no
        response, or if no token can be fetched.
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
        """Return the source of fetched credentials, or `None` if no credentials are fetched."""
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
            # Reading files again is cheap, so retries need no long backoff.
            backoff=Backoff(max_seconds=1.0) if sigv4.access_key_id else None,
        )
        # AWS answers 403 to expired and to invalid keys.
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
        # A separate connection: the endpoint must not receive the receiver's headers.
        route = self.current().token_route(url)
        with self._naming_settings(route.proxy):
            async with open_http(headers={}, timeout_seconds=DEADLINE_SECONDS) as http:
                return await http.post_form(url, form, headers, route=route)

    @contextmanager
    def _naming_settings(self, proxy: Proxy | None, *, address: str = "") -> Iterator[None]:
        """Add the settings to check, and the proxy, to a NoAnswerError raised in the context.

        `address` is the full name of the address setting; empty if the caller adds it.
        """
        try:
            yield
        except NoAnswerError as error:
            if _NO_TLS.search(str(error)):
                lowest = f"{self._section}.min_tls_version {self._settings.min_tls_version}"
                raise NoAnswerError(f"{error}; check that the server supports {lowest}") from error
            # A timeout after connecting does not mean that the address is wrong.
            if address and isinstance(error, NotConnectedError):
                raise NoAnswerError(f"{error}; check {address}") from error
            if proxy is None:
                raise
            setting = f"{self._section}.proxy_url"
            by = f"{setting} {shown_url(proxy.url)}"
            if not isinstance(error, ProxyError):
                raise NoAnswerError(f"{error} (via {by})") from error
            login = f"{self._section}.proxy_username and .proxy_password"
            raise NoAnswerError(f"{error}; check {by}, and {login}") from error

    def _take(self) -> list[Validity]:
        # All files are read before any value is used. Values that were changed together are
        # therefore used together, and an invalid file keeps all previous values in use.
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
    """Return a receiver's credentials; a periodic task reads changed files and sets the check.

    Raises `SettingsError` naming a file that cannot be used.
    """
    check = readiness.check(f"{section}.credentials", severity=CheckSeverity.WARNING)
    token_check = None
    if settings.oauth.token_url or (sigv4 and sigv4.region):
        token_check = readiness.check(f"{section}.token", severity=CheckSeverity.WARNING)
        token_check.waits("not requested yet")
    credentials = ReceiverCredentials(
        settings, section=section, check=check, sigv4=sigv4, token_check=token_check
    )
    readiness.add_periodic(credentials.look, check=check)
    return credentials


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def _text(secret: Secret | None, name: str) -> str:
    """Return the current value of a secret; empty if there is none."""
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
        # Most editors end files with a line feed, which is not allowed in a header.
        token = settings.bearer_token.read(name=f"{section}.bearer_token").strip()
        if not _TOKEN.fullmatch(token):
            file = settings.bearer_token.file
            where = f" in {file}" if file else ""
            raise SettingsError(
                f"{section}.bearer_token: invalid token{where}; expected one word of printable"
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
    """Return the TLS context for the receiver, and the validity of its certificates."""
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
    """Return a TLS context, and the validity of the CAs in `ca_file`.

    The context trusts these CAs, or the system's if `ca_file` is `None`.
    """
    if ca_file is None and settings.min_tls_version == _DEFAULT_TLS_VERSION:
        # True makes aiohttp use its own context, which it creates once for all requests.
        return True, []
    context, validities = trusting(setting=setting, file=ca_file)
    return _context(context, settings), validities


def _context(context: ssl.SSLContext, settings: ReceiverSettings) -> ssl.SSLContext:
    context.minimum_version = _TLS_VERSIONS[settings.min_tls_version]
    return context


def explain(answer: HttpAnswer, *, url: str, setting: str) -> str:
    """Describe an HTTP response that does not judge the data sent, and name the setting to check.

    `setting` is the full name of the address setting; the credentials are in the same section.
    """
    shown = f"{shown_url(url)}: {answer.status} {answer.text}".rstrip()
    if answer.is_success:
        return (
            f"{shown} with a page ({answer.content_type}) that is not from the receiver; check the"
            " address, and whether a proxy requires credentials"
        )
    section = setting.rpartition(".")[0]
    if answer.status in _LOGINS:
        fetched = ".oauth or .sigv4" if section == REMOTE_WRITE.name else "or .oauth"
        kinds = f"{section}.username and .password, .bearer_token, {fetched}"
        return f"{shown}; check the credentials ({kinds})"
    if answer.status == HTTPStatus.PROXY_AUTHENTICATION_REQUIRED:
        return f"{shown}; check {section}.proxy_username and .proxy_password"
    if answer.status // 100 == HTTPStatus.MULTIPLE_CHOICES // 100:
        # Redirects are never followed: credentials must not go to an address from a response.
        leads_to = answer.leads_to or "nowhere"
        return f"{shown}: redirect to {leads_to}, which is not followed; check {setting}"
    # These and 5xx are temporary and do not depend on the settings.
    if answer.status // 100 == _CLIENT_ERRORS and answer.status not in _PASSING:
        return f"{shown}; check {setting} (scheme, host, port and path)"
    return shown
