"""Detects changed files, so that credentials and the web configuration are read again.

A file's stamp contains its metadata, never its content. Files are only checked on request, and at
most once per interval. The stamp is taken before the file is read, so that the next check detects a
change during reading. The caller reads the files and handles errors in them. Each change is
reported once.
"""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

from gpuledger.certificates import Validity
from gpuledger.errors import UserError
from gpuledger.runtime.process_metrics import CERTIFICATE_NOT_AFTER
from gpuledger.runtime.readiness import Check

POLL_INTERVAL_SECONDS: Final = 1.0
"""Default minimum interval between two checks."""


class Stamp(NamedTuple):
    """A file's metadata; it differs after each change of the file."""

    device: int
    inode: int
    size_bytes: int
    modified_ns: int
    changed_ns: int
    """Time of the last change of content, owner or permissions, which may make a file readable."""


class FileWatch:
    """Detects changes of files by comparing their stamps with those of the last check."""

    def __init__(
        self,
        files: Iterable[Path],
        *,
        poll_interval_seconds: float = POLL_INTERVAL_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the stamps; the caller must read the files after this."""
        self._poll_interval_seconds, self._monotonic = poll_interval_seconds, monotonic
        self._stamps = {file: stamp_of(file) for file in files}
        self._checked_seconds = monotonic()

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the watched files without duplicates."""
        return tuple(self._stamps)

    def follow(self, files: Iterable[Path]) -> None:
        """Watch these files from now on; an already watched file keeps its stamp."""
        self._stamps = {
            file: self._stamps[file] if file in self._stamps else stamp_of(file) for file in files
        }

    def has_changed(self) -> bool:
        """Return whether a file has changed since the last check.

        Returns false without checking if the last check is less than `poll_interval_seconds` ago.
        """
        now_seconds = self._monotonic()
        if now_seconds - self._checked_seconds < self._poll_interval_seconds:
            return False
        self._checked_seconds = now_seconds
        stamps = {file: stamp_of(file) for file in self._stamps}
        has_changed = stamps != self._stamps
        self._stamps = stamps
        return has_changed


def stamp_of(file: Path) -> Stamp | None:
    """Return a file's stamp, following links; `None` if its metadata cannot be read."""
    try:
        found = file.stat()
    except OSError:
        return None
    return Stamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class FilesInForce:
    """Reads the files of credentials or of the web configuration again when they change.

    If the new files are invalid, the previous version stays in force, and a check fails until the
    files are fixed. The check also fails if a certificate in force has expired or is not yet valid.
    """

    def __init__(
        self,
        read_again: Callable[[], Iterable[Validity]],
        *,
        validities: Iterable[Validity],
        watch: FileWatch,
        check: Check,
        on_read: Callable[[list[str]], None],
        time_seconds: Callable[[], float] = time.time,
    ) -> None:
        """Record that the files have been read once; `validities` are those of the certificates.

        `read_again` reads the files and puts them in force, or raises `UserError` without changing
        anything. After a success, `on_read` is called with the files.
        """
        self._read_again, self._watch, self._check = read_again, watch, check
        self._on_read, self._time_seconds = on_read, time_seconds
        self._mistake = ""
        self._ends: dict[str, float] = {}
        self._enter(validities)
        self._report()

    def look(self) -> None:
        """Read the files again if the watch has found a change, and update the check."""
        if not self._watch.has_changed():
            self._report()  # a certificate may have expired in the meantime
            return
        try:
            self._enter(self._read_again())
        except UserError as error:
            self._mistake = f"{error}; the previous version stays in force"
            self._report()
        else:
            self._mistake = ""
            self._report()
            self._on_read(list(map(str, self._watch.files)))

    def _enter(self, validities: Iterable[Validity]) -> None:
        self._validities = tuple(validities)
        ends: dict[str, float] = {}
        for validity in self._validities:
            file = str(validity.file)
            ends[file] = min(ends.get(file, validity.end_seconds), validity.end_seconds)
        for file in self._ends.keys() - ends.keys():
            CERTIFICATE_NOT_AFTER.remove(file)
        for file, end_seconds in ends.items():
            CERTIFICATE_NOT_AFTER.labels(file=file).set(end_seconds)
        self._ends = ends

    def _report(self) -> None:
        now_seconds = self._time_seconds()
        untimely = (validity.mistake_at(now_seconds) for validity in self._validities)
        mistakes = [mistake for mistake in (self._mistake, *untimely) if mistake]
        if mistakes:
            self._check.failed("; ".join(mistakes))
        else:
            self._check.ok(", ".join(map(str, self._watch.files)) or "not read from files")
