"""The settings of the connection to a receiver over HTTP: login, TLS and proxy.

A sink's section has them beside its addresses. What cannot work is refused by the field's name.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final, Literal
from urllib.parse import urlsplit

import msgspec

from gpuledger.runtime.http.no_proxy import NoProxyEntry
from gpuledger.settings import Secret
from gpuledger.settings.groups import ClientCredentialsSettings, require_http_url
from gpuledger.settings.secret import may_part_a_login

MinTlsVersion = Literal["1.2", "1.3"]
_HOST: Final = re.compile(r"[\w.-]+", re.ASCII)
_OF_PROXY: Final = ("proxy_username", "proxy_password", "no_proxy")


class ReceiverSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who the sender is, whom it trusts, and by what way it goes."""

    username: str = ""
    """User for basic authentication; empty means none."""
    password: Secret | None = None
    """Password for basic authentication."""
    bearer_token: Secret | None = None
    """Token for `Authorization: Bearer`; not together with a username."""
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

    def refuse_unusable(self, **urls: Iterable[str]) -> None:
        """Raise ValueError naming what is missing, or what excludes each other.

        The receiver's addresses are given under their setting's name.
        """
        _refuse_half_a_login(self, urls)
        _refuse_unusable_proxy(self)
        given = [url for each in urls.values() for url in each]
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


def _refuse_half_a_login(login: ReceiverSettings, urls: Mapping[str, Iterable[str]]) -> None:
    kinds = {
        "username": bool(login.username),
        "bearer_token": login.bearer_token is not None,
        "oauth": bool(login.oauth.token_url),
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
