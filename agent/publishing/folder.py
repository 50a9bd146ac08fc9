"""The folder of one node in the spool's folder: its name, its lock, its files, its free space.

What stands in the files is not known here. Errors: any method may raise `OSError`.
"""

import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import Final
from urllib.parse import quote

_SUFFIX: Final = ".spool"
_OURS_ALONE: Final = 0o700


class NoFolderError(FileNotFoundError):
    """The folder around the nodes' folders does not exist: nobody wants a spool."""


class SpoolFolder:
    """One folder for one process at a time."""

    def __init__(self, folder: Path, *, node: str) -> None:
        # A folder for each node: what another node's agent left is not sent in this one's name.
        self.path: Final = folder / _file_name(node)
        self._lock: int | None = None

    @property
    def is_locked(self) -> bool:
        """Whether this process has it."""
        return self._lock is not None

    def lock(self) -> None:
        """Make the folder where it is missing, and keep other processes out until `unlock`.

        The folder around it is never made: where it is missing this raises `NoFolderError`.
        """
        self._refuse_without_parent()
        self.path.mkdir(mode=_OURS_ALONE, exist_ok=True)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(self.path, flags)
        try:
            self._lock_or_refuse(lock)
        except OSError:
            os.close(lock)
            raise
        self._lock = lock

    def unlock(self) -> None:
        """Let others in."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def is_there(self) -> bool:
        """Return whether the folder that is locked is still the one at the path."""
        if self._lock is None:
            return False
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self._lock))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # it cannot be looked at now, which is no reason to count it as lost
            return True

    def files(self) -> list[Path]:
        """Return the spool's files in their order; a folder that cannot be read is not empty."""
        paths = [Path(entry.path) for entry in os.scandir(self.path)]
        return sorted(path for path in paths if path.suffix == _SUFFIX and path.stem.isdecimal())

    def file(self, number: int) -> Path:
        """Return the path of the file of a number; a later number is a later file."""
        return self.path / f"{number:012d}{_SUFFIX}"

    def refuse_below(self, min_free_bytes: int) -> None:
        """Raise `OSError` (ENOSPC) where the file system has less free space than that."""
        disk = os.statvfs(self.path)
        free_bytes = disk.f_bavail * disk.f_frsize
        if free_bytes < min_free_bytes:
            raise OSError(
                errno.ENOSPC,
                f"{free_bytes} bytes are free there, and spool.min_free_bytes leaves the last"
                f" {min_free_bytes} to others",
                str(self.path),
            )

    def _refuse_without_parent(self) -> None:
        parent = self.path.parent
        try:
            is_folder = stat.S_ISDIR(parent.stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            is_folder = False
        if not is_folder:
            raise NoFolderError(errno.ENOENT, "no such folder", str(parent))

    def _lock_or_refuse(self, lock: int) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            reason = "another agent uses it"
            raise BlockingIOError(errno.EWOULDBLOCK, reason, str(self.path)) from error
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "not writable", str(self.path))


def _file_name(node: str) -> str:
    quoted = quote(node, safe="")
    return quoted if quoted.strip(".") else f"%{quoted}"
