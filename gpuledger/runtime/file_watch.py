"""Whether files have changed since they were read: what credentials are read again by.

A file is known by its entry in its folder, never by its content, and is looked at on request, at
most once in a while. Its stamp is taken before it is read, so that a change in between is seen at
the next look. Reading is the caller's business, and so is what becomes of a mistake in it: each
change is reported once.
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
"""How long after a look the next one is, unless another time is asked for."""


class Stamp(NamedTuple):
    """What differs between two states of a file."""

    device: int
    inode: int
    size_bytes: int
    modified_ns: int
    changed_ns: int
    """When its owner, its rights or its content changed last: a file may become readable alone."""


class FileWatch:
    """The stamps of some files as of the last look."""

    def __init__(
        self,
        files: Iterable[Path],
        *,
        poll_interval_seconds: float = POLL_INTERVAL_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the stamps; read the files only after that."""
        self._poll_interval_seconds, self._monotonic = poll_interval_seconds, monotonic
        self._stamps = {file: stamp_of(file) for file in files}
        self._checked_seconds = monotonic()

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that are watched, each once."""
        return tuple(self._stamps)

    def follow(self, files: Iterable[Path]) -> None:
        """Watch these from now on; one that is watched already keeps its stamp."""
        self._stamps = {
            file: self._stamps[file] if file in self._stamps else stamp_of(file) for file in files
        }

    def has_changed(self) -> bool:
        """Return whether a file has changed since the last look; look at most so often."""
        now_seconds = self._monotonic()
        if now_seconds - self._checked_seconds < self._poll_interval_seconds:
            return False
        self._checked_seconds = now_seconds
        stamps = {file: stamp_of(file) for file in self._stamps}
        has_changed = stamps != self._stamps
        self._stamps = stamps
        return has_changed


def stamp_of(file: Path) -> Stamp | None:
    """Return a file's stamp, that of the file a link leads to; `None` where it cannot be had."""
    try:
        found = file.stat()
    except OSError:
        return None
    return Stamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class FilesInForce:
    """The files that were read last without a mistake, for credentials and the web configuration.

    With a mistake in them what was read before stays in force, which a check shows until they are
    mended. It shows likewise certificates in force that have expired, or are not valid yet.
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
        """Record what was read, whose certificates have these validities.

        `read_again` reads the files and puts them in force, or raises `UserError` and changes
        nothing; `on_read` is called with the files when it has.
        """
        self._read_again, self._watch, self._check = read_again, watch, check
        self._on_read, self._time_seconds = on_read, time_seconds
        self._mistake = ""
        self._ends: dict[str, float] = {}
        self._enter(validities)
        self._report()

    def look(self) -> None:
        """Read the files again where they have changed, at most once a second."""
        if not self._watch.has_changed():
            self._report()  # a certificate may have expired meanwhile
            return
        try:
            self._enter(self._read_again())
        except UserError as error:
            self._mistake = f"{error}; what was read before stays in force"
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
            self._check.ok(", ".join(map(str, self._watch.files)) or "none of them in a file")
