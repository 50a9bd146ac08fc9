"""A text that must not be seen, and addresses, which may hold one. The only place that masks.

Where secrets come from is the loader's business.
"""

import re
from pathlib import Path
from typing import Any, Final

from typing_extensions import override

MASK: Final = "********"

# User and password end at the last `@` before the path; a password that holds a slash is told from
# a path by the colon before it. What follows `?`, `;` or `#` may be a token. Addresses are masked
# as people mistype them too, with a slash or a blank too many, for such a one ends in an error
# message. In a text, an address ends at a blank, a quote or the next address.
_IN_TEXT: Final = r"(?:(?!,?[A-Za-z][\w+.-]{0,15}://)[^\s\"'])"
_USER_IN_TEXT: Final = re.compile(
    rf"(?P<slashes>://+)(?:[^\s\"'/]*|[^\s\"'/:]*:(?!//){_IN_TEXT}*)(?=@)"
    rf"|(?<![^\s\"'=,(\[{{])[^\s\"'=,(\[{{:/@]+:(?!//){_IN_TEXT}{{0,500}}(?=@)"
)
_USER_AT_BEGIN: Final = re.compile(
    r"(?P<before>\s*(?:(?:[A-Za-z][\w+.-]*:)?//+)?)(?:(?<=/)(?:[^/]*|[^/:]*:.*)|[^/@:]+:(?!//).*)@",
    re.DOTALL,
)
_TAIL_IN_TEXT: Final = re.compile(
    rf"((?:://|(?<![^\s\"'=,(\[{{])[\w.-]+:\d{{1,5}}(?=[/?;#]))[^\s\"'?;#]*[?;#]){_IN_TEXT}+"
)
_TAIL_AT_END: Final = re.compile(
    # Without a scheme it may be anything: a host with its path is told by what a token follows.
    r"((?:^\s*//|://)[^?;#]*[?;#]|^\s*[\w.-]+(?::\d+)?(?:/[^?;#]*)?[?;#](?=[^=]+=)).+",
    re.DOTALL,
)


def mask_addresses(text: str) -> str:
    """Return a text with user, password and what follows the path of each address in it masked.

    Where an address ends cannot be known for certain: a whole value is for `mask_address`.
    """
    if "@" in text:
        text = _USER_IN_TEXT.sub(rf"\g<slashes>{MASK}", text)
    return _TAIL_IN_TEXT.sub(rf"\1{MASK}", text)


def mask_address(value: str) -> str:
    """Return a text that may be an address, with or without scheme, its secrets masked."""
    found = _USER_AT_BEGIN.match(value)
    if found:
        value = f"{found['before']}{MASK}{value[found.end() - 1 :]}"
    return mask_addresses(_TAIL_AT_END.sub(rf"\1{MASK}", value))


def mask_value(value: Any) -> Any:  # noqa: ANN401  # any built-in value
    """Return a setting's value for people, each text in it masked as an address is."""
    if isinstance(value, dict):
        return {key: mask_value(inner) for key, inner in value.items()}
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
    def load(cls, file: Path) -> "Secret":
        """Read a secret from a file; raises OSError, and ValueError for one that has none."""
        text = file.read_text(encoding="utf-8").rstrip("\r\n")
        if not text:
            raise ValueError("it is empty, expected a secret in it")
        return cls(text, file=file)

    def read(self) -> str:
        """Return the text as its file has it now; raises as `load` does."""
        return self.load(self.file).reveal() if self.file else self._text

    def reveal(self) -> str:
        """Give the text itself, to hand it to the library that needs it."""
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
