"""Files that people and Kubernetes put in place, read such that none of them holds up who reads.

In the place of a file there may be a FIFO that nobody writes to, a device without an end, a file of
gigabytes, or a mount whose server is away. What is read here are passwords, certificates and
configurations, in the event loop; so only regular files are read, up to a bound, and each call to
the system is made in a thread that is given up when it takes too long.
"""

import errno
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

MAX_BYTES: Final = 64 * 1024
"""Of a secret or a configuration."""
MAX_PEM_BYTES: Final = 4 * 1024 * 1024
"""Of certificates: a system's bundle of authorities is some 200 KiB."""
ANSWER_SECONDS: Final = 3.0
"""How long a file system may take to answer."""
# Of a FIFO no writer is waited for.
_FLAGS: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY

T = TypeVar("T")


def read_small_file(
    file: Path,
    *,
    max_bytes: int = MAX_BYTES,
    answer_seconds: float = ANSWER_SECONDS,
    opening: Callable[[Path, int], int] = os.open,
) -> bytes:
    """Return the content of a regular file.

    Raises OSError, its `strerror` made for people, where there is none, it is something else, it is
    larger, or its file system does not answer within `answer_seconds`; ValueError for a path that
    is none.
    """
    return answer_in_time(file, lambda: _read(opening(file, _FLAGS), max_bytes), answer_seconds)


def read_open_file(file: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Return what `read_small_file` does, in this thread, however long the storage takes."""
    return _read(os.open(file, _FLAGS), max_bytes)


def stat_in_time(file: Path) -> os.stat_result:
    """Return what the folder says of a file; raises OSError as `read_small_file` does."""
    return answer_in_time(file, file.stat, ANSWER_SECONDS)


def _read(opened: int, max_bytes: int) -> bytes:
    with os.fdopen(opened, "rb") as content:
        mode = os.fstat(opened).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        read = content.read(max_bytes + 1)
    if len(read) > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {max_bytes // 1024} KiB")
    return read


class _Call(Generic[T]):
    """A call in a thread of its own, for which the end of the process does not wait."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._outcome: tuple[T] | BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="file", daemon=True)
        self._thread.start()

    def is_over(self, *, within_seconds: float) -> bool:
        self._thread.join(within_seconds)
        return not self._thread.is_alive()

    def outcome(self) -> T:
        """Return what the call returned, or raise what it raised; once it is over."""
        if isinstance(self._outcome, tuple):
            return self._outcome[0]
        raise self._outcome or RuntimeError("the call is not over")

    def _run(self) -> None:
        try:
            self._outcome = (self._call(),)
        except BaseException as error:  # noqa: BLE001  # raised where the outcome is read
            self._outcome = error


_hanging: Final[dict[Path, _Call[Any]]] = {}
"""What has not answered yet: a file's storage is asked again once it has, so that it costs one
thread however often it is asked for."""


def answer_in_time(file: Path, call: Callable[[], T], answer_seconds: float) -> T:
    """Return what a call to the storage of a file or a folder returns, or raise what it raises.

    Raises OSError where that does not answer within `answer_seconds`, or has not since it was last
    asked.
    """
    earlier = _hanging.pop(file, None)
    if earlier and not earlier.is_over(within_seconds=0.0):
        _hanging[file] = earlier
        raise _silent(answer_seconds)
    made = _Call(call)
    if made.is_over(within_seconds=answer_seconds):
        return made.outcome()
    _hanging[file] = made
    raise _silent(answer_seconds)


def _silent(seconds: float) -> OSError:
    return TimeoutError(errno.ETIMEDOUT, f"its storage did not answer within {seconds:g} s")
