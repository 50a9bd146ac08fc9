"""Secrets, and addresses, which may contain secrets. All masking happens in this module.

An address is shown without user, password, query and fragment. An address that does not parse is
not shown at all, because the parts of a mistyped address cannot be told apart.
`gpuledger.settings.sources` reads secrets from their files.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from typing_extensions import override

from gpuledger.errors import SettingsError
from gpuledger.small_files import read_small_file

MASK: Final = "********"
_SCHEME_SIGN: Final = "://"
_AT: Final = ("@", "%40", "\uff20", "\ufe6b")
"""Separators of login and host, also percent-encoded and full-width."""
_BEHIND: Final = ("?", "#", ";", "=")
"""Characters that may separate an address from a token."""
_HOST: Final = re.compile(r"[\w.-]*|\[[0-9A-Fa-f:.]+\]", re.ASCII)
_PUNCTUATION: Final = ".,:;)>}"
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s\"'\\]+")
# An escape sequence, as in JSON, ends a word.
_WORD: Final = re.compile(r"\\u[0-9A-Fa-f]{4}|\\.|[^\s\"'\\]+")


def may_contain_credentials(text: str) -> bool:
    """Return whether the text contains a sign such as `@`, which may separate login and host."""
    return any(sign in text for sign in _AT)


def shown_url(url: str) -> str:
    """Return an address or path without user, query and fragment; a mask if it does not parse."""
    if _is_path(url):
        return url
    has_scheme = _SCHEME_SIGN in url
    try:
        parts = urlsplit(url if has_scheme else f"//{url}")
        port = parts.port
    except ValueError:
        return MASK
    host = parts.netloc.rpartition("@")[2]
    name = host if port is None else host.removesuffix(f":{port}")
    behind = f"{parts.path}{parts.query}{parts.fragment}"
    if not _HOST.fullmatch(name.removesuffix(":")) or may_contain_credentials(behind):
        return MASK
    if has_scheme:
        is_whole = host or parts.scheme == "file"
        path = parts.path.partition(";")[0]
        return urlunsplit((parts.scheme, host, path, "", "")) if is_whole else MASK
    # Without a scheme, the text may be an incomplete address, so its parts are uncertain.
    return MASK if _may_hold_secret(url) else url


def shown_brokers(servers: str) -> str:
    """Return the brokers' addresses for display; a mask if not all have the form `host:port`."""
    before, found, after = servers.rpartition(_SCHEME_SIGN)
    brokers = [broker.strip() for broker in after.split(",")]
    is_plain = not any("/" in broker or shown_url(broker) != broker for broker in brokers)
    return servers if is_plain and (before.isalnum() or not found) else MASK


def mask_address(value: str) -> str:
    """Return a value with secrets masked if it looks like an address, otherwise unchanged."""
    if _SCHEME_SIGN in value or _may_hold_secret(value):
        return shown_url(value)
    return value


def mask_addresses(text: str) -> str:
    """Return a text in which each address that has a login, query or fragment is masked.

    The text is checked word by word, and a word ends at a blank or quote. For a whole value, which
    may contain blanks and quotes, use `mask_address`.
    """
    if "@" not in text and _SCHEME_SIGN not in text:
        return text
    return _WORD.sub(lambda found: _mask_word(found[0]), text)


def mask_texts(message: str, texts: Iterable[str]) -> str:
    """Return a message in which these texts, and all addresses with secrets, are masked."""
    for text in sorted(texts, key=len, reverse=True):
        shown = mask_address(text)
        if shown != text:
            message = message.replace(repr(text), repr(shown)).replace(text, shown)
    return mask_addresses(message)


def mask_value(value: Any) -> Any:  # noqa: ANN401  # any built-in value
    """Return a setting's value for display, with each text in it masked like an address."""
    if isinstance(value, dict):
        return {mask_value(key): mask_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [mask_value(inner) for inner in value]
    return mask_address(value) if isinstance(value, str) else value


def _mask_word(word: str) -> str:
    if word.startswith("\\"):
        return word
    found = _URL.search(word)
    if found is None or "@" in word[: found.start()]:
        return MASK if "@" in word[1:] and not _is_path(word) else word
    url = found[0].rstrip(_PUNCTUATION)
    if not (may_contain_credentials(url) or any(sign in url for sign in _BEHIND)):
        return word
    return word[: found.start()] + shown_url(url) + word[found.start() + len(url) :]


def _is_path(text: str) -> bool:
    return text.startswith("/") and not text.startswith("//")


def _may_hold_secret(text: str) -> bool:
    is_parted = may_contain_credentials(text) or any(sign in text for sign in _BEHIND)
    return is_parted and not _is_path(text)


class Secret:
    """A text that is masked whenever it is printed, logged or encoded."""

    __slots__ = ("_text", "file")

    def __init__(self, text: str, *, file: Path | None = None) -> None:
        """Store the text, and the file from which it was read, if any."""
        self._text = text
        self.file = file

    @classmethod
    def load(cls, file: Path, *, name: str, is_known: bool = False) -> "Secret":
        """Return the secret in a file; raise `SettingsError` if the file has none.

        The message never shows the file's content. It shows the file's name only if the file exists
        or `is_known` is true, because the name may be the secret itself, given in the wrong
        variable.
        """
        is_file = is_known or os.path.exists(file)  # noqa: PTH110  # false also for invalid names
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
            raise SettingsError(f"{name}: {shown} is empty; expected a secret")
        return cls(text, file=file)

    def read(self, *, name: str) -> str:
        """Return the secret's text; if it comes from a file, read the file again.

        Raises `SettingsError` as `load` does.
        """
        if self.file is None:
            return self._text
        return self.load(self.file, name=name, is_known=True).reveal()

    def reveal(self) -> str:
        """Return the unmasked text, to be passed to a library."""
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
    """Return the only line of a file without its line end; blanks are kept.

    Raises `ValueError` if the line has characters that editors do not show and logins do not
    accept, because such a password would look right but be wrong.
    """
    text = content.rstrip("\r\n")
    if text.startswith("\ufeff"):
        raise ValueError("it begins with a byte order mark; save it as UTF-8 without one")
    if "\0" in text:
        raise ValueError("it contains a NUL character; expected one line of text")
    if "\n" in text or "\r" in text:
        raise ValueError("it has more than one line; expected only the secret")
    return text
