"""Addresses: one to listen on, `host:port`, or that of a receiver. Nothing here opens a socket."""

import re
from typing import Final
from urllib.parse import urlsplit

from gpuledger.settings.secret import may_part_a_login
from gpuledger.settings.shown import shown_brokers, shown_mistake

_ADDRESS: Final = re.compile(
    r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[^\s:\[\]/]*)):(?P<port>\d{1,5})"
)
_BROKER: Final = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[\w.-]+):(?P<port>\d{1,5})", re.ASCII)
_MAX_PORT: Final = 65535


def parse_listen(listen: str) -> tuple[str, int]:
    """Take `host:port` or `[ipv6]:port` apart; no host means all interfaces, 0 any free port.

    Raises `ValueError` naming the value where it is neither.
    """
    found = _ADDRESS.fullmatch(listen)
    if not found or int(found["port"]) > _MAX_PORT:
        raise ValueError(f"expected host:port such as 0.0.0.0:9820, got {listen!r}")
    return found["six"] or found["host"] or "0.0.0.0", int(found["port"])  # noqa: S104  # that is what an empty host asks for


def require_brokers(servers: str) -> None:
    """Raise `ValueError` naming the value where it is not `host:port[,host:port…]`.

    An IPv6 address stands in brackets; blanks around a broker are allowed, the client strips them.
    """
    for server in servers.split(","):
        found = _BROKER.fullmatch(server.strip())
        if found and 0 < int(found["port"]) <= _MAX_PORT:
            continue
        remedy = "expected host:port[,host:port…]"
        if may_part_a_login(servers):
            remedy += "; user and password are kafka.sasl_username and kafka.sasl_password"
        elif "://" in servers:
            remedy += " without a scheme; TLS and login are kafka.security_protocol"
        raise ValueError(f"bootstrap_servers {shown_brokers(servers)!r}: {remedy}")


def require_http_url(url: str) -> None:
    """Raise `ValueError` naming the value where no request can be sent to it.

    Of the value only what cannot be secret is named, and the parser's own words are left out.
    """
    shown = repr(shown_mistake(url))
    if not url.lower().startswith(("http://", "https://")):
        raise ValueError(f"{shown} must begin with http:// or https://")
    try:
        parts = urlsplit(url)
        has_host, _ = bool(parts.hostname), parts.port
    except ValueError:
        raise ValueError(
            f"{shown} has a port or host that is none; in a user or password write"
            " / as %2F, # as %23, ? as %3F, @ as %40, and in a list , as %2C"
        ) from None
    if not has_host or re.search(r"[\s\x00-\x1f]", parts.netloc):
        raise ValueError(
            f"{shown} names no host, or has a blank in it: expected one such as http://host:9090/path"
        )
