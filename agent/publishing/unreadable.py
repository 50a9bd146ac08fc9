"""Since when which files of the spool cannot be read: each is tried again, and given up in the end.

A minute counts where it was full of tries: a failure after a pause without any begins anew.
Which file is read, and what becomes of one that is given up, is not known here.
"""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

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
