"""JSON nested deeper than a decoder follows, cut where nobody reads. Pure.

A decoder walks also through what it steps over, and gives up at Python's recursion limit. The API
server stores some 10,000 levels (of `managedFields`, which any tenant may write); of all that is
read here nothing lies deeper than ten.
"""

import re
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from msgspec import Raw

T = TypeVar("T")
MOST_DEPTH: Final = 64
# All up to a bracket that stands in no string. Possessive, so that no input is looked at twice.
_TO_BRACKET: Final = re.compile(rb'(?:[^"\[\]{}]++|"(?:[^"\\]++|\\.)*+")*+([\[\]{}])', re.DOTALL)
_OPENING: Final = b"[{"


def decode_cut(decode: Callable[[bytes | Raw], T], data: bytes | Raw) -> T:
    """Return what `decode` makes of JSON, cut first where it is too deep for it."""
    try:
        return decode(data)
    except RecursionError:
        return decode(cut(bytes(data)))


def cut(data: bytes, *, most_depth: int = MOST_DEPTH) -> bytes:
    """Return JSON with `null` for each value that lies deeper than `most_depth`.

    What is no JSON is none afterwards.
    """
    parts = []
    kept_to = depth = 0
    for at, bracket in _brackets(data):
        if bracket in _OPENING:
            depth += 1
            if depth == most_depth + 1:
                parts.append(data[kept_to:at])
        else:
            if depth == most_depth + 1:
                parts.append(b"null")
                kept_to = at + 1
            depth -= 1
    return b"".join(parts) if depth > most_depth else b"".join([*parts, data[kept_to:]])


def _brackets(data: bytes) -> Iterator[tuple[int, bytes]]:
    found = _TO_BRACKET.match(data)
    while found:
        yield found.end() - 1, found[1]
        found = _TO_BRACKET.match(data, found.end())
