"""The part of the Protocol Buffers wire format, and of gRPC, that is used without generated code.

A message is a sequence of fields, each with its number, its wire type and its value (ADR 010).
"""

import struct
from collections.abc import Iterator
from typing import Final

_VARINT: Final = 0
_FIXED_BYTES: Final = {1: 8, 5: 4}
_LENGTH: Final = 2
_DOUBLE: Final = 1
_MAX_VARINT_BYTES: Final = 10
_MORE: Final = 0x80


def _read_fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the bytes of each length-delimited field of a message.

    All other fields are skipped.

    Raise `ValueError` if the message is malformed.
    """
    position, end = 0, len(message)
    while position < end:
        tag, position = _read_varint(message, position)
        number, kind = tag >> 3, tag & 7
        if kind == _LENGTH:
            size, position = _read_varint(message, position)
            if position + size > end:
                raise ValueError(f"field {number} is {position + size - end} bytes too long")
            yield number, message[position : position + size]
            position += size
        # Skip numeric fields, because no message that is read here needs them.
        elif kind == _VARINT:
            _, position = _read_varint(message, position)
        elif kind in _FIXED_BYTES:
            position += _FIXED_BYTES[kind]
        else:
            raise ValueError(f"unknown wire type: {kind}")
    if position > end:
        raise ValueError("the last field is truncated")


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    for byte in message[position : position + _MAX_VARINT_BYTES]:
        position += 1
        value |= (byte & 0x7F) << shift
        if not byte & _MORE:
            return value, position
        shift += 7
    raise ValueError("a number is truncated or too long")


class MessageFields:
    """The length-delimited fields of one message, by number."""

    def __init__(self, message: bytes) -> None:
        """Parse a message; raises ValueError if it is malformed."""
        self._values: dict[int, list[bytes]] = {}
        for number, value in _read_fields(message):
            self._values.setdefault(number, []).append(value)

    def text(self, number: int) -> str:
        """Return a field's text; an empty text if the field is missing.

        If the field occurs more than once, the last value counts; the wire format requires this.
        """
        return self._values[number][-1].decode() if number in self._values else ""

    def texts(self, number: int) -> list[str]:
        """Return all texts of a repeated field."""
        return [value.decode() for value in self._values.get(number, ())]

    def messages(self, number: int) -> "list[MessageFields]":
        """Return all messages of a repeated field."""
        return [MessageFields(value) for value in self._values.get(number, ())]


def _write_varint(value: int) -> bytes:
    """Encode a non-negative integer: seven bits per byte, the lowest first."""
    encoded = bytearray()
    while value >= _MORE:
        encoded.append(value & 0x7F | _MORE)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def write_field(number: int, value: bytes | str | float) -> bytes:
    """Encode a field: a message or text with its length, a number as a `double`, a `bool`."""
    if isinstance(value, bool):
        return _write_varint(number << 3 | _VARINT) + _write_varint(value)
    if isinstance(value, int | float):
        return _write_varint(number << 3 | _DOUBLE) + struct.pack("<d", value)
    content = value.encode() if isinstance(value, str) else value
    return _write_varint(number << 3 | _LENGTH) + _write_varint(len(content)) + content
