"""Selects the alerts to send next to one Alertmanager.

New alerts are sent first. Then three other kinds take turns, one batch each, so that no kind delays
another:

- accepted alerts that are due again
- alerts that were only rejected as part of a batch, so that they may be valid
- alerts that were rejected individually, or in a batch after they had been accepted

The last two kinds are sent in smaller batches, because the rejection of a batch does not show which
of its alerts are invalid. Pure.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from gpuledger_sinks.alerts.active_alerts import ActiveAlert, Now

MAX_TOGETHER: Final = 256
"""Maximum number of alerts per request."""
_EARLY: Final = 2
"""An answered alert may join a batch of due alerts after the resend interval divided by this
number. Otherwise alerts that began one after another would each need their own request for as long
as they are active."""

_ByLimit = dict[int, list[ActiveAlert]]


@dataclass(slots=True)
class _Due:
    """The alerts that are due, by reason."""

    new: list[ActiveAlert] = field(default_factory=list)
    """Alerts that the receiver has neither accepted nor rejected since their last change."""
    again: list[tuple[int, ActiveAlert]] = field(default_factory=list)
    """Alerts that the receiver accepted and that are due now or soon, with the time of their last
    answer."""
    doubted: _ByLimit = field(default_factory=lambda: defaultdict(list))
    """Alerts that were only rejected as part of a batch, by their maximum batch size."""
    refused: _ByLimit = field(default_factory=lambda: defaultdict(list))
    """Alerts that were rejected individually, or in a batch after they had been accepted, by their
    maximum batch size."""
    since_ns: int | None = None
    """Time since which the oldest alert has been due, without the alerts in `refused`."""

    def wait_since(self, since_ns: int) -> None:
        """Record that another alert has been due since this time."""
        self.since_ns = since_ns if self.since_ns is None else min(self.since_ns, since_ns)


class SendOrder:
    """Selects the alerts to send next to one Alertmanager."""

    def __init__(self, receiver: str, *, resend_ns: int) -> None:
        """Send to the Alertmanager `receiver`; an answered alert is due again after `resend_ns`."""
        self._receiver, self._resend_ns = receiver, resend_ns
        self._turn = 0
        self.late_ns = 0
        """How long the oldest due alert had waited at the last selection, in nanoseconds."""

    def is_due(self, alerts: Iterable[ActiveAlert], *, now: Now) -> bool:
        """Return whether any alert is due now."""
        return any(self._kinds(alerts, now))

    def next(self, alerts: Iterable[ActiveAlert], *, now: Now) -> list[ActiveAlert]:
        """Return the alerts to post together now; empty if none is due."""
        new, *kinds = self._kinds(alerts, now)
        if new:
            return new
        for turn in range(self._turn, self._turn + len(kinds)):
            if kind := kinds[turn % len(kinds)]:
                self._turn = turn + 1
                return kind
        return []

    def _kinds(self, alerts: Iterable[ActiveAlert], now: Now) -> list[list[ActiveAlert]]:
        """Return one batch of each kind of due alerts, new alerts first; a batch may be empty."""
        due = self._sort(alerts, now.monotonic_ns)
        again = sorted(due.again, key=lambda answered: answered[0])
        if again and now.monotonic_ns - again[0][0] < self._resend_ns:
            # No accepted alert is due now. Alerts that are due soon wait until the first of them is
            # due.
            again = []
        self.late_ns = 0 if due.since_ns is None else now.monotonic_ns - due.since_ns
        return [
            due.new[:MAX_TOGETHER],
            [alert for _, alert in again[:MAX_TOGETHER]],
            _largest(due.doubted),
            _largest(due.refused),
        ]

    def _sort(self, alerts: Iterable[ActiveAlert], now_ns: int) -> _Due:
        due = _Due()
        for alert in alerts:
            answered_ns = alert.answered_ns(self._receiver)
            limit = alert.changes.max_together.get(self._receiver)
            if answered_ns is None:
                (due.new if limit is None else due.doubted[limit]).append(alert)
                due.wait_since(alert.changed_ns)
            elif limit is None and now_ns - answered_ns >= self._resend_ns // _EARLY:
                due.again.append((answered_ns, alert))
                due.wait_since(answered_ns + self._resend_ns)
            elif limit is not None and now_ns - answered_ns >= self._resend_ns:
                due.refused[limit].append(alert)
        return due


def _largest(by_limit: _ByLimit) -> list[ActiveAlert]:
    """Return a batch of the alerts that were in the fewest rejected batches, so most are valid.

    `by_limit` has the alerts by their maximum batch size, which is halved when a batch is rejected.
    """
    if not by_limit:
        return []
    limit = max(by_limit)
    return by_limit[limit][:limit]
