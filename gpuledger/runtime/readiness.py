"""Whether a deployable can do its work now, as named checks. Nothing here serves them.

A check is the one place where a lasting state is reported: `gpuledger_check_ok` follows it,
`/readyz` shows it, and the log has one line when it begins to fail and one when that has ended. A
loop that tries again therefore only calls `failed` and `ok`; it logs nothing of the outage itself.

A failure whose reason turns out to be another one, as where a broker that was restarted refuses the
login, has a further line. A check that fails and recovers without end does not write without end.
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
"""How long a check must have held before a further failure is news of its own."""
MAX_REASONS: Final = 10
"""So many reasons are logged of one failure."""
POLL_INTERVAL_SECONDS: Final = 1.0
_NUMBER: Final = re.compile(r"[0-9]+")
_log = structlog.get_logger(__name__)
_repeats: Final = Repeats()


class Cancellable(Protocol):
    """A call that is due later."""

    def cancel(self) -> None:
        """Leave it out."""


Later = Callable[[float, Callable[[], None]], Cancellable | None]
"""Takes seconds and a call; returns `None` where there is nobody to make it later."""


class CheckLog:
    """The log lines of one check.

    The first failure and its end are logged at once. A check that fails again within `CALM_SECONDS`
    is flapping: its next end is logged only after it has held for so long, with the number of
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
        self._logged_seconds = -math.inf
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
        self._logged_seconds = self._began_seconds
        self._reasons = {_NUMBER.sub("0", detail)}
        _log.warning("check_failed", **self._facts, detail=detail)

    def still_fails(self, detail: Callable[[], str]) -> None:
        """Record that it fails yet: a reason that was not logged is, once a minute at most.

        Details that differ in numbers alone, as in how much waits, have the same reason.
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
        """Record that the check holds; without a failure before it that is no news.

        Nor is it while the end is due already: a check that only waited meanwhile did not fail.
        """
        if self._began_seconds is None or self._due is not None:
            return
        self._ended_seconds = self._seconds()
        if self._is_flapping:
            self._due = self._later(CALM_SECONDS, self._log_end)
        if self._due is None:
            self._log_end()

    def _log_end(self) -> None:
        """Write the end at the level of the begin, so that readers of one see both."""
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
    """What a failed check means for whether the deployable is ready."""

    CRITICAL = "critical"
    """It does not do its work: not ready."""
    WARNING = "warning"
    """It serves, with less than it should: ready, and said."""


Detail = str | Callable[[], str]
"""What is shown beside a check: a text, or what returns the text of the moment."""


class Check:
    """One thing that has to be so; it has not been shown to be until `ok` is called."""

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
        """Whether it was said to have failed; one that only starts has not."""
        self._has_ended = False

    @property
    def detail(self) -> str:
        """The text beside it, as of now, with the passwords of addresses masked."""
        return mask_addresses(self._detail if isinstance(self._detail, str) else self._detail())

    def ok(self, detail: Detail = "") -> None:
        """Record that it is so; a function as `detail` is asked whenever the check is shown."""
        if self._has_ended and self.has_failed:
            return
        self._detail = detail
        self.has_failed = False
        if not self.is_ok:
            self.is_ok = True
            self._report()

    def failed(self, detail: Detail) -> None:
        """Record that it is not so, and why."""
        self._detail = detail
        self.is_ok = False
        if not self.has_failed:
            self.has_failed = True
            self._report()
        elif self._on_still_failing:
            self._on_still_failing(self)

    def waits(self, detail: Detail) -> None:
        """Record that it is not so yet, as nobody has failed: a start, a read-back, a stand-by."""
        if self._has_ended and self.has_failed:
            return
        self._detail = detail
        self.has_failed = False
        if self.is_ok:
            self.is_ok = False
            self._report()

    def end(self) -> None:
        """Record that the work ends: a failure stands, as giving up what failed mends nothing."""
        self._has_ended = True

    def _report(self) -> None:
        if self._on_change:
            self._on_change(self)


class CheckParts:
    """A check of several things that one cause makes fail together: one line of the log for all.

    It is failed while one of them is.
    """

    def __init__(self, check: Check) -> None:
        self._check = check
        self._details: dict[str, str] = {}
        """What each that failed last time said."""

    def ok(self, name: str) -> None:
        """Record that this one is so."""
        self._details.pop(name, None)
        if not self._details:
            self._check.ok()

    def failed(self, name: str, detail: str) -> None:
        """Record that this one is not so, and why."""
        self._details[name] = detail
        self._check.failed(self._describe)

    def _describe(self) -> str:
        """Return each reason once, behind the names of what it is said of."""
        names_of: dict[str, list[str]] = {}
        for name, detail in sorted(self._details.items()):
            names_of.setdefault(detail, []).append(name)
        return "; ".join(f"{', '.join(names)}: {detail}" for detail, names in names_of.items())


class Readiness:
    """The checks of a deployable; it is ready when there are critical ones and none fails."""

    def __init__(self, **checks: Check) -> None:
        self._checks = checks
        self._periodic: list[tuple[Check, Callable[[], None]]] = []

    def add_periodic(self, look: Callable[[], None], *, check: Check) -> None:
        """Have the files of a check looked at each second, as they change unasked."""
        self._periodic.append((check, look))

    async def run_periodic(self, *, every_seconds: float = POLL_INTERVAL_SECONDS) -> None:
        """Call each second, until cancelled, all that was added."""
        while True:
            await asyncio.sleep(every_seconds)
            for check, look in self._periodic:
                try:
                    look()
                except Exception:  # noqa: BLE001  # a mistake of ours in one must not end the others
                    if count := _repeats.count(("look", check.name)):
                        _log.exception("file_watch_failed", check=check.name, count=count)

    def check(self, name: str, *, severity: CheckSeverity = CheckSeverity.CRITICAL) -> Check:
        """Return the check of that name; the first call makes it, with its severity."""
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
        """Record that the work ends: no check that fails then is said to have recovered."""
        for check in self._checks.values():
            check.end()

    def is_ready(self) -> bool:
        """Return whether no critical check fails; without any nothing is known of its own work."""
        critical = [c for c in self._checks.values() if c.severity is CheckSeverity.CRITICAL]
        return bool(critical) and all(check.is_ok for check in critical)

    def report(self) -> dict[str, object]:
        """Return what `/readyz` shows: `{ready, checks: {name: {ok, severity, detail}}}`."""
        checks = {
            name: {"ok": check.is_ok, "severity": check.severity.value, "detail": check.detail}
            for name, check in self._checks.items()
        }
        return {"ready": self.is_ready(), "checks": checks}
