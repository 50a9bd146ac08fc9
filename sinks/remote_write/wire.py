"""Remote-write 1.0 on the wire: protobuf by hand, with the constant part of a series made once.

A series' labels never change and a sample is 16 bytes, so that all of a series up to its value is
constant: a prefix. A request is then prefixes, values and timestamps put together. Here lives that
encoding, checked in the tests against protobuf itself. What a series is called is decided
elsewhere.
"""

import struct
from collections.abc import Iterable
from typing import Final

pack_value: Final = struct.Struct("<d").pack
STALE_VALUE: Final = bytes.fromhex("020000000000f07f")
"""The NaN 0x7ff0000000000002, which says that a series has ended; as bytes, since arithmetic and
JSON lose it."""
_FIRST_MS: Final = 1 << 35
_LAST_MS: Final = (1 << 42) - 1
_SAMPLE_BYTES: Final = 16


def series_prefix(labels: Iterable[tuple[str, str]]) -> bytes:
    """Encode a series with one sample up to that sample's value.

    Labels are sorted by name, empty values left out, as the protocol asks. Raises ValueError for a
    name that comes twice.
    """
    present = sorted((name.encode(), value.encode()) for name, value in labels if value)
    if len({name for name, _ in present}) != len(present):
        raise ValueError(f"a label comes twice: {[name.decode() for name, _ in present]}")
    body = b"".join(_label(name, value) for name, value in present)
    # After the labels: sample (field 2) of 16 bytes, in it the value (field 1, 64 bit).
    size = len(body) + 2 + _SAMPLE_BYTES
    return b"".join((b"\x0a", varint(size), body, b"\x12", varint(_SAMPLE_BYTES), b"\x09"))


def timestamp_suffix(time_ms: int) -> bytes:
    """Encode what follows a sample's value: its time in milliseconds since the epoch.

    Raises ValueError before 1971-02-02 and after 2109-05-15, where it is not the 7 bytes on which
    `series_prefix` counts.
    """
    if not _FIRST_MS <= time_ms <= _LAST_MS:
        raise ValueError(f"time_ns: {time_ms} ms since the epoch is not between 1971 and 2109")
    return b"\x10" + varint(time_ms)


def varint(number: int) -> bytes:
    """Encode a non-negative integer as protobuf does."""
    encoded = bytearray()
    while number > 0x7F:  # noqa: PLR2004  # seven bits a byte
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _label(name: bytes, value: bytes) -> bytes:
    pair = b"".join((b"\x0a", varint(len(name)), name, b"\x12", varint(len(value)), value))
    return b"".join((b"\x0a", varint(len(pair)), pair))
