"""One file of the spool: a head that says what of it is sent and of which boot, frames behind it.

Here lives the reading and writing of a file. Each write is one frame at the end of the file, or
the position in its head; whatever a crash leaves of a frame is cut off when the file is opened.
Nothing is synced: what the kernel took outlives the process, and a machine that lost power lost
its last seconds anyway. A file is written by one process, so all of it is of one boot. The first
form of the file, without the boot's id, is still read. Errors: any method may raise `OSError`.
"""

import os
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agent.publishing.frames import head_of, unpack_frame
from agent.publishing.message_bundle import Parcel
from agent.publishing.scanning import Frame, next_whole, scan

_MAGIC: Final = b"gpuledger spool\2"
_FIRST_MAGIC: Final = b"gpuledger spool\1"
_POSITION: Final = struct.Struct("<Q")
_BOOT_ID_BYTES: Final = 64
_FIRST_START: Final = len(_FIRST_MAGIC) + _POSITION.size
START: Final = _FIRST_START + _BOOT_ID_BYTES
"""Where the first frame of a new file begins."""
_OURS_ALONE: Final = 0o600


@dataclass
class Segment:
    """One file, and those of its frames that are not sent."""

    path: Path
    """The file; its name is its number."""
    boot_id: str | None
    """The kernel's id of the boot in which it was written; `None` in a file of the first form."""
    size_bytes: int = START
    """Its length."""
    frames: deque[Frame] = field(default_factory=deque)
    """The frames that are not sent, oldest first."""
    torn_bytes: int = 0
    """What was cut off its end when it was opened."""

    @property
    def number(self) -> int:
        """Its place among the files."""
        return int(self.path.stem)

    @property
    def parcels(self) -> int:
        """How many parcels are not sent."""
        return sum(frame.head.parcels for frame in self.frames)

    @property
    def start(self) -> int:
        """Where its first frame begins."""
        return _FIRST_START if self.boot_id is None else START

    @classmethod
    def create(cls, path: Path, *, boot_id: str) -> "Segment":
        """Return an empty file that nobody else may read; where that fails none is left."""
        written = _boot_id_bytes(boot_id)
        with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
            try:
                _write(file, _MAGIC + _POSITION.pack(START) + written, at=0)
            except OSError:
                with suppress(OSError):
                    path.unlink()
                raise
        return cls(path, _boot_id(written))

    @classmethod
    def load(cls, path: Path) -> "Segment":
        """Return a file with its frames; a torn end is cut off."""
        with _opened(path, os.O_RDWR) as file:
            length = os.fstat(file).st_size
            head = os.pread(file, START, 0)
            boot_id, start = _form_of(head) or (None, _first_frame(file, length))
            frames = scan(file, start, length)
            end = frames[-1].end if frames else min(start, length)
            if end < length:
                os.ftruncate(file, end)
        return cls(
            path,
            boot_id,
            size_bytes=end,
            frames=deque(_unsent(frames, head, start)),
            torn_bytes=length - end,
        )

    def append(self, frame: bytes) -> int:
        """Write a frame at the end, whole or not at all; return where it ends."""
        start = self.size_bytes
        with _opened(self.path, os.O_WRONLY) as file:
            try:
                _write(file, frame, at=start)
            except OSError:
                # Fails where the disk does; then the frame is cut off at the next start.
                with suppress(OSError):
                    os.ftruncate(file, start)
                raise
        self.size_bytes = start + len(frame)
        self.frames.append(Frame(start, self.size_bytes, head_of(frame)))
        return self.size_bytes

    def read(self, frame: Frame) -> list[Parcel]:
        """Return what is in a frame; raises `DamagedError` where it is not whole."""
        with _opened(self.path, os.O_RDONLY) as file:
            data = os.pread(file, frame.end - frame.start, frame.start)
        return unpack_frame(data)

    def save_position(self) -> None:
        """Write into the head where the first unsent frame begins."""
        position = self.frames[0].start if self.frames else self.size_bytes
        with _opened(self.path, os.O_WRONLY) as file:
            _write(file, _POSITION.pack(position), at=len(_MAGIC))

    def delete(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)


def same_boot(first: str | None, second: str) -> bool:
    """Return whether an id read from a file is that of a boot."""
    return first == _boot_id(_boot_id_bytes(second))


def _boot_id_bytes(boot_id: str) -> bytes:
    return boot_id.encode()[:_BOOT_ID_BYTES].ljust(_BOOT_ID_BYTES, b"\0")


def _boot_id(written: bytes) -> str:
    return written.rstrip(b"\0").decode(errors="replace")


def _form_of(head: bytes) -> tuple[str | None, int] | None:
    """Return the boot's id and where frames begin; `None` where the head is none of ours."""
    if len(head) == START and head.startswith(_MAGIC):
        return _boot_id(head[_FIRST_START:]), START
    if len(head) >= _FIRST_START and head.startswith(_FIRST_MAGIC):
        return None, _FIRST_START
    return None


def _first_frame(file: int, length: int) -> int:
    """Return where frames begin in a file whose head is broken; 0 where there is no whole one."""
    first = next_whole(os.pread(file, length, 0), 0)
    return first.start if first else 0


def _unsent(frames: Sequence[Frame], head: bytes, start: int) -> list[Frame]:
    """Return the frames from the position in the head on: rather twice than not at all."""
    position = start
    if _form_of(head):
        (position,) = _POSITION.unpack_from(head, len(_MAGIC))
    # One that is no border was never written by us.
    known = {start, *(frame.end for frame in frames)}
    return [frame for frame in frames if position not in known or frame.start >= position]


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, _OURS_ALONE)
    try:
        yield file
    finally:
        os.close(file)


def _write(file: int, data: bytes, *, at: int) -> None:
    left = memoryview(data)
    while left:
        written = os.pwrite(file, left, at)
        at += written
        left = left[written:]
