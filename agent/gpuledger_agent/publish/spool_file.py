"""One file of the spool: a head that says what of it is sent and of which boot, frames behind it.

A frame is a few ticks: a head, and behind it the bundles in msgpack, compressed with zstd. Its
length and its CRC-32 tell whether it is whole. Each write is one frame at the end of the file, or
the position in its head.

Whatever a crash leaves of a frame at the end is torn, and cut off when the file is opened. Anything
else that is no whole frame is damage, and becomes a frame too, so that it is reported and counted
when it is read; whole frames behind it are found again by the first bytes of what zstd writes. A
file is scanned quickly by its frames' heads, thoroughly where these do not fit, and so is a frame
that turns out to be damaged: a wrong length may reach to a later frame's border. All have a bound,
as anybody may have put the file there: on its length, and on the work in proportion to it. Errors:
`OSError`.
"""

import os
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from gpuledger.errors import GpuledgerError
from gpuledger_agent.publish.message_bundle import MessageBundle, time_ms

_HEAD: Final = struct.Struct("<IIIqq")
HEAD_BYTES: Final = _HEAD.size
_CHECKED_FROM: Final = 8  # behind the length and the checksum itself
_MAX_BUNDLES: Final = 10_000  # many times what is ever written as one
MAX_FILE_BYTES: Final = 32 * 2**20  # many times what 60 ticks take, which may be a file alone
_LEVEL: Final = 1  # the fastest; higher ones save little on ticks this much alike
_DECODER: Final = msgspec.msgpack.Decoder(list[MessageBundle])


class DamagedError(GpuledgerError):
    """A frame is not what was once written."""


class ForeignFileError(GpuledgerError):
    """A file is not what was ever written here."""


class ScanStoppedError(GpuledgerError):
    """Somebody has no time for the rest of the scan."""


_WORK_A_BYTE: Final = 16
_WORK_A_FRAME: Final = 1024  # so that the smallest frames, of 80 bytes, take less than is allowed
_MIN_WORK: Final = 2**20


class ScanWork:
    """How much more a file may be searched: made-up heads would have each byte checked for ever."""

    def __init__(self, length: int, *, is_stopped: Callable[[], bool]) -> None:
        self._left = _MIN_WORK + _WORK_A_BYTE * length
        self._is_stopped = is_stopped

    def spend(self, checked_bytes: int = 0) -> None:
        """Count one frame; raises ForeignFileError for one too many, and ScanStoppedError."""
        if self._is_stopped():
            raise ScanStoppedError("the scan was stopped")
        self._left -= _WORK_A_FRAME + checked_bytes
        if self._left < 0:
            raise ForeignFileError("it has more beginnings of frames than a spool writes")


class Head(NamedTuple):
    """The head of a frame."""

    body_bytes: int
    checksum: int
    bundles: int
    """How many bundles are in it."""
    oldest_ms: int
    """The event time of the oldest one, milliseconds since the epoch."""
    spooled_ms: int
    """When it was written, milliseconds since boot; in a file of the first form the event time of
    the newest one, which tells no age."""


def pack_frame(bundles: Sequence[MessageBundle], *, spooled_ms: int) -> bytes:
    """Return a frame of at least one bundle, written `spooled_ms` after the node's boot."""
    import cramjam  # noqa: PLC0415  # aiokafka brings it; an agent without Kafka carries neither

    # Alike from tick to tick, so several at once are a fraction of each by itself.
    body = bytes(cramjam.zstd.compress(msgspec.msgpack.encode(bundles), _LEVEL))
    head = Head(len(body), 0, len(bundles), min(map(time_ms, bundles)), spooled_ms)
    # Over what the head says as well: a wrong number of ticks would be counted as lost.
    checksum = zlib.crc32(body, zlib.crc32(_HEAD.pack(*head)[_CHECKED_FROM:]))
    return _HEAD.pack(*head._replace(checksum=checksum)) + body


def read_head(data: bytes) -> Head | None:
    """Return a head; `None` where there are too few bytes for one, or it says what cannot be."""
    head = head_of(data) if len(data) >= HEAD_BYTES else None
    can_be = head and head.body_bytes and 0 < head.bundles <= _MAX_BUNDLES and head.spooled_ms >= 0
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


def unpack_frame(data: bytes) -> list[MessageBundle]:
    """Return the bundles of a whole frame; raises `DamagedError` where it is not one."""
    import cramjam  # noqa: PLC0415  # as in pack_frame

    if not is_whole(data):
        raise DamagedError("its checksum or its length does not fit")
    try:
        bundles = _DECODER.decode(cramjam.zstd.decompress(data[HEAD_BYTES:]))
    # Text that is not UTF-8 is a ValueError, and a body that asks for too much a MemoryError.
    except (cramjam.DecompressionError, msgspec.DecodeError, ValueError, MemoryError) as error:
        raise DamagedError(f"it holds what this version does not know: {error}") from error
    # Of none there would be nothing to send, so that nothing behind them would ever be.
    if len(bundles) != head_of(data).bundles or not all(bundles):
        raise DamagedError("it does not hold as many bundles as it says")
    return bundles


_ZSTD: Final = struct.pack("<I", 0xFD2FB528)  # with it each frame's body begins


class Frame(NamedTuple):
    """The position of a frame in its file, and its head."""

    start: int
    end: int
    head: Head

    @classmethod
    def at(cls, data: bytes, start: int) -> "Frame | None":
        """Return the frame whose head is at a position; `None` where no frame can be so."""
        head = read_head(data[start : start + HEAD_BYTES])
        end = start + HEAD_BYTES + (head.body_bytes if head else 0)
        return cls(start, end, head) if head and end <= len(data) else None

    def moved(self, *, by: int) -> "Frame":
        """Return the same frame where the data begins `by` bytes further on."""
        return self._replace(start=self.start + by, end=self.end + by)


def scan(file: int, start: int, length: int, work: ScanWork) -> list[Frame]:
    """Return the frames of an open file of `length` bytes; what is behind the last one is torn."""
    # By heads a file costs one read of 28 bytes a frame; its bodies are read when they are sent.
    frames = list(_by_heads(file, start, length, work))
    end = frames[-1].end if frames else start
    return frames if end == length else list(_by_checksums(os.pread(file, length, 0), start, work))


def next_whole(data: bytes, start: int, work: ScanWork) -> Frame | None:
    """Return the first whole frame at `start` or behind it; `None` where there is none."""
    at = start
    while (body := data.find(_ZSTD, at + HEAD_BYTES)) >= 0:
        at = body - HEAD_BYTES
        frame = Frame.at(data, at)
        work.spend(frame.end - at if frame else 0)
        if frame and is_whole(data[at : frame.end]):
            return frame
        at += 1
    return None


def _by_heads(file: int, start: int, length: int, work: ScanWork) -> Iterator[Frame]:
    """Yield the frames by their heads; their bodies are checked when they are read."""
    while head := read_head(os.pread(file, HEAD_BYTES, start)):
        work.spend()
        end = start + HEAD_BYTES + head.body_bytes
        if end > length:
            return
        yield Frame(start, end, head)
        start = end


def _by_checksums(data: bytes, start: int, work: ScanWork) -> Iterator[Frame]:
    """Yield whole frames, and the bytes before a whole frame as a damaged frame."""
    while start < len(data):
        unchecked, whole = Frame.at(data, start), next_whole(data, start, work)
        if whole and whole.start > start:
            yield _gap(data, start, whole.start, beside=whole)
        frame = whole or unchecked
        if frame is None:
            return
        yield frame
        start = frame.end


def _with_gaps(data: bytes, work: ScanWork) -> Iterator[Frame]:
    """Yield whole frames and the gaps around them; nothing where no frame is whole."""
    end, last = 0, None
    while whole := next_whole(data, end, work):
        if whole.start > end:
            yield _gap(data, end, whole.start, beside=whole)
        yield whole
        end, last = whole.end, whole
    if last and end < len(data):
        yield _gap(data, end, len(data), beside=last)


def _gap(data: bytes, start: int, end: int, *, beside: Frame) -> Frame:
    """Return the bytes beside a whole frame that are no frame, as a damaged frame."""
    unchecked = Frame.at(data, start)
    # Its number of ticks is what its head says where that can be, else one at least.
    return Frame(
        start, end, beside.head._replace(bundles=unchecked.head.bundles if unchecked else 1)
    )


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
    _work: ScanWork | None = None

    @property
    def number(self) -> int:
        """Its position among the files."""
        return int(self.path.stem)

    @property
    def bundles(self) -> int:
        """How many bundles are not sent."""
        return sum(frame.head.bundles for frame in self.frames)

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
    def load(cls, path: Path, *, is_stopped: Callable[[], bool] = lambda: False) -> "Segment":
        """Return a file with its frames; a torn end is cut off.

        Raises ForeignFileError where the spool cannot have written it, and ScanStoppedError once
        `is_stopped`; then nothing is changed.
        """
        with _opened(path, os.O_RDWR) as file:
            length = os.fstat(file).st_size
            if length > MAX_FILE_BYTES:
                raise ForeignFileError(f"it has {length} bytes, a spool's {MAX_FILE_BYTES} at most")
            work = ScanWork(length, is_stopped=is_stopped)
            head = os.pread(file, START, 0)
            form = _form_of(head)
            if form is None:
                # A broken head: whole frames behind it are good, wherever the first one begins.
                first = next_whole(os.pread(file, length, 0), 0, work)
                form = None, first.start if first else 0
            boot_id, start = form
            frames = scan(file, start, length, work)
            end = frames[-1].end if frames else min(start, length)
            # What is appended later must stand right behind a whole frame.
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

    def read(self, frame: Frame) -> list[MessageBundle]:
        """Return what is in a frame; raises `DamagedError` where it is not whole."""
        with _opened(self.path, os.O_RDONLY) as file:
            data = os.pread(file, frame.end - frame.start, frame.start)
        return unpack_frame(data)

    def split(self, frame: Frame, *, is_stopped: Callable[[], bool]) -> list[Frame]:
        """Return what lies in the bytes of a damaged frame: its broken part, then what follows.

        Whole frames are behind it where the broken byte was in its length. Raises ScanStoppedError
        once `is_stopped`.
        """
        with _opened(self.path, os.O_RDONLY) as file:
            data = os.pread(file, frame.end - frame.start, frame.start)
        # One bound for all of a file's damage, as for its scan.
        self._work = self._work or ScanWork(self.size_bytes, is_stopped=is_stopped)
        try:
            parts = list(_with_gaps(data, self._work))
        except ForeignFileError:
            parts = []
        moved = (part.moved(by=frame.start) for part in parts)
        return list(moved) or [frame]

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
    # A disk that is nearly full may take a part, and refuse the rest by the next call.
    while left:
        written = os.pwrite(file, left, at)
        at += written
        left = left[written:]
