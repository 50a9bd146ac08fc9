"""The disk under the spool: one node's folder, and the thread and the waits in which it is used.

Here lives the folder's name, its lock, its files and its free space; since when which of them
cannot be read; when a disk that refused is tried again; and a thread, so that a slow disk keeps
nothing else waiting, with a limit to its time. What stands in the files is not known here. Errors:
any method of the folder may raise `OSError`.

A file that cannot be read now is tried again, and given up in the end: a minute counts where it was
full of tries, and a failure after a pause without any begins anew.
"""

import asyncio
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import quote

from gpuledger.clock import NS_PER_SECOND
from gpuledger.keys import NodeId
from gpuledger.runtime import Backoff, RetryTimer


class Attempts:
    """One kind of work of the disk, such as its reads: its last error, and the wait after it."""

    def __init__(self, *, backoff: Backoff, now_seconds: Callable[[], float]) -> None:
        self._timer = RetryTimer(backoff)
        self._now_seconds = now_seconds
        self.error: OSError | None = None
        """What it refused, until it has worked."""

    @property
    def wait_seconds(self) -> float:
        """How long it is not to be asked."""
        return self._timer.wait_ns(self._now_ns()) / NS_PER_SECOND

    @property
    def is_due(self) -> bool:
        """Whether it has refused, and may be asked again now."""
        return self.error is not None and not self.wait_seconds

    def failed(self, error: OSError) -> None:
        """Record a refusal, and begin the wait after it."""
        self.error = error
        self._timer.record_attempt(self._now_ns())

    def worked(self) -> None:
        """Record that it worked."""
        self.error = None
        self._timer.reset()

    def skip_wait(self) -> None:
        """End the wait."""
        self._timer.skip_wait()

    def _now_ns(self) -> int:
        return round(self._now_seconds() * NS_PER_SECOND)


T = TypeVar("T")
HUNG_AFTER_SECONDS: Final = 30.0


class DiskHungError(OSError):
    """The disk gives no answer; a disk that answers with ETIMEDOUT is none of these."""


class IoThread:
    """One thread, made with the first work."""

    def __init__(self, *, hung_after_seconds: float = HUNG_AFTER_SECONDS) -> None:
        self._hung_after_seconds = hung_after_seconds
        self._thread: ThreadPoolExecutor | None = None

    async def run(self, work: Callable[[], T]) -> T:
        """Do blocking work; raises what it raises, and `DiskHungError` where it hangs.

        Work that was given up, or whose waiting was cancelled, goes on; what comes next waits.
        """
        # Nothing to spool, no thread: most agents never need it.
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="spool")
        done = asyncio.get_running_loop().run_in_executor(self._thread, work)
        deadline = asyncio.timeout(self._hung_after_seconds)
        try:
            async with deadline:
                return await done
        except TimeoutError as error:
            # What the work itself raises may be one as well: its errno is ETIMEDOUT.
            if not deadline.expired():
                raise
            reason = f"no answer within {self._hung_after_seconds:g} s"
            raise DiskHungError(errno.ETIMEDOUT, reason) from error

    def close(self) -> None:
        """Take no more work."""
        if self._thread is not None:
            # Python's exit would still wait for a disk that hangs: `end_process` does not let it.
            self._thread.shutdown(wait=False)


_SUFFIX: Final = ".spool"
_OURS_ALONE: Final = 0o700


class NoFolderError(FileNotFoundError):
    """The folder around the nodes' folders does not exist: nobody wants a spool."""


class SpoolFolder:
    """One folder for one process at a time."""

    def __init__(self, folder: Path, *, node: NodeId) -> None:
        # A folder for each node: what another node's agent left is not sent in this one's name.
        # No name of a cluster or a node has an underscore.
        self.path: Final = folder / f"{node.cluster}_{quote(node.node, safe='')}"
        self._lock: int | None = None

    @property
    def is_locked(self) -> bool:
        """Whether this process has it."""
        return self._lock is not None

    def lock(self) -> None:
        """Make the folder where it is missing, and keep other processes out until `unlock`.

        The folder around it is never made: where it is missing this raises `NoFolderError`.
        """
        parent = self.path.parent
        try:
            is_folder = stat.S_ISDIR(parent.stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            is_folder = False
        if not is_folder:
            raise NoFolderError(errno.ENOENT, "no such folder", str(parent))
        self.path.mkdir(mode=_OURS_ALONE, exist_ok=True)
        # A link in place of the folder would have this agent write wherever somebody likes.
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(self.path, flags)
        try:
            # The kernel frees it with the process, however that ends.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.access(self.path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "not writable", str(self.path))
        except BlockingIOError as error:
            os.close(lock)
            reason = "another agent uses it"
            raise BlockingIOError(errno.EWOULDBLOCK, reason, str(self.path)) from error
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
        # What is free for a process without rights: root's reserve is not the spool's.
        disk = os.statvfs(self.path)
        free_bytes = disk.f_bavail * disk.f_frsize
        if free_bytes < min_free_bytes:
            raise OSError(
                errno.ENOSPC,
                f"{free_bytes} bytes are free there, and spool.min_free_bytes leaves the last"
                f" {min_free_bytes} to others",
                str(self.path),
            )


GIVEN_UP_AFTER_MS: Final = 60_000
_LONGEST_BETWEEN_TRIES_MS: Final = 45_000  # a try takes 30 s at most, the wait after it 10 s


class UnreadableFiles:
    """The files that could not be read when they were last tried."""

    def __init__(self, *, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._since_ms: dict[Path, int] = {}
        self._tried_ms: dict[Path, int] = {}

    @property
    def are_awaited(self) -> bool:
        """Whether one of them may still turn out to be good; not for ever, as nobody may try."""
        since_ms = max(self._since_ms.values(), default=None)
        return since_ms is not None and self._now_ms() - since_ms < 2 * GIVEN_UP_AFTER_MS

    def raise_or_give_up(self, path: Path, error: OSError) -> None:
        """Raise the error of a file that is to be tried again; return once it is given up."""
        now_ms = self._now_ms()
        # Nobody tried for long: that the file was unreadable all that time is not known.
        if now_ms - self._tried_ms.get(path, now_ms) > _LONGEST_BETWEEN_TRIES_MS:
            self.forget(path)
        self._tried_ms[path] = now_ms
        if now_ms - self._since_ms.setdefault(path, now_ms) < GIVEN_UP_AFTER_MS:
            raise error
        self.forget(path)

    def forget(self, path: Path) -> None:
        """Record that a file was read, or is not among the spool's files any more."""
        self._since_ms.pop(path, None)
        self._tried_ms.pop(path, None)

    def keep(self, paths: Collection[Path]) -> None:
        """Forget all other files."""
        for path in self._since_ms.keys() - set(paths):
            self.forget(path)
