"""Named checks that show whether a component can do its work. This module serves no HTTP.

An ongoing problem is reported only by its check: in `gpuledger_check_ok`, in `/readyz`, and with
one log line when the check starts to fail and one when it recovers. A retrying loop therefore only
calls `failed` and `ok`, and does not log the problem itself.

If the reason of a failure changes, for example because a restarted broker rejects the login, the
log has another line. Lines about a check that keeps failing and recovering are limited.
"""

import asyncio
import math
import re
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Final, Protocol

import structlog

from gpuledger.runtime.logs import Repeats
from gpuledger.runtime.process_metrics import CHECK_OK
from gpuledger.settings.secret import mask_addresses

CALM_SECONDS: Final = 60.0
"""How long a check must pass after a failure until another failure counts as a new one."""
MAX_REASONS: Final = 10
"""Maximum number of reasons logged for one failure."""
POLL_INTERVAL_SECONDS: Final = 1.0
_NUMBER: Final = re.compile(r"[0-9]+")
_log = structlog.get_logger(__name__)
_repeats: Final = Repeats()


class Cancellable(Protocol):
    """A scheduled call."""

    def cancel(self) -> None:
        """Cancel the call."""


Later = Callable[[float, Callable[[], None]], Cancellable | None]
"""Schedules a function after a delay in seconds; returns `None` if scheduling is impossible."""


class CheckLog:
    """Writes a check's log lines.

    The first failure and its end are logged immediately. A check that fails again within
    `CALM_SECONDS` is flapping: its recovery is logged only after it has passed for that long, with
    the number of failures in between.
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
        self._logged_seconds = -math.inf
        self._due: Cancellable | None = None

    def failed(self, detail: str) -> None:
        """Record that the check started to fail."""
        self._failures += 1
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if self._began_seconds is not None:
            return
        self._began_seconds = self._seconds()
        self._is_flapping = self._began_seconds - self._ended_seconds < CALM_SECONDS
        self._logged_seconds = self._began_seconds
        self._reasons = {_NUMBER.sub("0", detail)}
        _log.warning("check_failed", **self._facts, detail=detail)

    def still_fails(self, detail: Callable[[], str]) -> None:
        """Record that the check still fails; log a new reason, at most once a minute.

        Details that only differ in numbers, for example in a queue's length, have the same reason.
        """
        now_seconds = self._seconds()
        if now_seconds - self._logged_seconds < CALM_SECONDS or len(self._reasons) >= MAX_REASONS:
            return
        shown = detail()
        reason = _NUMBER.sub("0", shown)
        if reason not in self._reasons:
            self._logged_seconds = now_seconds
            self._reasons.add(reason)
            _log.warning("check_reason_changed", **self._facts, detail=shown)

    def recovered(self) -> None:
        """Record that the check passes, and log or schedule the line about the recovery.

        Does nothing if no failure was logged, or if the line is already scheduled. The latter
        happens if the check passed, then waited, and now passes again: waiting is not a failure.
        """
        if self._began_seconds is None or self._due is not None:
            return
        self._ended_seconds = self._seconds()
        if self._is_flapping:
            self._due = self._later(CALM_SECONDS, self._log_end)
        if self._due is None:
            self._log_end()

    def _log_end(self) -> None:
        """Log the recovery at the failure's level, so that a filter by level shows both."""
        failed_seconds = self._ended_seconds - (self._began_seconds or 0.0)
        _log.warning(
            "check_recovered",
            **self._facts,
            failed_seconds=round(failed_seconds, 3),
            count=self._failures,
        )
        self._due = self._began_seconds = None
        self._failures = 0


def _call_later(seconds: float, call: Callable[[], None]) -> Cancellable | None:
    try:
        return asyncio.get_running_loop().call_later(seconds, call)
    except RuntimeError:
        return None


class CheckSeverity(StrEnum):
    """How a failed check affects the component's readiness."""

    CRITICAL = "critical"
    """The component cannot do its work: not ready."""
    WARNING = "warning"
    """The component works with limitations: ready."""


Detail = str | Callable[[], str]
"""The text shown with a check, or a function that returns the current text."""


class Check:
    """One condition of readiness; it does not pass until `ok` is called."""

    def __init__(
        self,
        *,
        name: str = "",
        severity: CheckSeverity = CheckSeverity.CRITICAL,
        on_change: Callable[["Check"], None] | None = None,
        on_still_failing: Callable[["Check"], None] | None = None,
    ) -> None:
        self.name = name
        self.severity = severity
        self.is_ok = False
        self._detail: Detail = "starting"
        self._on_change = on_change
        self._on_still_failing = on_still_failing
        self.has_failed = False
        """Whether the last call was `failed`; false while the check is starting or waiting."""
        self._has_ended = False

    @property
    def detail(self) -> str:
        """The current text, with passwords in addresses masked."""
        return mask_addresses(self._detail if isinstance(self._detail, str) else self._detail())

    def ok(self, detail: Detail = "") -> None:
        """Record that the check passes.

        If `detail` is a function, it is called each time that the check is shown.
        """
        if self._has_ended and self.has_failed:
            return
        self._detail = detail
        self.has_failed = False
        if not self.is_ok:
            self.is_ok = True
            self._report()

    def failed(self, detail: Detail) -> None:
        """Record that the check fails, with the cause."""
        self._detail = detail
        self.is_ok = False
        if not self.has_failed:
            self.has_failed = True
            self._report()
        elif self._on_still_failing:
            self._on_still_failing(self)

    def waits(self, detail: Detail) -> None:
        """Record that the check does not pass yet, for example on a standby, but has not failed."""
        if self._has_ended and self.has_failed:
            return
        self._detail = detail
        self.has_failed = False
        if self.is_ok:
            self.is_ok = False
            self._report()

    def end(self) -> None:
        """Record that the component stops; a check that fails now stays failed."""
        self._has_ended = True

    def _report(self) -> None:
        if self._on_change:
            self._on_change(self)


class CheckParts:
    """One check for several parts that often fail together; it fails while any part fails.

    All parts share the check's log lines.
    """

    def __init__(self, check: Check) -> None:
        self._check = check
        self._details: dict[str, str] = {}
        """The detail of each part that currently fails."""

    def ok(self, name: str) -> None:
        """Record that this part passes."""
        self._details.pop(name, None)
        if not self._details:
            self._check.ok()

    def failed(self, name: str, detail: str) -> None:
        """Record that this part fails, with the cause."""
        self._details[name] = detail
        self._check.failed(self._describe)

    def _describe(self) -> str:
        """Return the failed parts and their reasons, each reason once: `a, b: timeout; c: …`."""
        names_of: dict[str, list[str]] = {}
        for name, detail in sorted(self._details.items()):
            names_of.setdefault(detail, []).append(name)
        return "; ".join(f"{', '.join(names)}: {detail}" for detail, names in names_of.items())


class Readiness:
    """A component's checks; it is ready if it has critical checks and all of them pass."""

    def __init__(self, **checks: Check) -> None:
        self._checks = checks
        self._periodic: list[tuple[Check, Callable[[], None]]] = []

    def add_periodic(self, look: Callable[[], None], *, check: Check) -> None:
        """Add a function that `run_periodic` calls to detect changes of the check's files."""
        self._periodic.append((check, look))

    async def run_periodic(self, *, every_seconds: float = POLL_INTERVAL_SECONDS) -> None:
        """Call all added functions every `every_seconds` until cancelled."""
        while True:
            await asyncio.sleep(every_seconds)
            for check, look in self._periodic:
                try:
                    look()
                except Exception:  # noqa: BLE001  # a bug in one function must not stop the others
                    if count := _repeats.count(("look", check.name)):
                        _log.exception("file_watch_failed", check=check.name, count=count)

    def check(self, name: str, *, severity: CheckSeverity = CheckSeverity.CRITICAL) -> Check:
        """Return the check with this name; the first call creates it with this severity."""
        if name not in self._checks:
            log = CheckLog(check=name, severity=severity.value)

            def report(check: Check) -> None:
                CHECK_OK.labels(check=check.name, severity=check.severity).set(check.is_ok)
                if check.has_failed:
                    log.failed(check.detail)
                elif check.is_ok:
                    log.recovered()

            self._checks[name] = Check(
                name=name,
                severity=severity,
                on_change=report,
                on_still_failing=lambda check: log.still_fails(lambda: check.detail),
            )
            CHECK_OK.labels(check=name, severity=severity).set(0)
        return self._checks[name]

    def end(self) -> None:
        """Record that the component stops; checks that fail now stay failed."""
        for check in self._checks.values():
            check.end()

    def is_ready(self) -> bool:
        """Return whether all critical checks pass; without any, the component is not ready."""
        critical = [c for c in self._checks.values() if c.severity is CheckSeverity.CRITICAL]
        return bool(critical) and all(check.is_ok for check in critical)

    def failed_checks(self) -> list[str]:
        """Return the names of the checks that have failed."""
        return [name for name, check in self._checks.items() if check.has_failed]

    def report(self) -> dict[str, object]:
        """Return the content of `/readyz`: `{ready, checks: {name: {ok, severity, detail}}}`."""
        checks = {
            name: {"ok": check.is_ok, "severity": check.severity.value, "detail": check.detail}
            for name, check in self._checks.items()
        }
        return {"ready": self.is_ready(), "checks": checks}
