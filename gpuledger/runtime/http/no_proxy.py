"""Decides which servers are reached without the proxy, like the `NO_PROXY` variable. Does no I/O.

The rules are those of Go, and so of Prometheus and Alertmanager:

- A name matches that host and all its subdomains; with a leading dot, only the subdomains.
- A network matches hosts that are written as IP addresses; names are not resolved.
- `*` matches everything.
- A port after an entry restricts it to that port.
- This machine itself is always reached without the proxy.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final
from urllib.parse import urlsplit

_PORTS: Final = {"http": 80, "https": 443}
_NAME: Final = re.compile(r"(?:\*?\.)?[a-z0-9_](?:[a-z0-9_.-]*[a-z0-9_])?\.?")
_NUMBERS: Final = re.compile(r"[\d.]+")
"""A malformed IPv4 address; not a valid host name."""
_WITH_PORT: Final = re.compile(
    r"(?:\[(?P<six>[0-9a-f:.]+)\]|(?P<host>[^\s:\[\]]+))(?::(?P<port>\d{1,5}))?"
)
_MAX_PORT: Final = 65_535


@dataclass(frozen=True)
class NoProxyEntry:
    """One entry: a name or a network, with an optional port."""

    name: str = ""
    """Lower-case name; with a leading dot it only matches subdomains; `*` matches everything."""
    network: IPv4Network | IPv6Network | None = None
    port: int | None = None

    @classmethod
    def parse(cls, text: str) -> "NoProxyEntry":
        """Return the parsed entry; raise `ValueError` if it is invalid."""
        text = text.strip().lower()
        if text == "*":
            return cls(name=text)
        # Tried first, so that a colon in an IPv6 address is not mistaken for the colon before a
        # port.
        try:
            return cls(network=ip_network(text, strict=False))
        except ValueError:
            found = _WITH_PORT.fullmatch(text)
        port = int(found["port"]) if found and found["port"] else None
        if not found or (port is not None and not 0 < port <= _MAX_PORT):
            raise _no_entry(text)
        host = found["six"] or found["host"]
        try:
            return cls(network=ip_network(host), port=port)
        except ValueError:
            pass
        if found["six"] or not _NAME.fullmatch(host) or _NUMBERS.fullmatch(host):
            raise _no_entry(text)
        return cls(name=host.removeprefix("*").rstrip("."), port=port)

    def matches(self, host: str, address: IPv4Address | IPv6Address | None, port: int) -> bool:
        """Return whether the entry matches a host; `address` is set if `host` is an IP address."""
        if self.port not in (None, port):
            return False
        if self.network is not None:
            return address is not None and address in self.network
        if self.name == "*":
            return True
        if self.name.startswith("."):
            return host.endswith(self.name)
        return host == self.name or host.endswith(f".{self.name}")


def _no_entry(text: str) -> ValueError:
    return ValueError(
        f"invalid host, domain, address or network: {text!r}; expected for example example.com,"
        " .svc, 10.0.0.0/8 or host:8443"
    )


def is_reached_directly(url: str, entries: Iterable[NoProxyEntry]) -> bool:
    """Return whether a server is reached without the proxy."""
    parts = urlsplit(url)
    host = (parts.hostname or "").lower().rstrip(".")
    try:
        address = ip_address(host)
    except ValueError:
        address = None
    if host == "localhost" or (address is not None and address.is_loopback):
        return True
    port = parts.port or _PORTS.get(parts.scheme.lower(), 0)
    return any(entry.matches(host, address, port) for entry in entries)
