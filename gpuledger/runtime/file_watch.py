"""Whether files have changed since they were read: what credentials are read again by.

A file is told by what its folder says of it, never by its content, and is looked at when somebody
asks, at most once in a while. Its stamp is taken before it is read, so that a change in between is
seen at the next look. Reading is the caller's business, and so is what becomes of a mistake in it:
each change is told once.
"""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

LOOK_SECONDS: Final = 1.0
"""How long after a look the next one is, unless another time is asked for."""


class Stamp(NamedTuple):
    """What tells one state of a file from another."""

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
        look_seconds: float = LOOK_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the stamps; read the files only after that."""
        self._look_seconds, self._monotonic = look_seconds, monotonic
        self._stamps = {file: stamp_of(file) for file in files}
        self._looked_seconds = monotonic()

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
        """Return whether a file is another one than at the last look; look at most so often."""
        now_seconds = self._monotonic()
        if now_seconds - self._looked_seconds < self._look_seconds:
            return False
        self._looked_seconds = now_seconds
        stamps = {file: stamp_of(file) for file in self._stamps}
        has_changed = stamps != self._stamps
        self._stamps = stamps
        return has_changed


def stamp_of(file: Path) -> Stamp | None:
    """Return a file's stamp, that of the file a link leads to; `None` where there is none."""
    try:
        found = file.stat()
    except OSError:
        return None
    return Stamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
