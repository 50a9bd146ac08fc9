"""What others say, made fit to be shown to people. Pure."""

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
    return "".join(one if one.isprintable() or one in "\n\t" else "\ufffd" for one in shown)
