"""The credentials that a request carries, masked in what its server answers.

A server may quote them, as they were sent or in another writing. What it answers is shown on a page
that is open and in the log, so all that is quoted goes through here. Pure.
"""

import base64
import html
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, quote, quote_plus, unquote, urlsplit

from gpuledger.settings.secret import MASK

_TELLING_HEADER: Final = re.compile(
    r"auth|token|key|secret|passw|credential|cookie|signature", re.IGNORECASE
)
_MIN_OF_QUERY: Final = 4
"""A value of the query that is shorter, such as `db=1`, is no secret, and stands in many a word."""
_MIN_ENCODED: Final = 4
"""A shorter secret is looked for as it is alone: its other writings stand in many a word."""
_MIN_CUT: Final = 4
"""Where an answer breaks off within a credential, so many of its characters are masked as well."""


@dataclass(frozen=True)
class BasicCredentials:
    """Secrets that were sent to a server, in each writing in which it may quote them."""

    writings: tuple[str, ...] = ()
    """The longest first, so that what is part of another does not hide that one."""

    @classmethod
    def sent(cls, url: str, headers: Mapping[str, str]) -> "BasicCredentials":
        """Return those of a request: of its headers, and of its address' user and query."""
        secrets = filter(str.strip, (*_of_headers(headers), *_of_address(url)))
        found = {one for secret in secrets for one in _writings(secret)}
        return cls(tuple(sorted(found, key=lambda one: (-len(one), one))))

    def mask(self, text: str) -> str:
        """Return the text with each of them masked, also one within which the text breaks off."""
        kept_from = 0
        pieces: list[str] = []
        for start, end in _merged(self._places(text)):
            pieces += (text[kept_from:start], MASK)
            kept_from = end
        masked = "".join((*pieces, text[kept_from:]))
        for writing in self.writings:
            masked = _mask_cut(masked, writing)
        return masked

    def _places(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield where they stand, whatever the case and whatever stands between their characters.

        That may be the line ends of base64, or the zeros of UTF-16, which are shown as replaced.
        """
        seen = [place for place, one in enumerate(text) if _is_seen(one)]
        squeezed = "".join(text[place] for place in seen).lower()
        for writing in self.writings:
            if all(_is_seen(one) or one == " " for one in writing):
                wanted = writing.replace(" ", "").lower()
                for start in _find_all(wanted, squeezed):
                    yield seen[start], seen[start + len(wanted) - 1] + 1
            else:
                yield from ((start, start + len(writing)) for start in _find_all(writing, text))


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


def _writings(secret: str) -> Iterator[str]:
    """Yield a secret as it is, and as URLs, JSON, HTML, Python and base64 write it."""
    yield secret
    if len(secret) < _MIN_ENCODED:
        return
    yield from (quote(secret), quote(secret, safe=""), quote_plus(secret))
    yield from (json.dumps(secret)[1:-1], json.dumps(secret).replace("/", r"\/")[1:-1])
    yield from (html.escape(secret), repr(secret)[1:-1])
    yield from _in_base64(secret.encode(errors="replace"))


def _in_base64(data: bytes) -> Iterator[str]:
    yield base64.b64encode(data).decode().rstrip("=")
    yield base64.urlsafe_b64encode(data).decode().rstrip("=")


def _is_seen(character: str) -> bool:
    return "!" <= character <= "~"


def _find_all(wanted: str, text: str) -> Iterator[int]:
    start = text.find(wanted)
    while start >= 0:
        yield start
        start = text.find(wanted, start + len(wanted))


def _merged(places: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(places):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _mask_cut(text: str, writing: str) -> str:
    longest = min(len(writing) - 1, len(text))
    for length in range(longest, _MIN_CUT - 1, -1):
        if text.endswith(writing[:length]):
            return text[: len(text) - length] + MASK
    return text
