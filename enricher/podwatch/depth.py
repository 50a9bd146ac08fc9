"""JSON nested deeper than a decoder follows, cut where nobody reads. Pure.

A decoder walks also through what it steps over, and gives up at Python's recursion limit. The API
server stores some 10,000 levels (of `managedFields`, which any tenant may write); of all that is
read here nothing lies deeper than ten.
"""

import re
from collections.abc import Callable
from typing import Final, TypeVar

from msgspec import Raw

T = TypeVar("T")
MAX_DEPTH: Final = 64
# A string, whose brackets are none, a bracket, or the begin of a string without end. Possessive, so
# that no input is looked at twice.
_TOKEN: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[{]|[\]}]|"', re.DOTALL)
_OPENING: Final = b"[{"
_CLOSING: Final = b"]}"


def decode_cut(decode: Callable[[bytes | Raw], T], data: bytes | Raw) -> T:
    """Return what `decode` makes of JSON, cut first where it is too deep for it."""
    try:
        return decode(data)
    except RecursionError:
        return decode(cut(bytes(data)))


def cut(data: bytes, *, max_depth: int = MAX_DEPTH) -> bytes:
    """Return JSON with `null` for each array or object that lies deeper than `max_depth`.

    What is no JSON is none afterwards.
    """
    parts = []
    kept_to = depth = 0
    for token in _TOKEN.finditer(data):
        bracket = data[token.start()]
        if bracket in _OPENING:
            depth += 1
            if depth == max_depth + 1:
                parts.append(data[kept_to : token.start()])
        elif bracket in _CLOSING:
            if depth == max_depth + 1:
                parts.append(b"null")
                kept_to = token.end()
            depth -= 1
        elif token.end() - token.start() == 1:
            break
    return b"".join(parts) if depth > max_depth else b"".join([*parts, data[kept_to:]])
