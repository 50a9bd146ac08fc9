"""The line of bundles on disk: what could not be sent, oldest first, within its bounds.

Here live the folder, its files in their order, and what is dropped when they are too many or too
old. All of it blocks: `send_queue` runs it in a thread. Errors: `OSError`.

The wall clock may be set while ticks wait, and starts wrong on many machines, so no age is counted
by it: a leap of an hour must not drop an hour's ticks. What this boot has written is as old as the
time since boot says (CLOCK_BOOTTIME, suspended time included). What an earlier boot has written is
at least as old as this boot is, and counts as no older. What was written in the first form of the
file, which names no boot, ages from when it was found.

A file that cannot be read now may be good, and its ticks would be lost where newer ones are sent
before them: it is tried again for a minute. A file that somebody has removed is lost at once.
Likewise a folder that cannot be locked or listed: it may hold something, unless it does not exist.
"""

import errno
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from gpuledger.clock import NS_PER_MS
from gpuledger.keys import NodeId
from gpuledger_agent.metrics import (
    SPOOL_BYTES,
    SPOOL_DROPPED,
    SPOOL_FAILURES,
    SPOOL_FILES_SET_ASIDE,
    SPOOL_OLDEST_SECONDS,
    SPOOL_TICKS,
    SPOOL_TORN,
    SPOOL_WRITTEN,
)
from gpuledger_agent.publish.message_bundle import MessageBundle, bundle_size_bytes
from gpuledger_agent.publish.spool_file import (
    MAX_FILE_BYTES,
    START,
    DamagedError,
    ForeignFileError,
    ScanStoppedError,
    Segment,
    pack_frame,
    same_boot,
)
from gpuledger_agent.publish.spool_folder import NoFolderError, SpoolFolder, UnreadableFiles
from gpuledger_agent.settings import SpoolSettings

_SEGMENT_BYTES: Final = 4 * 2**20
_FEWEST_SEGMENTS: Final = 8  # so that dropping the oldest one drops an eighth at most
_READ_BYTES: Final = 2**20
_SET_ASIDE: Final = ".foreign"
_log = structlog.get_logger(__name__)


class SpoolPosition(NamedTuple):
    """A position in the spool: all that stands before it is meant."""

    segment: int
    position: int


class Spool:
    """The folder of one node in a spool's folder."""

    def __init__(
        self,
        settings: SpoolSettings,
        *,
        node: NodeId,
        boot_id: str,
        boottime_ns: Callable[[], int],
        segment_bytes: int = _SEGMENT_BYTES,
    ) -> None:
        self._settings = settings
        self._folder = SpoolFolder(Path(settings.folder), node=node)
        self._boot_id = boot_id
        self._boottime_ns = boottime_ns
        self._found_ms = 0
        self._segment_bytes = min(segment_bytes, settings.max_bytes // _FEWEST_SEGMENTS)
        self._segments: list[Segment] = []
        self._unreadable = UnreadableFiles(now_ms=self._now_ms)
        self._is_passed_over = False
        self._is_scan_stopped = False
        self._is_partly_scanned = False
        self._writing: Segment | None = None
        self._last_number = 0
        self._in_flight: SpoolPosition | None = None

    @property
    def path(self) -> Path:
        """The node's folder."""
        return self._folder.path

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits here, nor in a file or folder that cannot be read now."""
        return not (self._segments or self._is_partly_scanned or self._unreadable.are_awaited)

    @property
    def bundles(self) -> int:
        """How many bundles wait here."""
        return sum(segment.bundles for segment in self._segments)

    @property
    def size_bytes(self) -> int:
        """How much room its files take."""
        return sum(segment.size_bytes for segment in self._segments)

    def open(self) -> None:
        """Find what an earlier agent left; once it has succeeded, calling again does nothing.

        A folder that somebody has removed or exchanged since is begun anew.
        """
        if self._folder.is_locked:
            if self._folder.is_there():
                return
            self._lose(self._segments, "the folder was removed")
            self._folder.unlock()
        self._lock()
        try:
            self._load()
        except BaseException:
            self._folder.unlock()
            raise
        self._set_gauges()

    def stop_scan(self) -> None:
        """Let `open` leave the rest of the files to the next process; safe from another thread.

        Then nothing is read any more, as it may be younger than what was left; what is appended
        stands behind all of it.
        """
        self._is_scan_stopped = True

    def close(self) -> None:
        """Let another process open it."""
        self._folder.unlock()

    def drop_late(self) -> None:
        """Drop all that waits here, counted: newer bundles were sent before it was found."""
        _log.error("late_spool_dropped", count=self.bundles, folder=str(self._folder.path))
        for segment in tuple(self._segments):
            self._drop(segment, reason="late")
        self._set_gauges()

    def append(self, bundles: Sequence[MessageBundle]) -> SpoolPosition:
        """Write bundles behind all others, whole or not at all; return the position behind them."""
        self.open()
        # Somebody may have made room by hand: what was lost by that is counted.
        there = set(self._folder.files())
        removed = [segment for segment in self._segments if segment.path not in there]
        self._lose(removed, "the file was removed")
        self._folder.refuse_below(self._settings.min_free_bytes)
        frame = pack_frame(bundles, spooled_ms=self._now_ms())
        # What is too old goes first, so that it makes room before anything younger has to.
        self._drop_old()
        max_bytes = self._settings.max_bytes - len(frame) - START
        if max_bytes < 0 or START + len(frame) > MAX_FILE_BYTES:
            path = str(self._folder.path)
            raise OSError(errno.EFBIG, "larger than the whole spool may be", path)
        while self._segments and self.size_bytes > max_bytes:
            self._drop(self._segments[0], reason="bytes")
        position = self._append(frame)
        SPOOL_WRITTEN.inc(len(bundles))
        self._set_gauges()
        return position

    def set_in_flight(self, position: SpoolPosition) -> None:
        """Record that what lies before a position is in flight: dropped, it is not lost."""
        self._in_flight = position

    def read(self, *, max_bundles: int) -> tuple[list[MessageBundle], SpoolPosition] | None:
        """Return the oldest bundles without forgetting them; `None` where there are none.

        They are `max_bundles` or fewer, and not many bytes, or one frame. A frame that is damaged,
        and a file that was removed, are left out, counted. Raises `OSError` where the oldest file
        cannot be read: what is behind it waits, for a minute at most.
        """
        self.open()
        if self._is_partly_scanned:
            return None
        self._drop_old()
        found = None
        while self._segments and not found and not self._is_partly_scanned:
            found = self._read_from(self._segments[0], max_bundles)
        self._set_gauges()
        return found

    def ack(self, position: SpoolPosition) -> None:
        """Record that everything before a position was sent."""
        self._in_flight = None
        while self._segments and self._segments[0].number <= position.segment:
            segment = self._segments[0]
            is_last = segment.number == position.segment
            while segment.frames and not (is_last and segment.frames[0].end > position.position):
                segment.frames.popleft()
            if segment.frames:
                self._tolerate(segment.save_position)
                break
            self._remove(segment)
        self._set_gauges()

    def _lock(self) -> None:
        """Lock the folder, and look into it; where that fails it is awaited for a minute."""
        try:
            self._folder.lock()
            self._folder.files()
        except NoFolderError:
            self._unreadable.forget(self._folder.path)
            raise
        except OSError as error:
            self._folder.unlock()
            if not self._is_passed_over:
                # Raises while it is awaited; once it is given up that is logged, and never again.
                self._unreadable.raise_or_give_up(self._folder.path, error)
                self._is_passed_over = True
                _log.error("spool_skipped", folder=str(self._folder.path), error=str(error))
            raise
        self._unreadable.forget(self._folder.path)
        self._is_passed_over = False

    def _load(self) -> None:
        paths = self._folder.files()
        self._unreadable.keep(paths)
        self._is_partly_scanned = False
        loaded = []
        try:
            for path in paths:
                segment = self._load_one(path)
                if segment is not None:
                    loaded.append(segment)
        except ScanStoppedError:
            # What is not scanned may be older than what is written now: nothing is read before it.
            self._is_partly_scanned = True
        # Never lower than before: a number that was lent is no other file's.
        self._last_number = max([self._last_number, *(int(path.stem) for path in paths)])
        self._segments = loaded
        self._found_ms = self._now_ms()
        # All of it was sent, and the process ended before it could remove the file.
        for segment in [loaded_segment for loaded_segment in loaded if not loaded_segment.frames]:
            self._remove(segment)
        if not self.is_empty:
            _log.info("spool_found", count=self.bundles, folder=str(self._folder.path))

    def _load_one(self, path: Path) -> Segment | None:
        """Return a file with its frames; `None` where it is given up, which is counted."""
        segment = None
        try:
            try:
                segment = Segment.load(path, is_stopped=lambda: self._is_scan_stopped)
            except ForeignFileError as error:
                # Kept for somebody to look at; not among the spool's files any more.
                aside = path.rename(path.with_suffix(_SET_ASIDE))
                SPOOL_FILES_SET_ASIDE.inc()
                _log.error("spool_file_renamed", file=aside.name, error=str(error))
        except OSError as error:
            # Also where the file cannot be renamed: it is tried again as a whole.
            self._unreadable.raise_or_give_up(path, error)
            count_failure(error)
            _log.error("spool_damaged", file=path.name, count=0, error=str(error))
            return None
        self._unreadable.forget(path)
        if segment and segment.torn_bytes:
            SPOOL_TORN.inc()
            _log.warning("spool_torn", file=path.name, cut_bytes=segment.torn_bytes)
        return segment

    def _read_from(
        self, segment: Segment, max_bundles: int
    ) -> tuple[list[MessageBundle], SpoolPosition] | None:
        bundles: list[MessageBundle] = []
        end = segment.start
        try:
            for frame in segment.frames:
                is_enough = sum(map(bundle_size_bytes, bundles)) > _READ_BYTES
                if bundles and (is_enough or len(bundles) + frame.head.bundles > max_bundles):
                    break
                bundles += segment.read(frame)
                end = frame.end
        except DamagedError as error:
            if not bundles:
                self._drop_damaged_part(segment, error)
                return None
        except FileNotFoundError:
            if not bundles:
                self._lose([segment], "the file was removed")
                return None
        except OSError as error:
            if not bundles:
                self._unreadable.raise_or_give_up(segment.path, error)
                count_failure(error)
                self._lose([segment], error)
                self._tolerate(segment.delete)
                return None
        self._unreadable.forget(segment.path)
        return bundles, SpoolPosition(segment.number, end)

    def _drop_damaged_part(self, segment: Segment, error: DamagedError) -> None:
        """Drop what is broken of the first frame; whole frames found in it take its place."""
        damaged = segment.frames[0]
        try:
            parts = segment.split(damaged, is_stopped=lambda: self._is_scan_stopped)
        except ScanStoppedError:
            # The next process looks for them: what is behind is not sent before.
            self._is_partly_scanned = True
            return
        segment.frames.popleft()
        segment.frames.extendleft(reversed(parts))
        count = self._count_not_in_flight(segment, first_frames=1)
        _log.error("spool_damaged", file=segment.path.name, count=count, error=str(error))
        self._drop_first_frame(segment, reason="damaged")

    def _lose(self, segments: Sequence[Segment], error: object) -> None:
        """Count what cannot be read any more; the files are left alone."""
        for segment in tuple(segments):
            count = self._count_not_in_flight(segment)
            _log.error("spool_damaged", file=segment.path.name, count=count, error=str(error))
            SPOOL_DROPPED.labels(reason="damaged").inc(count)
            self._forget(segment)
        self._set_gauges()

    def _drop_old(self) -> None:
        oldest_ms = self._now_ms() - self._settings.max_age_seconds * 1000
        while self._segments:
            segment = self._segments[0]
            spooled_ms = segment.frames[0].head.spooled_ms
            if segment.boot_id is None:
                # The first form of the file names no boot: it ages from when it was found.
                spooled_ms = self._found_ms
            elif not same_boot(segment.boot_id, self._boot_id):
                # It is at least as old as this boot, and counts as no older.
                spooled_ms = 0
            if spooled_ms >= oldest_ms:
                break
            self._drop_first_frame(segment, reason="age")

    def _drop_first_frame(self, segment: Segment, *, reason: str) -> None:
        SPOOL_DROPPED.labels(reason=reason).inc(self._count_not_in_flight(segment, first_frames=1))
        segment.frames.popleft()
        if not segment.frames:
            self._remove(segment)

    def _now_ms(self) -> int:
        return self._boottime_ns() // NS_PER_MS

    def _drop(self, segment: Segment, *, reason: str) -> None:
        SPOOL_DROPPED.labels(reason=reason).inc(self._count_not_in_flight(segment))
        self._remove(segment)

    def _count_not_in_flight(self, segment: Segment, *, first_frames: int | None = None) -> int:
        """Return how many bundles are lost with a file, or its first frames: nobody has them."""
        held = self._in_flight
        return sum(
            frame.head.bundles
            for frame in islice(segment.frames, first_frames)
            # What is in flight will be sent, or brought to the disk again by whoever has it.
            if held is None or SpoolPosition(segment.number, frame.end) > held
        )

    def _append(self, frame: bytes) -> SpoolPosition:
        segment = self._writing
        if segment is None or segment.size_bytes + len(frame) > self._segment_bytes:
            # Counted on also where it fails: a file that may be there is not made again.
            self._last_number += 1
            path = self._folder.file(self._last_number)
            segment = Segment.create(path, boot_id=self._boot_id)
        try:
            end = segment.append(frame)
        except OSError:
            if segment is not self._writing:
                self._tolerate(segment.delete)
            raise
        if segment is not self._writing:
            self._writing = segment
            self._segments.append(segment)
        return SpoolPosition(segment.number, end)

    def _remove(self, segment: Segment) -> None:
        self._forget(segment)
        self._tolerate(segment.delete)

    def _forget(self, segment: Segment) -> None:
        self._segments.remove(segment)
        self._unreadable.forget(segment.path)
        if segment is self._writing:
            self._writing = None

    def _tolerate(self, action: Callable[[], None]) -> None:
        """Do what is only for a later start: where it fails, that one sends something twice."""
        try:
            action()
        except OSError as error:
            count_failure(error)

    def _set_gauges(self) -> None:
        SPOOL_BYTES.set(self.size_bytes)
        SPOOL_TICKS.set(self.bundles)
        oldest_ms = self._segments[0].frames[0].head.oldest_ms if self._segments else 0
        SPOOL_OLDEST_SECONDS.set(oldest_ms / 1000)


def count_failure(error: OSError) -> None:
    """Count what the disk refused, by the name of its error."""
    SPOOL_FAILURES.labels(error=errno.errorcode.get(error.errno or 0, "unknown")).inc()
