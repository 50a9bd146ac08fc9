"""How addresses are shown to people: without user, password or query, where tokens may stand.

Here lives what is known to be an address. Masking whatever looks like one within a longer text is
`gpuledger.settings.secret`'s.
"""

from typing import Final
from urllib.parse import SplitResult, urlsplit

from gpuledger.settings.secret import MASK

_SCHEME: Final = "://"


def shown_url(url: str) -> str:
    """Return the URL, or the path, with nothing in it that may be a secret.

    Where a password that is not encoded makes it unclear what the host is, only the scheme is left.
    """
    scheme, found, _ = url.partition(_SCHEME)
    if not found:
        return _shown_bare(url)
    try:
        parts = urlsplit(url)
        if _may_hide_a_password(parts):
            return f"{scheme}{_SCHEME}{MASK}"
    except ValueError:  # no port, or no host, that anything could be sent to
        return f"{scheme}{_SCHEME}{MASK}"
    return f"{scheme}{_SCHEME}{_host(parts)}{parts.path}"


def shown_servers(servers: str) -> str:
    """Return brokers, `host:port[,…]`, with what stands before an `@` masked."""
    _, has_user, hosts = servers.rpartition("@")
    return f"{MASK}@{hosts}" if has_user else servers


def _shown_bare(text: str) -> str:
    """Return a path as it is, and what lacks its scheme without what would be the user."""
    if text.startswith("/"):
        return text
    address, _, query = text.partition("?")
    return MASK if "@" in query else shown_servers(address)


def _host(parts: SplitResult) -> str:
    return parts.netloc.rpartition("@")[2]


def _may_hide_a_password(parts: SplitResult) -> bool:
    """Return whether `/`, `?` or `#` in a password have cut it off from its host.

    Raises ValueError where the port is none.
    """
    has_port = parts.port is not None
    behind = f"{parts.path}?{parts.query}" if has_port or not parts.path else ""
    return "@" in behind or "@" in parts.fragment
