"""What the log says of a check: a line when a failure begins, and one when it has ended.

A failure whose reason turns out to be another one, as where a broker that was restarted refuses the
login, is said in a further line. Here lives what keeps a check that fails and recovers without end
from writing without end.
"""

import asyncio
import math
import re
import time
from collections.abc import Callable
from typing import Final, Protocol

import structlog

CALM_SECONDS: Final = 60.0
"""How long a check must have held before a further failure is news of its own."""
MAX_REASONS: Final = 10
"""So many reasons are told of one failure."""
_NUMBER: Final = re.compile(r"[0-9]+")
_log = structlog.get_logger(__name__)


class Cancellable(Protocol):
    """A call that is due later."""

    def cancel(self) -> None:
        """Leave it out."""


Later = Callable[[float, Callable[[], None]], Cancellable | None]
"""Takes seconds and a call; returns `None` where there is nobody to make it later."""


class CheckLog:
    """The log lines of one check.

    The first failure and its end are told at once. A check that fails again within `CALM_SECONDS`
    is flapping: its next end is told only after it has held for so long, with the number of
    failures in between.
    """

    def __init__(
        self,
        *,
        check: str,
        severity: str,
        seconds: Callable[[], float] | None = None,
        later: Later | None = None,
    ) -> None:
        self._facts = {"check": check, "severity": severity}
        self._seconds = seconds or time.monotonic
        self._later = later or _call_later
        self._began_seconds: float | None = None
        self._ended_seconds = -math.inf
        self._is_flapping = False
        self._failures = 0
        self._reasons: set[str] = set()
        self._told_seconds = -math.inf
        self._due: Cancellable | None = None

    def failed(self, detail: str) -> None:
        """Record that the check began to fail."""
        self._failures += 1
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if self._began_seconds is not None:
            return
        self._began_seconds = self._seconds()
        self._is_flapping = self._began_seconds - self._ended_seconds < CALM_SECONDS
        self._told_seconds = self._began_seconds
        self._reasons = {_reason_of(detail)}
        _log.warning("check_failed", **self._facts, detail=detail)

    def still_fails(self, detail: Callable[[], str]) -> None:
        """Record that it fails yet: a reason that was not told is, once a minute at most.

        Details that differ in numbers alone, as in how much waits, have the same reason.
        """
        now_seconds = self._seconds()
        if now_seconds - self._told_seconds < CALM_SECONDS or len(self._reasons) >= MAX_REASONS:
            return
        said = detail()
        if _reason_of(said) not in self._reasons:
            self._told_seconds = now_seconds
            self._reasons.add(_reason_of(said))
            _log.warning("check_reason_changed", **self._facts, detail=said)

    def recovered(self) -> None:
        """Record that the check holds; without a failure before it that is no news.

        Nor is it while the end is due already: a check that only waited meanwhile did not fail.
        """
        if self._began_seconds is None or self._due is not None:
            return
        self._ended_seconds = self._seconds()
        if self._is_flapping:
            self._due = self._later(CALM_SECONDS, self._tell_end)
        if self._due is None:
            self._tell_end()

    def _tell_end(self) -> None:
        """Write the end at the level of the begin, so that who reads one reads both."""
        failed_seconds = self._ended_seconds - (self._began_seconds or 0.0)
        _log.warning(
            "check_recovered",
            **self._facts,
            failed_seconds=round(failed_seconds, 3),
            count=self._failures,
        )
        self._due = self._began_seconds = None
        self._failures = 0


def _reason_of(detail: str) -> str:
    return _NUMBER.sub("0", detail)


def _call_later(seconds: float, call: Callable[[], None]) -> Cancellable | None:
    try:
        return asyncio.get_running_loop().call_later(seconds, call)
    except RuntimeError:
        return None
