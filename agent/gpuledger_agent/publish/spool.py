"""The on-disk spool: an SQLite database of limited size with the bundles that could not be sent.

A row is a frame: up to a minute of ticks in msgpack, compressed with zstd because ticks are alike.
Frames are appended, read in order, and deleted once Kafka has acknowledged their messages. An index
of all frames without their bodies is kept in memory, so only appending, reading and deleting use
the disk.

All functions block, so `send_queue` runs them in a thread. They raise `OSError`.

The database is in WAL mode: killing the agent does not lose data, and a power cut loses only the
last seconds. The database's lock is exclusive, so a second agent of the node cannot open it.

The wall clock may be set while ticks wait, so ages use the time since boot (CLOCK_BOOTTIME). Frames
of an earlier boot are assumed to be as old as the current boot.

A damaged database is renamed, and a new one is started. If the disk fails to read, reading is first
retried for a minute, because the disk may recover, and newer ticks must not overtake older ones.
"""

import errno
import sqlite3
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from os import statvfs
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

import msgspec
import structlog

from gpuledger.clock import NS_PER_MS
from gpuledger.errors import GpuledgerError
from gpuledger.keys import NodeId
from gpuledger_agent.metrics import (
    SPOOL_BYTES,
    SPOOL_DROPPED,
    SPOOL_FAILURES,
    SPOOL_FILES_SET_ASIDE,
    SPOOL_OLDEST_SECONDS,
    SPOOL_TICKS,
    SPOOL_WRITTEN,
)
from gpuledger_agent.publish.message_bundle import MessageBundle, bundle_size_bytes, time_ms
from gpuledger_agent.settings import SpoolSettings

FILE_NAME: Final = "spool.sqlite3"
SET_ASIDE_NAME: Final = "spool.damaged"
GIVEN_UP_AFTER_MS: Final = 60_000
_READ_BYTES: Final = 2**20
_LEVEL: Final = 1  # the fastest; higher levels save little because ticks are so alike
_PRIVATE: Final = 0o700
_DECODER: Final = msgspec.msgpack.Decoder(list[MessageBundle])
_INCREMENTAL: Final = 2
_OPEN: Final = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS frames (
    id INTEGER PRIMARY KEY,
    boot_id TEXT NOT NULL,
    spooled_ms INTEGER NOT NULL,           -- since boot
    oldest_ms INTEGER NOT NULL,            -- event time of the oldest bundle, since the epoch
    bundles INTEGER NOT NULL,
    size_bytes INTEGER NOT NULL,
    crc32 INTEGER NOT NULL,                -- of the body; SQLite has no checksums
    body BLOB NOT NULL
);
COMMIT;
"""
# Run as a script, because `execute` would free only one page.
_SHRINK: Final = "PRAGMA incremental_vacuum; PRAGMA wal_checkpoint(TRUNCATE);"
_ERRNO: Final = {
    sqlite3.SQLITE_BUSY: errno.EWOULDBLOCK,
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_CANTOPEN: errno.EACCES,
    sqlite3.SQLITE_NOMEM: errno.ENOMEM,
}
NO_SPACE: Final = "no space left on the disk"
_REASONS: Final = {sqlite3.SQLITE_BUSY: "another agent uses it", sqlite3.SQLITE_FULL: NO_SPACE}
_log = structlog.get_logger(__name__)


def connect(file: Path) -> sqlite3.Connection:
    """Connect to a database in autocommit mode, without waiting for its lock."""
    # SQLite's thread check is off, because the thread may change; only one uses it at a time.
    return sqlite3.connect(file, timeout=0, isolation_level=None, check_same_thread=False)


class DamagedError(OSError):
    """SQLite reports that the database is damaged."""


class FrameDamagedError(GpuledgerError):
    """A frame is missing, does not match its checksum, or was written by another version."""


class Frame(NamedTuple):
    """A row of the database without its checksum and body, which contains the bundles."""

    id: int
    boot_id: str
    spooled_ms: int
    oldest_ms: int
    bundles: int
    size_bytes: int


class Spool:
    """One node's spool.

    A position is the id of a frame, and refers to this frame and all earlier frames.
    """

    def __init__(
        self,
        settings: SpoolSettings,
        *,
        node: NodeId,
        boot_id: str,
        boottime_ns: Callable[[], int],
        connect: Callable[[Path], sqlite3.Connection] = connect,
    ) -> None:
        self._settings = settings
        # Names of clusters and nodes never contain an underscore.
        self.path: Final = Path(settings.directory, f"{node.cluster}_{quote(node.node, safe='')}")
        """The node's directory, in which the database is."""
        self._boot_id = boot_id
        self._boottime_ns = boottime_ns
        self._connect_to = connect
        self._database: sqlite3.Connection | None = None
        self._frames: deque[Frame] = deque()
        self._last_id = 0
        """The last frame's id. It never decreases, even if the database is recreated, so a position
        never refers to a frame of an earlier database."""
        self._in_flight = 0
        self._failing_since_ms: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no bundles wait in the spool.

        In the first two minutes of disk failures, this is false, because bundles may become
        readable again.
        """
        since_ms = self._failing_since_ms
        is_failing = since_ms is not None and self._now_ms() - since_ms < 2 * GIVEN_UP_AFTER_MS
        return not self._frames and not is_failing

    @property
    def bundles(self) -> int:
        """Number of bundles that wait in the spool."""
        return sum(frame.bundles for frame in self._frames)

    @property
    def size_bytes(self) -> int:
        """Total size of the frames that wait in the spool, in bytes."""
        return sum(frame.size_bytes for frame in self._frames)

    def open(self) -> None:
        """Open the database and load the index of earlier frames; if it is open, do nothing.

        The directory in the setting `spool.directory` is never created: raise `FileNotFoundError`
        if it does not exist.
        """
        if self._database is not None:
            return
        folder = self.path.parent
        if not folder.is_dir():
            self._failing_since_ms = None
            raise FileNotFoundError(errno.ENOENT, "no such directory", str(folder))
        with self._retried():
            self.path.mkdir(mode=_PRIVATE, exist_ok=True)
            self._connect()
        if self._frames:
            _log.info("spool_found", count=self.bundles, directory=str(self.path))
        self._set_gauges()

    def close(self) -> None:
        """Close the database, so that another process can open it."""
        if self._database is not None:
            self._database.close()
            self._database = None

    def drop_late(self) -> None:
        """Drop and count all frames, because newer bundles were sent before the spool was open."""
        _log.error("late_spool_dropped", count=self.bundles, directory=str(self.path))
        self._drop(len(self._frames), reason="late")
        self._set_gauges()

    def require_free_space(self) -> None:
        """Raise `OSError` (ENOSPC) if the file system has too little free space."""
        # Use `f_bavail`, because `f_bfree` would include the space reserved for root.
        disk = statvfs(self.path)
        free_bytes, min_bytes = disk.f_bavail * disk.f_frsize, self._settings.min_free_bytes
        if free_bytes < min_bytes:
            reason = (
                f"{NO_SPACE}: {free_bytes} bytes are free, less than spool.min_free_bytes"
                f" ({min_bytes})"
            )
            raise OSError(errno.ENOSPC, reason, str(self.path))

    def append(self, bundles: Sequence[MessageBundle]) -> int:
        """Append bundles as one frame, atomically; return its position.

        If the spool would exceed `spool.max_bytes`, drop the oldest frames. Raise `OSError` if the
        disk has too little free space or fails, or if the frame itself exceeds `spool.max_bytes`.
        """
        self.open()
        self.require_free_space()
        body = _pack(bundles)
        if len(body) > self._settings.max_bytes:
            raise OSError(errno.EFBIG, "larger than spool.max_bytes", str(self.path))
        self._drop_old()
        room = self._settings.max_bytes - len(body)
        while self.size_bytes > room:
            self._drop(1, reason="bytes")
        self._last_id += 1
        oldest_ms = min(map(time_ms, bundles))
        frame = Frame(
            self._last_id, self._boot_id, self._now_ms(), oldest_ms, len(bundles), len(body)
        )
        try:
            self._insert(frame, body)
        except DamagedError as error:
            self._start_over(error)
            self._insert(frame, body)
        self._frames.append(frame)
        SPOOL_WRITTEN.inc(len(bundles))
        self._set_gauges()
        return frame.id

    def set_in_flight(self, position: int) -> None:
        """Record that the publisher has taken the frames up to a position.

        If these frames are dropped, their bundles do not count as lost.
        """
        self._in_flight = position

    def read(self, *, max_bundles: int) -> tuple[list[MessageBundle], int] | None:
        """Return the oldest bundles and their position, without deleting them.

        Return `None` if the spool is empty. At most `max_bundles` and about 1 MiB are returned, but
        at least one frame. A damaged frame is dropped and counted. Raise `OSError` if the disk
        fails; after a minute of failures, all frames are dropped and a new database is started.
        """
        self.open()
        self._drop_old()
        found = None
        while self._frames and not found:
            with self._retried():
                found = self._read(max_bundles)
        self._set_gauges()
        return found

    def ack(self, position: int) -> None:
        """Delete all frames up to a position, because their bundles were sent."""
        self._in_flight = 0
        while self._frames and self._frames[0].id <= position:
            self._frames.popleft()
        self._delete(position)
        self._set_gauges()

    @property
    def _connection(self) -> sqlite3.Connection:
        if self._database is None:
            raise OSError(errno.EBADF, "not open", str(self.path))
        return self._database

    def _connect(self) -> None:
        with self._errors():
            database = self._connect_to(self.path / FILE_NAME)
            try:
                database.execute("PRAGMA locking_mode = EXCLUSIVE")
                # Set the mode only if needed, because this writes to the disk, which may be full.
                if database.execute("PRAGMA auto_vacuum").fetchone() != (_INCREMENTAL,):
                    database.execute("PRAGMA auto_vacuum = INCREMENTAL")
                database.executescript(_OPEN)
                columns = ", ".join(Frame._fields)
                rows = database.execute(f"SELECT {columns} FROM frames ORDER BY id")  # noqa: S608  # our own names
                self._frames = deque(map(Frame._make, rows))
                self._last_id = max([self._last_id, *(frame.id for frame in self._frames)])
            except BaseException:
                database.close()
                raise
            self._database = database

    def _insert(self, frame: Frame, body: bytes) -> None:
        with self._errors():
            self._connection.execute(
                "INSERT INTO frames VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (*frame, zlib.crc32(body), body),
            )

    def _read(self, max_bundles: int) -> tuple[list[MessageBundle], int] | None:
        bundles: list[MessageBundle] = []
        position = 0
        for frame in self._frames:
            is_enough = sum(map(bundle_size_bytes, bundles)) > _READ_BYTES
            if bundles and (is_enough or len(bundles) + frame.bundles > max_bundles):
                break
            try:
                bundles += self._unpacked(frame)
            except FrameDamagedError as error:
                if not bundles:
                    _log.error("spool_damaged", count=frame.bundles, error=str(error))
                    self._drop(1, reason="damaged")
                break
            position = frame.id
        return (bundles, position) if bundles else None

    def _unpacked(self, frame: Frame) -> list[MessageBundle]:
        import cramjam  # noqa: PLC0415  # an agent without Kafka does not have it

        with self._errors():
            row = self._connection.execute(
                "SELECT crc32, body FROM frames WHERE id = ?", (frame.id,)
            ).fetchone()
        if row is None or zlib.crc32(row[1]) != row[0]:
            raise FrameDamagedError(f"frame {frame.id} is missing or has another checksum")
        try:
            bundles = _DECODER.decode(bytes(cramjam.zstd.decompress(row[1])))
        except (msgspec.MsgspecError, cramjam.DecompressionError) as error:
            raise FrameDamagedError(f"frame {frame.id} is of another version: {error}") from error
        if frame.boot_id == self._boot_id:
            return bundles
        # The present clock and that of an earlier boot cannot be compared.
        return [tuple(one._replace(boot_time_ns=None) for one in bundle) for bundle in bundles]

    def _drop_old(self) -> None:
        oldest_ms = self._now_ms() - self._settings.max_age_seconds * 1000
        # Frames of an earlier boot are at least as old as the current boot.
        old = takewhile(
            lambda frame: (frame.spooled_ms if frame.boot_id == self._boot_id else 0) < oldest_ms,
            self._frames,
        )
        if count := sum(1 for _ in old):
            self._drop(count, reason="age")

    def _drop(self, count: int, *, reason: str) -> None:
        """Drop the `count` oldest frames; count their bundles as lost unless they are in flight."""
        dropped = [self._frames.popleft() for _ in range(count)]
        SPOOL_DROPPED.labels(reason=reason).inc(self._count_lost(dropped))
        if dropped:
            self._delete(dropped[-1].id)

    def _delete(self, position: int) -> None:
        """Delete the frames up to a position from the database.

        If that fails, only count the error. After the next start of the agent, the frames are then
        sent again.
        """
        try:
            with self._errors():
                self._connection.execute("DELETE FROM frames WHERE id <= ?", (position,))
                if not self._frames:
                    # Free the space that an outage needed.
                    self._connection.executescript(_SHRINK)
        except DamagedError as error:
            self._start_over(error)
        except OSError as error:
            count_failure(error)
            if error.errno == errno.ENOSPC and not self._frames:
                # A full disk has no room to delete rows, but deleting the file frees its space.
                self.close()
                (self.path / FILE_NAME).unlink()
                self._begin_new()

    def _start_over(self, error: Exception) -> None:
        """Rename the database and start a new one; count bundles that are not in flight as lost."""
        lost = self._count_lost(self._frames)
        SPOOL_DROPPED.labels(reason="damaged").inc(lost)
        self._frames.clear()
        self.close()
        file = self.path / FILE_NAME
        if file.exists():
            file.rename(self.path / SET_ASIDE_NAME)
            _log.error("spool_damaged", count=lost, error=str(error), renamed_to=SET_ASIDE_NAME)
            SPOOL_FILES_SET_ASIDE.inc()
        self._begin_new()

    def _begin_new(self) -> None:
        (self.path / f"{FILE_NAME}-wal").unlink(missing_ok=True)
        self._connect()

    def _count_lost(self, frames: Sequence[Frame] | deque[Frame]) -> int:
        return sum(frame.bundles for frame in frames if frame.id > self._in_flight)

    @contextmanager
    def _retried(self) -> Iterator[None]:
        """Raise the disk's errors, so that the work is retried.

        If the database is damaged, or the disk has failed for a minute and is not full, start a new
        database.
        """
        try:
            yield
        except DamagedError as error:
            self._start_over(error)
        except BlockingIOError:  # another agent uses the database, so it is not damaged
            self._failing_since_ms = self._failing_since_ms or self._now_ms()
            raise
        except OSError as error:
            now_ms = self._now_ms()
            self._failing_since_ms = self._failing_since_ms or now_ms
            # A new database does not fit on a full disk either.
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if is_full or now_ms - self._failing_since_ms < GIVEN_UP_AFTER_MS:
                raise
            count_failure(error)
            self._start_over(error)
        self._failing_since_ms = None

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Convert SQLite's errors to `OSError` or `DamagedError`."""
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the lowest byte; others refine it
            if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise DamagedError(errno.EIO, str(error), str(self.path / FILE_NAME)) from error
            reason = _REASONS.get(code) or str(error)
            raise OSError(_ERRNO.get(code, errno.EIO), reason, str(self.path)) from error

    def _now_ms(self) -> int:
        return self._boottime_ns() // NS_PER_MS

    def _set_gauges(self) -> None:
        SPOOL_BYTES.set(self.size_bytes)
        SPOOL_TICKS.set(self.bundles)
        SPOOL_OLDEST_SECONDS.set(self._frames[0].oldest_ms / 1000 if self._frames else 0)


def _pack(bundles: Sequence[MessageBundle]) -> bytes:
    import cramjam  # noqa: PLC0415  # an agent without Kafka does not have it

    return bytes(cramjam.zstd.compress(msgspec.msgpack.encode(bundles), _LEVEL))


def count_failure(error: OSError) -> None:
    """Count a disk error by its name, such as ENOSPC."""
    SPOOL_FAILURES.labels(error=errno.errorcode.get(error.errno or 0, "unknown")).inc()
