"""The settings by which a sink shows a receiver who it is, and knows the receiver."""

from collections.abc import Iterable
from urllib.parse import urlsplit

import msgspec

from gpuledger.settings import Secret


class LoginSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who the sender is, and whom it trusts."""

    username: str = ""
    """User for basic authentication; empty means none."""
    password: Secret | None = None
    """Password for basic authentication."""
    bearer_token: Secret | None = None
    """Token for `Authorization: Bearer`; not together with a username."""
    ca_file: str = ""
    """PEM file of the authority behind the receiver's certificate; empty means the system's."""
    cert_file: str = ""
    """PEM file of the own certificate, where the receiver asks for one; empty means none."""
    key_file: str = ""
    """PEM file of the key of that certificate, without a password."""


def refuse_half_a_login(login: LoginSettings, **urls: Iterable[str]) -> None:
    """Raise ValueError naming what is missing, or what excludes each other.

    The addresses that are logged in to are given under their setting's name.
    """
    if login.bearer_token is not None and login.username:
        raise ValueError("bearer_token and username exclude each other: give one of them")
    if bool(login.username) != (login.password is not None):
        raise ValueError("username and password go together: give both or neither")
    if bool(login.cert_file) != bool(login.key_file):
        raise ValueError("cert_file and key_file go together: give both or neither")
    if login.username or login.bearer_token is not None:
        for setting, given in urls.items():
            if any("@" in urlsplit(url).netloc for url in given):
                raise ValueError(
                    f"{setting}: the login in it and username or bearer_token exclude each other:"
                    " take it out of the address"
                )
