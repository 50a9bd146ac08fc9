"""The settings of the connection to a receiver over HTTP: login, TLS and proxy.

A sink's section has them beside its addresses. What cannot work is refused by the field's name.
"""

import re
from collections.abc import Iterable, Mapping
from typing import ClassVar, Final, Literal
from urllib.parse import urlsplit

import msgspec

from gpuledger.runtime.http.no_proxy import NoProxyEntry
from gpuledger.settings import Secret
from gpuledger.settings.groups import ClientCredentialsSettings, require_http_url
from gpuledger.settings.secret import may_part_a_login

MinTlsVersion = Literal["1.2", "1.3"]
_HOST: Final = re.compile(r"[\w.-]+", re.ASCII)
_OF_SIGV4: Final = (
    "access_key_id",
    "secret_access_key",
    "session_token",
    "role_arn",
    "web_identity_token_file",
    "sts_url",
)
_SIGNED_PATH: Final = re.compile(r"(?:/(?!\.\.?(?:/|\Z))[\w.~-]+)*/?", re.ASCII)
"""A path that no HTTP library writes in another way."""
_OF_PROXY: Final = ("proxy_username", "proxy_password", "no_proxy")


class Sigv4Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Signatures of AWS (Signature Version 4), as Amazon Managed Service for Prometheus wants."""

    region: str = ""
    """The workspace's region, such as `eu-central-1`; empty means that nothing is signed."""
    service: str = "aps"
    """What is signed for, as AWS abbreviates it."""
    access_key_id: str = ""
    """Name of the keys to sign with, where they are no role's."""
    secret_access_key: Secret | None = None
    """The secret of these keys."""
    session_token: Secret | None = None
    """What temporary keys have besides; whoever renews them writes all of them anew."""
    role_arn: str = ""
    """Role to sign as, which the token of a file is exchanged for; empty means the one of the
    variable `AWS_ROLE_ARN`, which EKS gives a pod whose service account has a role."""
    web_identity_token_file: str = ""
    """File of that token, which the kubelet renews; empty means the one of the variable
    `AWS_WEB_IDENTITY_TOKEN_FILE`."""
    sts_url: str = ""
    """Where it is exchanged; empty means `https://sts.<region>.amazonaws.com/`."""

    @property
    def exchange_url(self) -> str:
        """The address of STS."""
        return self.sts_url or f"https://sts.{self.region}.amazonaws.com/"

    def __post_init__(self) -> None:
        """Raise `ValueError` where nothing could be signed by these."""
        if not self.region:
            for name in _OF_SIGV4:
                if getattr(self, name):
                    raise ValueError(f"{name}: needs region too, which is signed for")
            return
        if not _HOST.fullmatch(self.region):
            raise ValueError(f"region: {self.region!r} is none; give one such as eu-central-1")
        if not _HOST.fullmatch(self.service):
            raise ValueError(f"service: {self.service!r} is none; give one such as aps")
        if bool(self.access_key_id) != (self.secret_access_key is not None):
            raise ValueError(
                "access_key_id and secret_access_key go together: give both or neither"
            )
        if self.access_key_id and (self.role_arn or self.web_identity_token_file):
            raise ValueError("access_key_id and role_arn exclude each other: give one of them")
        if self.session_token and not self.access_key_id:
            raise ValueError("session_token: needs access_key_id and secret_access_key too")
        _require_https(self.exchange_url)


def _require_https(url: str) -> None:
    if not url.lower().startswith("https://"):
        # Of the value nothing is shown: it may hold a login.
        raise ValueError("sts_url: expected https://…, as the pod's token is sent to it")
    try:
        require_http_url(url)
    except ValueError as error:
        raise ValueError(f"sts_url: {error}") from error


class ReceiverSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who the sender is, whom it trusts, and by what way it goes."""

    ADDRESS: ClassVar[str] = "url"
    """The setting beside these that has the receiver's address."""

    username: str = ""
    """User for basic authentication; empty means none."""
    password: Secret | None = None
    """Password for basic authentication."""
    bearer_token: Secret | None = None
    """Token for `Authorization: Bearer`; not together with a username."""
    header_files: dict[str, str] = msgspec.field(default_factory=dict)
    """Files with the values of further headers, by the header's name, such as `X-Api-Key`."""
    oauth: ClientCredentialsSettings = ClientCredentialsSettings()
    """Where such a token is asked for, and renewed before it ends; in place of `bearer_token`."""
    ca_file: str = ""
    """PEM file of the authority behind the receiver's certificate; empty means the system's."""
    cert_file: str = ""
    """PEM file of the own certificate, where the receiver asks for one; empty means none."""
    key_file: str = ""
    """PEM file of the key of that certificate, without a password."""
    server_name: str = ""
    """Name that the receiver's certificate must have, and that is asked for (SNI), where it is not
    the host of the address; empty means that host."""
    min_tls_version: MinTlsVersion = "1.2"
    """The lowest version of TLS to speak, `"1.2"` or `"1.3"`, in YAML in quotes."""
    proxy_url: str = ""
    """Proxy to reach the receiver and the token endpoint by, `http://host:port` or `https://…`;
    empty means none, whatever the variables `HTTP_PROXY` and `HTTPS_PROXY` say."""
    proxy_username: str = ""
    """User for basic authentication at the proxy; empty means none."""
    proxy_password: Secret | None = None
    """Password for basic authentication at the proxy."""
    no_proxy: list[str] = msgspec.field(default_factory=list)
    """What is reached without the proxy: hosts and all below them (`example.com`), what is below
    alone (`.svc`), addresses and networks (`10.0.0.0/8`), with a port or without; `*` is all."""

    def refuse_unusable(self, *, sigv4: Sigv4Settings | None = None, **urls: Iterable[str]) -> None:
        """Raise ValueError naming what is missing, or what excludes each other.

        The receiver's addresses are given under their setting's name.
        """
        is_signed = sigv4 is not None and bool(sigv4.region)
        _refuse_half_a_login(self, urls, is_signed=is_signed)
        _refuse_unusable_proxy(self)
        given = [url for each in urls.values() for url in each]
        for setting, each in urls.items() if is_signed else ():
            for url in each:
                parts = urlsplit(url)
                if parts.query or not _SIGNED_PATH.fullmatch(parts.path):
                    raise ValueError(
                        f"{setting}: has a query, or a path of other characters than a-z, A-Z, 0-9,"
                        " '.', '_', '~' and '-', which sigv4 does not sign"
                    )
        if self.server_name and not any(url.lower().startswith("https://") for url in given):
            raise ValueError(
                f"server_name: {' and '.join(urls)} is not https://, so that no certificate is"
                " shown: take one of them out, or change it"
            )
        if self.server_name and not _HOST.fullmatch(self.server_name):
            raise ValueError(
                f"server_name: {self.server_name!r} is no name of a host: give it without a scheme,"
                " port and path"
            )


def _refuse_half_a_login(
    login: ReceiverSettings, urls: Mapping[str, Iterable[str]], *, is_signed: bool
) -> None:
    kinds = {
        "username": bool(login.username),
        "bearer_token": login.bearer_token is not None,
        "oauth": bool(login.oauth.token_url),
        "sigv4": is_signed,
    }
    given = [name for name, is_given in kinds.items() if is_given]
    if len(given) > 1:
        raise ValueError(f"{given[1]} and {given[0]} exclude each other: give one of them")
    if bool(login.username) != (login.password is not None):
        raise ValueError("username and password go together: give both or neither")
    if bool(login.cert_file) != bool(login.key_file):
        raise ValueError("cert_file and key_file go together: give both or neither")
    for setting, addresses in urls.items() if given else ():
        if any("@" in urlsplit(url).netloc for url in addresses):
            raise ValueError(
                f"{setting}: the login in it and {given[0]} exclude each other: take it out of the"
                " address"
            )


def _refuse_unusable_proxy(settings: ReceiverSettings) -> None:
    if not settings.proxy_url:
        for name in _OF_PROXY:
            if getattr(settings, name):
                raise ValueError(f"{name}: needs proxy_url too, the proxy that it is for")
        return
    _refuse_unusable_proxy_url(settings.proxy_url)
    if bool(settings.proxy_username) != (settings.proxy_password is not None):
        raise ValueError("proxy_username and proxy_password go together: give both or neither")
    if ":" in settings.proxy_username:
        raise ValueError("proxy_username: has a colon in it, behind which the password would begin")
    for text in settings.no_proxy:
        try:
            NoProxyEntry.parse(text)
        except ValueError as error:
            raise ValueError(f"no_proxy: {error}") from error


def _refuse_unusable_proxy_url(url: str) -> None:
    if may_part_a_login(url):
        raise ValueError(
            "proxy_url: must have no login in it; it is proxy_username and proxy_password_file"
        )
    try:
        require_http_url(url)
    except ValueError as error:
        raise ValueError(f"proxy_url: {error}") from error
    parts = urlsplit(url)
    if parts.path.strip("/") or parts.query:
        raise ValueError("proxy_url: has a path, which a proxy has not: give scheme, host and port")
