"""The settings of an HTTP connection to a receiver: credentials, TLS and proxy.

The settings of a sink inherit from these and add the receiver's address. Errors name the invalid
field.
"""

import re
from collections.abc import Iterable, Mapping
from typing import ClassVar, Final, Literal
from urllib.parse import urlsplit

import msgspec

from gpuledger.runtime.http.no_proxy import NoProxyEntry
from gpuledger.settings import Secret
from gpuledger.settings.groups import ClientCredentialsSettings, require_http_url
from gpuledger.settings.secret import may_contain_credentials

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
"""A path that every HTTP library sends unchanged."""
_OF_PROXY: Final = ("proxy_username", "proxy_password", "no_proxy")


class Sigv4Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AWS Signature Version 4, as required by Amazon Managed Service for Prometheus."""

    region: str = ""
    """Region of the workspace, such as `eu-central-1`. Empty disables signatures."""
    service: str = "aps"
    """Name of the AWS service in signatures."""
    access_key_id: str = ""
    """Access key ID; empty if a role is assumed."""
    secret_access_key: Secret | None = None
    """Secret access key that belongs to `access_key_id`."""
    session_token: Secret | None = None
    """Session token of temporary keys. A program that renews the keys must rewrite all their files.
    """
    role_arn: str = ""
    """Role to assume with a web identity token. Empty uses the variable `AWS_ROLE_ARN`, which EKS
    sets in pods whose service account has a role."""
    web_identity_token_file: str = ""
    """File of the web identity token, which the kubelet renews. Empty uses the variable
    `AWS_WEB_IDENTITY_TOKEN_FILE`."""
    sts_url: str = ""
    """STS endpoint; empty means `https://sts.<region>.amazonaws.com/`."""

    @property
    def exchange_url(self) -> str:
        """The URL of STS."""
        return self.sts_url or f"https://sts.{self.region}.amazonaws.com/"

    def __post_init__(self) -> None:
        """Raise `ValueError`, naming the field, if no signature can be made with these values."""
        if not self.region:
            for name in _OF_SIGV4:
                if getattr(self, name):
                    raise ValueError(f"{name}: requires region; set it or remove {name}")
            return
        if not _HOST.fullmatch(self.region):
            raise ValueError(
                f"region: invalid value: {self.region!r}; use a region such as eu-central-1"
            )
        if not _HOST.fullmatch(self.service):
            raise ValueError(f"service: invalid value: {self.service!r}; use a service such as aps")
        if bool(self.access_key_id) != (self.secret_access_key is not None):
            raise ValueError(
                "access_key_id and secret_access_key belong together; set both or neither"
            )
        if self.access_key_id and (self.role_arn or self.web_identity_token_file):
            raise ValueError("access_key_id and role_arn are mutually exclusive; set only one")
        if self.session_token and not self.access_key_id:
            raise ValueError(
                "session_token: requires access_key_id and secret_access_key; set them"
            )
        _require_https(self.exchange_url)


def _require_https(url: str) -> None:
    if not url.lower().startswith("https://"):
        # The value is not shown, because it may contain credentials.
        raise ValueError("sts_url: expected https://…, because the pod's token is sent to it")
    try:
        require_http_url(url)
    except ValueError as error:
        raise ValueError(f"sts_url: {error}") from error


class ReceiverSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Credentials, TLS trust and proxy of a connection to a receiver."""

    ADDRESS: ClassVar[str] = "url"
    """The name of the field with the receiver's address in a subclass."""

    username: str = ""
    """User for basic authentication; empty means none."""
    password: Secret | None = None
    """Password for basic authentication."""
    bearer_token: Secret | None = None
    """Token for `Authorization: Bearer`; excludes `username`."""
    header_files: dict[str, str] = msgspec.field(default_factory=dict)
    """Files with the values of additional headers, by header name, such as `X-Api-Key`."""
    oauth: ClientCredentialsSettings = ClientCredentialsSettings()
    """Client credentials for a bearer token that is fetched and renewed, instead of
    `bearer_token`."""
    ca_file: str = ""
    """PEM file of the CA certificates for the receiver; empty means the system's."""
    cert_file: str = ""
    """PEM file of the client certificate, if the receiver requires one; empty means none."""
    key_file: str = ""
    """PEM file of the client certificate's key, without a password."""
    server_name: str = ""
    """Name that the receiver's certificate must contain, also sent as SNI; empty means the host of
    the address."""
    min_tls_version: MinTlsVersion = "1.2"
    """Minimum TLS version, `"1.2"` or `"1.3"` (in YAML with quotes)."""
    proxy_url: str = ""
    """Proxy for the receiver and the token endpoint, `http://host:port` or `https://…`. Empty means
    none; `HTTP_PROXY` and `HTTPS_PROXY` are ignored."""
    proxy_username: str = ""
    """User for basic authentication at the proxy; empty means none."""
    proxy_password: Secret | None = None
    """Password for basic authentication at the proxy."""
    no_proxy: list[str] = msgspec.field(default_factory=list)
    """Destinations reached without the proxy: domains (`example.com`; `.svc` for subdomains only),
    addresses and networks (`10.0.0.0/8`), optionally with a port; `*` for all."""

    def refuse_unusable(self, *, sigv4: Sigv4Settings | None = None, **urls: Iterable[str]) -> None:
        """Raise ValueError naming a missing or invalid field, or two mutually exclusive fields.

        `urls` are the receiver's addresses, by the name of their setting.
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
                        f"{setting}: sigv4 cannot sign this address; remove the query, and use only"
                        " a-z, A-Z, 0-9, '.', '_', '~' and '-' in the path"
                    )
        if self.server_name and not any(url.lower().startswith("https://") for url in given):
            raise ValueError(
                f"server_name: {' and '.join(urls)} is not https://, so there is no certificate;"
                " remove server_name or change the address"
            )
        if self.server_name and not _HOST.fullmatch(self.server_name):
            raise ValueError(
                f"server_name: invalid host name: {self.server_name!r}; give it without a scheme,"
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
        raise ValueError(f"{given[1]} and {given[0]} are mutually exclusive; set only one")
    if bool(login.username) != (login.password is not None):
        raise ValueError("username and password belong together; set both or neither")
    if bool(login.cert_file) != bool(login.key_file):
        raise ValueError("cert_file and key_file belong together; set both or neither")
    for setting, addresses in urls.items() if given else ():
        if any("@" in urlsplit(url).netloc for url in addresses):
            raise ValueError(
                f"{setting}: credentials in the address and {given[0]} are mutually exclusive;"
                " remove them from the address"
            )


def _refuse_unusable_proxy(settings: ReceiverSettings) -> None:
    if not settings.proxy_url:
        for name in _OF_PROXY:
            if getattr(settings, name):
                raise ValueError(f"{name}: requires proxy_url; set it or remove {name}")
        return
    _refuse_unusable_proxy_url(settings.proxy_url)
    if bool(settings.proxy_username) != (settings.proxy_password is not None):
        raise ValueError("proxy_username and proxy_password belong together; set both or neither")
    if ":" in settings.proxy_username:
        raise ValueError("proxy_username: must not contain a colon, which ends the user name")
    for text in settings.no_proxy:
        try:
            NoProxyEntry.parse(text)
        except ValueError as error:
            raise ValueError(f"no_proxy: {error}") from error


def _refuse_unusable_proxy_url(url: str) -> None:
    if may_contain_credentials(url):
        raise ValueError(
            "proxy_url: must not contain credentials; use proxy_username and proxy_password_file"
        )
    try:
        require_http_url(url)
    except ValueError as error:
        raise ValueError(f"proxy_url: {error}") from error
    parts = urlsplit(url)
    if parts.path.strip("/") or parts.query:
        raise ValueError("proxy_url: must not have a path or query; give scheme, host and port")
