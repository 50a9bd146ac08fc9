"""Prepares texts from users and other programs for display, and finds similar names.

`gpuledger.settings.secret` masks secrets in texts.
"""

from collections.abc import Iterable, Sequence
from typing import Final

MAX_CHARACTERS: Final = 2000
"""Default maximum length of another program's text in our messages."""


def readable(text: bytes | str, *, max_characters: int = MAX_CHARACTERS) -> str:
    """Return the start of a server's text, safe for logs, JSON and terminals.

    Bytes are read as UTF-8; invalid bytes and unprintable characters are replaced.
    """
    encoded = text if isinstance(text, bytes) else text.encode(errors="replace")
    # A character takes up to four bytes.
    shown = encoded[: 4 * max_characters].decode(errors="replace").strip()[:max_characters]
    return "".join(
        character if character.isprintable() or character in "\n\t" else "\ufffd"
        for character in shown
    )


def escaped(text: str) -> str:
    r"""Return a text with its unprintable characters escaped, except line breaks and tabs.

    ESC becomes `\x1b`.
    """
    return "".join(
        each if each.isprintable() or each in "\n\t" else ascii(each)[1:-1] for each in text
    )


def shorten_middle(text: str, characters: int = 600) -> str:
    """Return the start and the end of a text, together about `characters` long.

    An error message has the place of the error at its start and the cause at its end. Mask secrets
    before you call this function, because masking may not recognize an address that was cut.
    """
    half = characters // 2
    return text if len(text) <= characters else f"{text[:half]}…{text[-half:]}"


def shorten(text: str, characters: int) -> str:
    """Return at most this many characters of a text, with an ellipsis if it was longer."""
    return text if len(text) <= characters else f"{text[:characters]}…"


def counted(number: int, singular: str) -> str:
    """Return a number with the name of its items in the singular or plural, such as `2 prices`."""
    return f"{number} {singular}{'' if number == 1 else 's'}"


def find_near(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name that was probably meant, ignoring case.

    `cutoff` is the required similarity, from 0 (any name) to 1 (identical). Returns `None` if no
    name is similar enough.
    """
    from difflib import get_close_matches  # noqa: PLC0415  # only needed after a mistake

    by_lower = {candidate.lower(): candidate for candidate in known}
    near = get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[near[0]] if near else None


def find_remedy(value: str, choices: Sequence[str]) -> str:
    """Return the remedy for an invalid value: the choice that was probably meant, or all choices.

    For a missing value, which is empty, return all choices.
    """
    near = find_near(value, choices)
    return f"did you mean `{near}`?" if near else f"give {', '.join(choices[:-1])} or {choices[-1]}"
