"""How addresses are shown to people: without user, password or query, where tokens may stand.

Here lives what is known to be an address. Masking whatever looks like one within a longer text is
`gpuledger.settings.secret`'s.
"""

import re
from typing import Final
from urllib.parse import SplitResult, urlsplit

from gpuledger.settings.secret import MASK, mask_address

_SCHEME: Final = "://"
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
    return mask_address(f"{scheme}{_SCHEME}{_host(parts)}{parts.path.partition(';')[0]}")


def _shown_bare(text: str) -> str:
    """Return a path as it is, and what lacks its scheme without what would be the user."""
    if text.startswith("/") and not text.startswith("//"):
        return mask_address(text)
    address, query = (*re.split(r"[?;#]", text, maxsplit=1), "")[:2]
    if "@" in query:
        return MASK
    _, has_user, host = address.rpartition("@")
    return f"{MASK}@{host}" if has_user else address


def _host(parts: SplitResult) -> str:
    return parts.netloc.rpartition("@")[2]


def _may_hide_a_password(parts: SplitResult) -> bool:
    """Return whether `/`, `?` or `#` have cut user and password off from the host.

    They may stand in the password, or a slash too many before the user. Raises ValueError where the
    port is none.
    """
    has_port = parts.port is not None
    behind = parts.query if has_port or not parts.path else ""
    return "@" in f"{parts.path}{behind}{parts.fragment}"
