"""Where frames stand in a file of the spool: quick by their heads, thorough where these do not fit.

A write that was not finished leaves a part of one frame at the end: that end is torn. Anything else
that is no whole frame is damage, and becomes a frame too, so that it is told and counted when it is
read; whole frames behind it are found again by the first bytes of what zstd writes. Errors:
`OSError`.
"""

import os
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from agent.publishing.frames import HEAD_BYTES, Head, is_whole, read_head

_ZSTD: Final = struct.pack("<I", 0xFD2FB528)  # with it each frame's body begins


class Frame(NamedTuple):
    """Where a frame stands, and what is in it."""

    start: int
    end: int
    head: Head


def scan(file: int, start: int, length: int) -> list[Frame]:
    """Return the frames of an open file of `length` bytes; what is behind the last one is torn."""
    frames = list(_by_heads(file, start, length))
    end = frames[-1].end if frames else start
    return frames if end == length else list(_by_checksums(os.pread(file, length, 0), start))


def next_whole(data: bytes, start: int) -> Frame | None:
    """Return the first whole frame at `start` or behind it; `None` where there is none."""
    at = start
    while (body := data.find(_ZSTD, at + HEAD_BYTES)) >= 0:
        at = body - HEAD_BYTES
        frame = _frame_at(data, at)
        if frame and is_whole(data[at : frame.end]):
            return frame
        at += 1
    return None


def _by_heads(file: int, start: int, length: int) -> Iterator[Frame]:
    """Yield the frames by their heads; their bodies are checked when they are read."""
    while head := read_head(os.pread(file, HEAD_BYTES, start)):
        end = start + HEAD_BYTES + head.body_bytes
        if end > length:
            return
        yield Frame(start, end, head)
        start = end


def _by_checksums(data: bytes, start: int) -> Iterator[Frame]:
    """Yield whole frames, and what stands before one of them as a damaged frame."""
    while start < len(data):
        said, whole = _frame_at(data, start), next_whole(data, start)
        if whole and whole.start > start:
            # Its number of ticks is what its head says where that can be, else one at least.
            parcels = said.head.parcels if said else 1
            yield Frame(start, whole.start, whole.head._replace(parcels=parcels))
        frame = whole or said
        if frame is None:
            return
        yield frame
        start = frame.end


def _frame_at(data: bytes, start: int) -> Frame | None:
    """Return what the head at a place says; `None` where no frame can be so."""
    head = read_head(data[start : start + HEAD_BYTES])
    end = start + HEAD_BYTES + (head.body_bytes if head else 0)
    return Frame(start, end, head) if head and end <= len(data) else None
