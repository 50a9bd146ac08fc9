"""A text that must not be seen, and addresses, which may hold one. The only place that masks.

`Secret` is the text, `mask_addresses` masks whatever looks like an address in a longer text, and
`shown_url` and `shown_brokers` show what is known to be one. Where secrets come from is the
loader's business.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

from typing_extensions import override

from gpuledger.errors import SettingsError
from gpuledger.small_files import read_small_file

MASK: Final = "********"

# Addresses are not recognized by their shape, as people mistype them, and such a one ends in an
# error message: whatever stands where an address may have its secrets is masked, too much rather
# than too little. The secrets are user and password, before the last `@`, and a token behind `?`,
# `#`, `;`.
_AT: Final = re.compile(r"@|%40|[\uff20\ufe6b]|\\+u(?:0040|[fF]{2}20|[fF][eE]6[bB])")
"""What parts user and password from the host, also as keyboards, addresses and JSON write it."""
_MAY_BE_SECRET: Final = re.compile(rf"[?#;]|{_AT.pattern}")
_WORD: Final = re.compile(r"[^\s\"']+")
# What may stand before user and password: a plain scheme, in a text as `name=scheme://` too.
_SCHEME: Final = re.compile(r"\s*(?:(?:[\w.-]*[=(\[{<])?[A-Za-z][A-Za-z0-9+.-]{0,15}:)?//+|\s*")
_PATH: Final = re.compile(r"\s*(?:[\w.-]+=)?/(?![/\s])[^:]*:?")
_SIGN: Final = re.compile(r"[?#;]")
_OPTION: Final = re.compile(r"[?#;][^=]*=")
# A host is followed by a port, and where it is not it is a user, and what follows a password.
_LOGIN: Final = re.compile(
    r"([A-Za-z][A-Za-z0-9+.-]{0,15}://)(?!\[)[^/?#\[]*?"
    r":(?!(?:\d{0,5}|port)(?:[,/?#\s\"'\[\])}>…]|[.:;]+(?:\s|\Z)|\Z)).*",
    re.DOTALL,
)
_SCHEME_SIGN: Final = "://"
_OF_SERVERS: Final = ("http://", "https://", "kafka://")
_TAIL: Final = re.compile(r"([?#;]).+", re.DOTALL)
_HOST_AND_TAIL: Final = re.compile(r"[\w.\])-]:[^?#;]*[?#;]")


def mask_addresses(text: str) -> str:
    """Return a text with what may be a secret masked in each of its words.

    A word ends at a blank or a quote: a whole value, which may hold some, is for `mask_address`.
    """
    if not _MAY_BE_SECRET.search(text) and _SCHEME_SIGN not in text:
        return text
    return _WORD.sub(lambda found: _mask_word(found[0]), text)


def mask_address(value: str) -> str:
    """Return a value that may be an address, however mistyped, with what may be a secret masked.

    That is all before the last `@` but a plain scheme, and all after the first `?`, `#` or `;`
    behind it; and all but the scheme where the `@` may stand in a token, or what is behind a colon
    is no port. A path that begins with one slash and has no colon stays as it is, but for what it
    has behind an `=`.
    """
    return _mask(value if _AT.search(value) else _LOGIN.sub(rf"\1{MASK}", value))


def _mask(value: str) -> str:
    if not _MAY_BE_SECRET.search(value):
        return value
    if _PATH.fullmatch(value):
        return _mask_tail(value) if _OPTION.search(value) else value
    if signs := list(_AT.finditer(value)):
        before, behind = value[: signs[-1].start()], value[signs[-1].end() :]
        scheme = _SCHEME.match(before)
        kept = scheme[0] if scheme else ""
        if _SIGN.search(before):
            return f"{kept}{MASK}"
        masked = MASK if len(before) > len(kept) else ""
        return f"{kept}{masked}{signs[-1][0]}{_mask_tail(behind)}"
    if "/" in value or _HOST_AND_TAIL.search(value):
        return _mask_tail(value)
    return value


def may_part_a_login(text: str) -> bool:
    """Return whether something in the text may part a user and a password from a host."""
    return _AT.search(text) is not None


def _mask_tail(text: str) -> str:
    return _TAIL.sub(rf"\1{MASK}", text)


def mask_texts(message: str, texts: Iterable[str]) -> str:
    """Return a message about some values, each of them masked as a whole, then each word."""
    for text in sorted(texts, key=len, reverse=True):
        shown = mask_address(text)
        if shown != text:
            message = message.replace(repr(text), repr(shown)).replace(text, shown)
    return mask_addresses(message)


def _mask_word(word: str) -> str:
    """Return the word masked; backslashes at its end belong to the quote behind it, as in JSON."""
    bare = word.rstrip("\\")
    mask = mask_address if bare.lower().startswith(_OF_SERVERS) else _mask
    return mask(bare) + word[len(bare) :]


def mask_value(value: Any) -> Any:  # noqa: ANN401  # any built-in value
    """Return a setting's value for people, each text in it masked as an address is."""
    if isinstance(value, dict):
        return {mask_value(key): mask_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [mask_value(inner) for inner in value]
    return mask_address(value) if isinstance(value, str) else value


class Secret:
    """A text that shows a mask wherever it is printed, logged or encoded."""

    __slots__ = ("_text", "file")

    def __init__(self, text: str, *, file: Path | None = None) -> None:
        """Take the text, and the file that it stands in, where it came from one."""
        self._text = text
        self.file = file

    @classmethod
    def load(cls, file: Path, *, name: str, is_known: bool = False) -> "Secret":
        """Return the secret that stands in a file; `SettingsError` says why the setting has none.

        What is said of a file names none of its bytes; and not the file where there is none, unless
        it is known for one: it may be the secret itself, given in the wrong variable.
        """
        is_file = is_known or os.path.exists(file)  # noqa: PTH110  # false for what can be no name, too
        shown = mask_address(str(file)) if is_file else "the file that it names"
        try:
            text = _secret_in(read_small_file(file).decode())
        except UnicodeDecodeError as error:
            raise SettingsError(f"{name}: cannot read {shown}: not a text file") from error
        except OSError as error:
            raise SettingsError(f"{name}: cannot read {shown}: {error.strerror}") from error
        except ValueError as error:
            raise SettingsError(f"{name}: cannot read {shown}: {error}") from error
        if not text:
            raise SettingsError(f"{name}: {shown} is empty, expected a secret in it")
        return cls(text, file=file)

    def read(self, *, name: str) -> str:
        """Return the text as its file has it now; raises as `load` does."""
        if self.file is None:
            return self._text
        return self.load(self.file, name=name, is_known=True).reveal()

    def reveal(self) -> str:
        """Return the text itself, to hand it to the library that needs it."""
        return self._text

    @override
    def __repr__(self) -> str:
        return f"Secret({MASK!r})"

    @override
    def __str__(self) -> str:
        return MASK

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    @override
    def __hash__(self) -> int:
        return hash(self._text)


def _secret_in(content: str) -> str:
    """Return the one line of a file, without its end; a blank is as good as any other character.

    Raises `ValueError` for what no login ever accepts and nobody sees in an editor: it would be one
    more wrong password, and look right.
    """
    text = content.rstrip("\r\n")
    if text.startswith("\ufeff"):
        raise ValueError("it begins with a byte order mark, save it as UTF-8 without one")
    if "\0" in text:
        raise ValueError("it has a NUL in it, expected one line of text")
    if "\n" in text or "\r" in text:
        raise ValueError("it has more than one line, expected the secret alone")
    return text


_PLAIN_HOST: Final = re.compile(r"(?:[\w.-]*|\[[0-9A-Fa-f:.]+\])(?::\d*)?(?:;.*)?", re.ASCII)
_NO_HOST: Final = re.compile(r"/[^/]")
"""What follows the scheme of a folder of this machine, `file:///var`."""
_PLAIN_BROKER: Final = re.compile(r"\s*(?:[\w.-]*|\[[0-9A-Fa-f:.]+\])(?::\d*)?\s*", re.ASCII)
_PLAIN_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_PLAIN_ADDRESS: Final = re.compile(
    r"(?:[\w.-]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}(?:/[\w.~/-]*)?", re.ASCII
)
"""Host, port and path, with no sign in it that parts a login, a name or a query from them."""
_PORT_TOO_HIGH: Final = re.compile(r".*[^:]:\d{5}", re.DOTALL | re.ASCII)
"""What ends in a number as long as a port's; one that is longer may as well be a password."""


def shown_url(url: str) -> str:
    """Return the URL, or the path, with nothing in it that may be a secret: no user, no query.

    Where a password that is not encoded makes it unclear what the host is, only the scheme is left.
    """
    scheme, found, _ = url.partition(_SCHEME_SIGN)
    if not found or not _PLAIN_SCHEME.fullmatch(scheme):
        return _shown_bare(url)
    try:
        parts = urlsplit(url)
        if _may_hide_a_password(parts):
            return f"{scheme}{_SCHEME_SIGN}{MASK}"
    except ValueError:  # no port, or no host, that anything could be sent to
        return f"{scheme}{_SCHEME_SIGN}{MASK}"
    host = parts.netloc.rpartition("@")[2]
    if not _PLAIN_HOST.fullmatch(host) or not (host or _NO_HOST.match(parts.path)):
        return f"{scheme}{_SCHEME_SIGN}{MASK}"
    # The path up to what looks like a name and its value: a query that lacks its sign.
    path, has_value, _ = parts.path.partition(";")[0].partition("=")
    shown_path = path.rpartition("/")[0] if has_value else path
    return mask_address(f"{scheme}{_SCHEME_SIGN}{host}{shown_path}")


def _shown_bare(text: str) -> str:
    """Return a path as it is, and what lacks its scheme without what would be the user."""
    if text.startswith("/") and not text.startswith("//"):
        return mask_address(text)
    address, query = (*re.split(r"[?;#]", text, maxsplit=1), "")[:2]
    if may_part_a_login(query):
        return MASK
    return mask_address(address)


def shown_brokers(servers: str) -> str:
    """Return Kafka's addresses, `host:port[,host:port…]`, with nothing in it that may be a secret.

    Where one of them is more or less than a host and a port, none is shown.
    """
    before, found, after = servers.rpartition(_SCHEME_SIGN)
    scheme, brokers = f"{before}{found}", after
    if found and not _PLAIN_SCHEME.fullmatch(before):
        return MASK
    is_plain = all(map(_PLAIN_BROKER.fullmatch, brokers.split(",")))
    return servers if is_plain else f"{scheme}{MASK}"


def shown_mistake(url: str) -> str:
    """Return what is wrong as the address of a receiver, as `shown_url` does.

    What has no scheme may be a part of a longer one, and is shown only where it has a port, and
    neither a login nor a query.
    """
    if _SCHEME_SIGN in url or not url:
        return shown_url(url)
    is_plain = _PLAIN_ADDRESS.fullmatch(url) or (_PLAIN_BROKER.fullmatch(url) and ":" in url)
    return url if is_plain else MASK


def _may_hide_a_password(parts: SplitResult) -> bool:
    """Return whether `/`, `?` or `#` may have cut user and password off from the host.

    They may stand in the password, or a slash too many before the user; or the password is a part
    of a query. Raises ValueError where the port is none, and no number that is too high either.
    """
    # Asked of every address, as it raises.
    has_port = bool(_PORT_TOO_HIGH.fullmatch(parts.netloc)) or parts.port is not None
    behind = f"{parts.path}{parts.query}{parts.fragment}"
    return may_part_a_login(behind) or (has_port and not parts.hostname)
