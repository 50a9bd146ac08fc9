"""How many headers the records of an unpacked batch have, without reading any of them. Pure.

The client library makes objects of all headers of a record in one go, so they are counted before.
Numbers are read as the library reads them, and where it would stop, for damage, so does this: what
lies behind is never read.
"""

from typing import Final

_MAX_NUMBER_BYTES: Final = 10
"""As many as the library takes."""
_MORE: Final = 0x80
_LARGEST: Final = (1 << 64) - 1


def max_headers(records: bytes, *, max_records: int) -> int:
    """Return the most headers that one of the first records claims; 0 where there are none."""
    found, position, end = 0, 0, len(records)
    try:
        while max_records and position < end:
            length, position = _number(records, position)
            found = max(found, _headers_of(records, position))
            if length < 0:
                break
            position += length
            max_records -= 1
    except (IndexError, ValueError):
        pass  # damaged here: the library comes no further either
    return found


def _headers_of(records: bytes, position: int) -> int:
    for _ in range(3):  # attributes, deltas of time and offset
        position = position + 1 if records[position] < _MORE else _number(records, position)[1]
    for _ in range(2):  # key and value, -1 where there is none
        length, position = _number(records, position)
        if length > 0:
            position += length
    return _number(records, position)[0]


def _number(records: bytes, position: int) -> tuple[int, int]:
    """Return a number, zigzag and seven bits a byte, and where what follows it begins."""
    byte = records[position]
    if byte < _MORE:
        return (byte >> 1) ^ -(byte & 1), position + 1
    value = byte & ~_MORE
    for shift in range(7, 7 * _MAX_NUMBER_BYTES, 7):
        position += 1
        byte = records[position]
        value |= (byte & ~_MORE) << shift
        if byte < _MORE:
            value &= _LARGEST
            return (value >> 1) ^ -(value & 1), position + 1
    raise ValueError("a number does not end")
