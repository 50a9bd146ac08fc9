"""A text that must not be seen. Where secrets come from is the loader's business."""

import re
from typing import Final

from typing_extensions import override

MASK: Final = "********"
_IN_ADDRESS: Final = re.compile(r"(?<=://)[^/@\s\"']+(?=@)")


def mask_addresses(text: str) -> str:
    """Return a text with user and password of each address in it masked."""
    return _IN_ADDRESS.sub(MASK, text)


class Secret:
    """A text that shows a mask wherever it is printed, logged or encoded."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

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
