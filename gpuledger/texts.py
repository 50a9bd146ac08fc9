"""Texts for people, made of what others wrote: shortened, fit to be shown, a name that was meant.

Pure. What may be a secret in a text is masked elsewhere (`gpuledger.settings.secret`).
"""

from collections.abc import Iterable
from typing import Final

MAX_CHARACTERS: Final = 2000
"""How much of it is shown."""


def readable(text: bytes | str, *, max_characters: int = MAX_CHARACTERS) -> str:
    """Return the begin of what a server sent such that logs, JSON and terminals can take it.

    Bytes are read as UTF-8; what is none, or no character to be printed, is replaced.
    """
    encoded = text if isinstance(text, bytes) else text.encode(errors="replace")
    # A character takes up to four bytes.
    shown = encoded[: 4 * max_characters].decode(errors="replace").strip()[:max_characters]
    return "".join(
        character if character.isprintable() or character in "\n\t" else "\ufffd"
        for character in shown
    )


def shorten_middle(text: str, characters: int = 600) -> str:
    """Return a text of about so many characters: its begin, which says where, and its end, the why.

    What is recognized by its two ends, such as an address, can no longer be looked for in it.
    """
    half = characters // 2
    return text if len(text) <= characters else f"{text[:half]}…{text[-half:]}"


def shorten(text: str, characters: int) -> str:
    """Return a text of at most so many characters, and a sign where more was there."""
    return text if len(text) <= characters else f"{text[:characters]}…"


def find_near(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name that was probably meant, upper and lower case being the same.

    `cutoff` is how much alike two names must be, from 0, where there always is one, to 1.
    """
    from difflib import get_close_matches  # noqa: PLC0415  # only a mistake needs it

    by_lower = {candidate.lower(): candidate for candidate in known}
    near = get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[near[0]] if near else None
