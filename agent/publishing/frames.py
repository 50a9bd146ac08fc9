"""Parcels to the bytes of a frame and back: what stands in the spool's files.

A frame is a few ticks: a head, and behind it the parcels in msgpack, compressed with zstd. Its
length and its CRC-32 tell whether it is whole. No file is opened here.
"""

import struct
import zlib
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from agent.publishing.message_bundle import Parcel, time_ms
from gpuledger.errors import GpuledgerError

_HEAD: Final = struct.Struct("<IIIqq")
HEAD_BYTES: Final = _HEAD.size
_CHECKED_FROM: Final = 8  # behind the length and the checksum itself
_MAX_PARCELS: Final = 10_000  # many times what is ever written as one
_LEVEL: Final = 1  # the fastest; higher ones save little on ticks this much alike
_DECODER: Final = msgspec.msgpack.Decoder(list[Parcel])


class DamagedError(GpuledgerError):
    """A frame is not what was once written."""


class Head(NamedTuple):
    """What a frame says of itself."""

    body_bytes: int
    checksum: int
    parcels: int
    """How many parcels are in it."""
    oldest_ms: int
    """The event time of the oldest one, milliseconds since the epoch."""
    spooled_ms: int
    """When it was written, milliseconds since boot; in a file of the first form the event time of
    the newest one, which tells no age."""


def pack_frame(parcels: Sequence[Parcel], *, spooled_ms: int) -> bytes:
    """Return a frame of at least one parcel, written `spooled_ms` after the node's boot."""
    import cramjam  # noqa: PLC0415  # aiokafka brings it; an agent without Kafka carries neither

    body = bytes(cramjam.zstd.compress(msgspec.msgpack.encode(parcels), _LEVEL))
    head = Head(len(body), 0, len(parcels), min(map(time_ms, parcels)), spooled_ms)
    checksum = zlib.crc32(body, zlib.crc32(_HEAD.pack(*head)[_CHECKED_FROM:]))
    return _HEAD.pack(*head._replace(checksum=checksum)) + body


def read_head(data: bytes) -> Head | None:
    """Return a head; `None` where there are too few bytes for one, or it says what cannot be."""
    head = head_of(data) if len(data) >= HEAD_BYTES else None
    can_be = head and head.body_bytes and 0 < head.parcels <= _MAX_PARCELS and head.spooled_ms >= 0
    return head if can_be else None


def head_of(frame: bytes) -> Head:
    """Read the head of a frame that was packed here."""
    return Head._make(_HEAD.unpack_from(frame))


def is_whole(data: bytes) -> bool:
    """Return whether these bytes are a frame as it was written, nothing less and nothing more."""
    head = read_head(data)
    return (
        head is not None
        and len(data) == HEAD_BYTES + head.body_bytes
        and zlib.crc32(data[_CHECKED_FROM:]) == head.checksum
    )


def unpack_frame(data: bytes) -> list[Parcel]:
    """Return the parcels of a whole frame; raises `DamagedError` where it is not one."""
    import cramjam  # noqa: PLC0415  # as in pack_frame

    if not is_whole(data):
        raise DamagedError("its checksum or its length does not fit")
    try:
        parcels = _DECODER.decode(cramjam.zstd.decompress(data[HEAD_BYTES:]))
    # Text that is not UTF-8 is a ValueError, and a body that asks for too much a MemoryError.
    except (cramjam.DecompressionError, msgspec.DecodeError, ValueError, MemoryError) as error:
        raise DamagedError(f"it holds what this version does not know: {error}") from error
    # Of none there would be nothing to send, so that nothing behind them would ever be.
    if len(parcels) != head_of(data).parcels or not all(parcels):
        raise DamagedError("it does not hold as many parcels as it says")
    return parcels
