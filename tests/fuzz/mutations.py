"""Bad inputs: valid ones with changes in their bytes or their structure."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

Json = Any
_DEPTH = 3000
NUMBERS: Sequence[Json] = [0, -1, 1, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 1e308, -3.5, 0.1]
TEXTS: Sequence[Json] = [
    "",
    "x" * 300,
    "é" * 20_000,
    '"\\\n',
    "\x00",
    "\u2028",
    "\U0001f600",
    "nan",
    "..",
    "-",
    "a b",
]
VALUES: Sequence[Json] = [None, True, [], {}, [[]], [None] * 50, {"": None}, *NUMBERS, *TEXTS]
PIECES = [
    b"",
    b"\x00",
    b"\xff",
    b"\n",
    b"\r\n",
    b"\x85",
    b"\xe2\x80\xa8",
    b"\xed\xa0\x80",
    b"[" * _DEPTH,
    b'{"a":' * _DEPTH,
    b"9" * 5000,
    b"1e999",
    b"NaN",
    b"'",
    b'"',
    b"\\ud800",
    b"\x80" * 11,
    b":",
    b";",
    b",",
    b"/",
    b" ",
]
"""Pieces that are inserted into bytes."""


def changed_bytes(seeds: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Return arbitrary bytes, or valid ones changed in up to five places."""
    steps = st.lists(
        st.tuples(st.sampled_from([_insert, _replace, _cut, _repeat, _flip]), _PLACES, _BYTES),
        max_size=5,
    )
    return st.binary(max_size=200) | st.builds(_apply, st.sampled_from(seeds), steps)


_PLACES = st.tuples(st.floats(0, 1), st.floats(0, 1))
_BYTES = st.sampled_from(PIECES) | st.binary(max_size=12)
Step = Callable[[bytes, int, int, bytes], bytes]


def _apply(seed: bytes, steps: list[tuple[Step, tuple[float, float], bytes]]) -> bytes:
    for step, (first, second), piece in steps:
        start, end = sorted((round(first * len(seed)), round(second * len(seed))))
        seed = step(seed, start, end, piece)[:300_000]
    return seed


def _insert(data: bytes, start: int, _: int, piece: bytes) -> bytes:
    return data[:start] + piece + data[start:]


def _replace(data: bytes, start: int, _: int, piece: bytes) -> bytes:
    return data[:start] + piece + data[start + max(1, len(piece)) :]


def _cut(data: bytes, start: int, end: int, _: bytes) -> bytes:
    return data[:start] + data[end:]


def _repeat(data: bytes, start: int, end: int, _: bytes) -> bytes:
    return data[:end] + data[start:end] + data[end:]


def _flip(data: bytes, start: int, _: int, piece: bytes) -> bytes:
    mask = (piece or b"\x01")[0]
    return data[:start] + bytes(byte ^ mask for byte in data[start : start + 1]) + data[start + 1 :]


def changed_json(seeds: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Return JSON with values replaced, removed or duplicated in up to four places."""
    change = st.tuples(
        st.lists(st.integers(0, 50), min_size=1, max_size=6),
        st.sampled_from(["replace", "remove", "double", "rename"]),
        st.sampled_from(VALUES) | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    )
    return st.builds(_changed, st.sampled_from(seeds), st.lists(change, max_size=4))


def _changed(seed: bytes, changes: list[tuple[list[int], str, Json]]) -> bytes:
    value = json.loads(seed)
    for path, what, new in changes:
        value = _change(value, path, what, new)
    return json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")


def _change(value: Json, path: list[int], what: str, new: Json) -> Json:
    """Return a value with a change at the path, or at the path's last existing part."""
    if not path or not isinstance(value, dict | list) or not value:
        return new
    names = list(value) if isinstance(value, dict) else range(len(value))
    name = names[path[0] % len(names)]
    if len(path) > 1 and isinstance(value[name], dict | list):
        inner = _change(value[name], path[1:], what, new)
        return _with(value, name, inner)
    match what:
        case "remove":
            return _without(value, name)
        case "double" if isinstance(value, list):
            return [*value, value[name]]
        case "rename" if isinstance(value, dict):
            return {**_without(value, name), str(new): value[name]}
        case _:
            return _with(value, name, new)


def _with(value: Json, name: Json, new: Json) -> Json:
    if isinstance(value, dict):
        return {**value, name: new}
    return [new if place == name else one for place, one in enumerate(value)]


def _without(value: Json, name: Json) -> Json:
    if isinstance(value, dict):
        return {key: one for key, one in value.items() if key != name}
    return [one for place, one in enumerate(value) if place != name]
