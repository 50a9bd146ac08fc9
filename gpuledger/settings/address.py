"""Addresses: one to listen on, that of a receiver, and how either is shown. Opens no socket."""

import re
from typing import Final
from urllib.parse import SplitResult, urlsplit

from gpuledger.settings.secret import MASK, mask_address, may_part_a_login

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


# How addresses are shown to people: without user, password or query, where tokens may stand.
#
# Here lives what is known to be an address. Masking whatever looks like one within a longer text is
# `gpuledger.settings.secret`'s.

_SCHEME: Final = "://"
_PLAIN_HOST: Final = re.compile(r"(?:[\w.-]*|\[[0-9A-Fa-f:.]+\])(?::\d*)?(?:;.*)?", re.ASCII)
_NO_HOST: Final = re.compile(r"/[^/]")
"""What follows the scheme of a folder of this machine, `file:///var`."""
_PLAIN_BROKER: Final = re.compile(r"\s*(?:[\w.-]*|\[[0-9A-Fa-f:.]+\])(?::\d*)?\s*", re.ASCII)
_PLAIN_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")


def shown_url(url: str) -> str:
    """Return the URL, or the path, with nothing in it that may be a secret.

    Where a password that is not encoded makes it unclear what the host is, only the scheme is left.
    """
    scheme, found, _ = url.partition(_SCHEME)
    if not found or not _PLAIN_SCHEME.fullmatch(scheme):
        return _shown_bare(url)
    try:
        parts = urlsplit(url)
        if _may_hide_a_password(parts):
            return f"{scheme}{_SCHEME}{MASK}"
    except ValueError:  # no port, or no host, that anything could be sent to
        return f"{scheme}{_SCHEME}{MASK}"
    host = _host(parts)
    if not _PLAIN_HOST.fullmatch(host) or not (host or _NO_HOST.match(parts.path)):
        return f"{scheme}{_SCHEME}{MASK}"
    return mask_address(f"{scheme}{_SCHEME}{host}{_shown_path(parts.path)}")


def _shown_path(path: str) -> str:
    """Return the path up to what looks like a name and its value: a query that lacks its sign."""
    plain, has_value, _ = path.partition(";")[0].partition("=")
    return plain.rpartition("/")[0] if has_value else plain


def _shown_bare(text: str) -> str:
    """Return a path as it is, and what lacks its scheme without what would be the user."""
    if text.startswith("/") and not text.startswith("//"):
        return mask_address(text)
    address, query = (*re.split(r"[?;#]", text, maxsplit=1), "")[:2]
    if may_part_a_login(query):
        return MASK
    return mask_address(address)


def _host(parts: SplitResult) -> str:
    return parts.netloc.rpartition("@")[2]


def shown_brokers(servers: str) -> str:
    """Return Kafka's addresses, `host:port[,host:port…]`, with nothing in it that may be a secret.

    Where one of them is more or less than a host and a port, none is shown.
    """
    before, found, after = servers.rpartition(_SCHEME)
    scheme, brokers = f"{before}{found}", after
    if found and not _PLAIN_SCHEME.fullmatch(before):
        return MASK
    is_plain = all(map(_PLAIN_BROKER.fullmatch, brokers.split(",")))
    return servers if is_plain else f"{scheme}{MASK}"


def shown_mistake(url: str) -> str:
    """Return what is wrong as the address of a receiver, as `shown_url` does.

    What has no scheme may be a part of a longer one, and is shown only where it has a port.
    """
    if _SCHEME in url or not url:
        return shown_url(url)
    return url if _PLAIN_BROKER.fullmatch(url) and ":" in url else MASK


def _may_hide_a_password(parts: SplitResult) -> bool:
    """Return whether `/`, `?` or `#` may have cut user and password off from the host.

    They may stand in the password, or a slash too many before the user; or the password is a part
    of a query. Raises ValueError where the port is none.
    """
    has_port = parts.port is not None  # asked of every address, as it raises
    behind = f"{parts.path}{parts.query}{parts.fragment}"
    return may_part_a_login(behind) or (has_port and not parts.hostname)
