"""The wire form of Protocol Buffers, as much of it as one message needs: its fields, one by one.

Here live numbers and bytes. What a field means is `messages`' business.
"""

from collections.abc import Iterator
from typing import Final

_VARINT: Final = 0
_FIXED_BYTES: Final = {1: 8, 5: 4}
_LENGTH: Final = 2
_MAX_VARINT_BYTES: Final = 10
_MORE: Final = 0x80


def read_fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield number and bytes of each field that has bytes; the others are passed over.

    Raises ValueError where the bytes are no message.
    """
    position, end = 0, len(message)
    while position < end:
        tag, position = _read_varint(message, position)
        number, kind = tag >> 3, tag & 7
        if kind == _LENGTH:
            size, position = _read_varint(message, position)
            if position + size > end:
                raise ValueError(f"field {number} ends {position + size - end} bytes too late")
            yield number, message[position : position + size]
            position += size
        else:
            position = _skip(message, position, kind)
    if position > end:
        raise ValueError("the last field is cut off")


def _skip(message: bytes, position: int, kind: int) -> int:
    if kind == _VARINT:
        return _read_varint(message, position)[1]
    if kind not in _FIXED_BYTES:
        raise ValueError(f"no such kind of field: {kind}")
    return position + _FIXED_BYTES[kind]


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    for byte in message[position : position + _MAX_VARINT_BYTES]:
        position += 1
        value |= (byte & 0x7F) << shift
        if not byte & _MORE:
            return value, position
        shift += 7
    raise ValueError("a number is cut off")
