"""AWS Signature Version 4 of a request: headers in, headers out. Pure.

The signature covers the method, path, body, host, time and session token, but no headers that
proxies may change. Queries, and paths with characters that need escaping, are not supported,
because no receiver uses them.
"""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import inf
from typing import Final
from urllib.parse import urlsplit

_ALGORITHM: Final = "AWS4-HMAC-SHA256"
_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True, kw_only=True)
class AwsKeys:
    """AWS keys for signatures."""

    access_key_id: str
    secret_access_key: str = field(repr=False)
    session_token: str = field(default="", repr=False)
    """Only for temporary keys, otherwise empty."""
    begin_seconds: float = 0.0
    """When these keys were obtained, in seconds since the epoch."""
    end_seconds: float = inf
    """When these keys expire, in seconds since the epoch; infinite if they do not."""

    @property
    def text(self) -> str:
        """The secret key, which identifies these keys and is masked in messages."""
        return self.secret_access_key


def signature_headers(
    url: str,
    body: bytes,
    *,
    keys: AwsKeys,
    region: str,
    service: str,
    time_seconds: float,
    headers: Mapping[str, str] | None = None,
    method: str = "POST",
) -> dict[str, str]:
    """Return the headers to add to a request to sign it.

    `headers` are other headers of the request that the signature must cover. `time_seconds` is the
    current time in seconds since the epoch.
    """
    at = datetime.fromtimestamp(time_seconds, tz=UTC)
    stamp, parts = f"{at:%Y%m%dT%H%M%SZ}", urlsplit(url)
    added = {"X-Amz-Date": stamp}
    if keys.session_token:
        added["X-Amz-Security-Token"] = keys.session_token
    signed = {
        name.lower(): " ".join(value.split())
        for name, value in {**(headers or {}), **added, "host": _host(url)}.items()
    }
    names = ";".join(sorted(signed))
    canonical = "\n".join(
        [
            method,
            parts.path or "/",
            "",  # the query
            *(f"{name}:{signed[name]}" for name in sorted(signed)),
            "",
            names,
            hashlib.sha256(body).hexdigest(),
        ]
    )
    scope = f"{at:%Y%m%d}/{region}/{service}/aws4_request"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    key = f"AWS4{keys.secret_access_key}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    to_sign = f"{_ALGORITHM}\n{stamp}\n{scope}\n{digest}"
    signature = hmac.digest(key, to_sign.encode(), "sha256").hex()
    added["Authorization"] = (
        f"{_ALGORITHM} Credential={keys.access_key_id}/{scope}, SignedHeaders={names},"
        f" Signature={signature}"
    )
    return added


def _host(url: str) -> str:
    """Return the `Host` header as sent: without the scheme's default port."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2].lower()
    return host.removesuffix(f":{_PORTS.get(parts.scheme.lower())}")
