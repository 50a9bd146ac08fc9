"""Masks the credentials of a request if the server's answer quotes them. Does no I/O.

Answers are shown on health pages and in the log. Each secret is searched for in its usual forms,
which `docs/concepts/security.md` lists.
"""

import base64
import html
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Final
from urllib.parse import parse_qsl, quote, quote_plus, unquote, urlsplit

from gpuledger.settings.secret import MASK

_MIN_CHARACTERS: Final = 4
"""A shorter secret is masked only in the form that was sent, because its other forms may be part of
ordinary words. A shorter query value, such as `db=1`, does not count as a secret."""
_SECRET_HEADER: Final = re.compile(
    r"auth|token|key|secret|passw|credential|cookie|signature", re.IGNORECASE
)


@dataclass(frozen=True)
class BasicCredentials:
    """Secrets that were sent to a server."""

    secrets: tuple[str, ...] = ()

    @classmethod
    def sent(cls, url: str, headers: Mapping[str, str]) -> "BasicCredentials":
        """Return the secrets in a request's headers and in its URL's user and query."""
        secrets = (*_of_headers(headers), *_of_address(url))
        return cls(tuple(dict.fromkeys(filter(str.strip, secrets))))

    def mask(self, text: str) -> str:
        """Return the text with all secrets masked, even if the text ends within a secret."""
        for form in self._forms:
            text = text.replace(form, MASK)
        cut = max((_length_of_cut(text, form) for form in self._forms), default=0)
        return text[: len(text) - cut] + MASK if cut else text

    @cached_property
    def _forms(self) -> list[str]:
        forms = {form for secret in self.secrets if secret.strip() for form in _forms_of(secret)}
        return sorted(forms, key=len, reverse=True)


NO_CREDENTIALS: Final = BasicCredentials()


def _of_headers(headers: Mapping[str, str]) -> Iterator[str]:
    for name, value in headers.items():
        if not _SECRET_HEADER.search(name):
            continue
        scheme, _, token = value.strip().partition(" ")
        if "authorization" not in name.lower() or not token:
            yield value.strip()
            continue
        yield token.strip()
        if scheme.lower() == "basic":
            with suppress(ValueError):  # a token that is not base64 is masked as it is
                yield from _of_pair(base64.b64decode(token).decode(errors="replace"))


def _of_address(url: str) -> Iterator[str]:
    with suppress(ValueError):
        parts = urlsplit(url)
        if parts.password:
            yield parts.password
            yield from _of_pair(f"{unquote(parts.username or '')}:{unquote(parts.password)}")
        for name, value in parse_qsl(parts.query, keep_blank_values=True):
            if len(value or name) >= _MIN_CHARACTERS:
                yield value or name


def _of_pair(pair: str) -> Iterator[str]:
    """Yield the secrets in `user:password`: the password, and the whole pair in base64.

    The user is not a secret, because it may be any word.
    """
    yield pair.partition(":")[2]
    yield from _in_base64(pair.encode(errors="replace"))
    # aiohttp encodes credentials in a URL as Latin-1.
    yield from _in_base64(pair.encode("latin-1", errors="replace"))


def _in_base64(data: bytes) -> Iterator[str]:
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        yield encode(data).decode().rstrip("=")


def _forms_of(secret: str) -> Iterator[str]:
    yield secret
    if len(secret) < _MIN_CHARACTERS:
        return
    yield from (quote(secret), quote(secret, safe=""), quote_plus(secret), html.escape(secret))
    yield from (json.dumps(secret, ensure_ascii=is_ascii)[1:-1] for is_ascii in (True, False))
    yield from _in_base64(secret.encode(errors="replace"))


def _length_of_cut(text: str, form: str) -> int:
    """Return how many characters of an incomplete secret are at the end of the text.

    `form` is the complete secret in one of its forms. Returns 0 if the text does not end with the
    first characters of `form`, or with too few of them.
    """
    lengths = range(min(len(form) - 1, len(text)), _MIN_CHARACTERS - 1, -1)
    return next((length for length in lengths if text.endswith(form[:length])), 0)
