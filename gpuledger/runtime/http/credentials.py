"""The credentials that a request carries, masked in what its server answers.

What a server answers is shown on a page that is open and in the log, so all of it goes through
here. In which writings it may quote them is `gpuledger.runtime.quotes`'s business. Pure.
"""

import base64
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

from gpuledger.runtime.quotes import mask_quotes

_TELLING_HEADER: Final = re.compile(
    r"auth|token|key|secret|passw|credential|cookie|signature", re.IGNORECASE
)
_MIN_OF_QUERY: Final = 4
"""A value of the query that is shorter, such as `db=1`, is no secret, and stands in many a word."""


@dataclass(frozen=True)
class BasicCredentials:
    """Secrets that were sent to a server."""

    secrets: tuple[str, ...] = ()

    @classmethod
    def sent(cls, url: str, headers: Mapping[str, str]) -> "BasicCredentials":
        """Return those of a request: of its headers, and of its address' user and query."""
        secrets = (*_of_headers(headers), *_of_address(url))
        return cls(tuple(dict.fromkeys(filter(str.strip, secrets))))

    def mask(self, text: str) -> str:
        """Return the text with each of them masked, also one within which the text breaks off."""
        return mask_quotes(text, self.secrets)


NO_CREDENTIALS: Final = BasicCredentials()


def _of_headers(headers: Mapping[str, str]) -> Iterator[str]:
    for name, value in headers.items():
        if not _TELLING_HEADER.search(name):
            continue
        scheme, _, token = value.strip().partition(" ")
        if "authorization" not in name.lower() or not token:
            yield value.strip()
            continue
        yield token.strip()
        if scheme.lower() == "basic":
            yield from _of_pair(_decoded(token))


def _of_address(url: str) -> Iterator[str]:
    with suppress(ValueError):
        parts = urlsplit(url)
        if parts.password:
            yield parts.password
            yield from _of_pair(f"{unquote(parts.username or '')}:{unquote(parts.password)}")
        for name, value in parse_qsl(parts.query, keep_blank_values=True):
            if len(value or name) >= _MIN_OF_QUERY:
                yield value or name


def _of_pair(pair: str) -> Iterator[str]:
    """Yield the secrets of `user:password`: a user alone is none, its name may be any word."""
    yield pair.partition(":")[2]
    yield from _in_base64(pair.encode(errors="replace"))
    yield from _in_base64(pair.encode("latin-1", errors="replace"))  # aiohttp's, of an address


def _decoded(text: str) -> str:
    try:
        return base64.b64decode(text).decode(errors="replace")
    except ValueError:
        return ""


def _in_base64(data: bytes) -> Iterator[str]:
    yield base64.b64encode(data).decode().rstrip("=")
    yield base64.urlsafe_b64encode(data).decode().rstrip("=")
