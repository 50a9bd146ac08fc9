"""What one Alertmanager is sent next, of all that it is due.

What is new goes first. Behind it come, a batch of each in turn, what is sent again, what was
refused together with others, and what was refused alone: none of them holds up another. Pure.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from gpuledger_sinks.alerts.active_alerts import ActiveAlert, Now

MAX_TOGETHER: Final = 256
"""How many alerts are posted in one request."""
_EARLY: Final = 2
"""What is due after half of the pause goes along with what is due: else alerts that began one
after another would have a request each for as long as they stand."""

_ByLimit = dict[int, list[ActiveAlert]]


@dataclass(slots=True)
class _Due:
    """What is due, by why it is."""

    new: list[ActiveAlert] = field(default_factory=list)
    """What it has never answered, and what was never refused."""
    again: list[tuple[int, ActiveAlert]] = field(default_factory=list)
    """What it has taken, or is to be sent soon, by when it answered last."""
    doubted: _ByLimit = field(default_factory=lambda: defaultdict(list))
    """What it has not answered, being refused together with others, by how many may be posted."""
    refused: _ByLimit = field(default_factory=lambda: defaultdict(list))
    """What it has answered and then refused, by the same."""
    since_ns: int | None = None
    """Since when the oldest is due of all that it does not refuse."""

    def wait_since(self, since_ns: int) -> None:
        """Record since when another one is due."""
        self.since_ns = since_ns if self.since_ns is None else min(self.since_ns, since_ns)


class SendOrder:
    """Chooses what one Alertmanager is sent next."""

    def __init__(self, receiver: str, *, resend_ns: int) -> None:
        """Take the Alertmanager's name, and how long after an answer an alert is due again."""
        self._receiver, self._resend_ns = receiver, resend_ns
        self._turn = 0
        self.late_ns = 0
        """For how long the oldest that was due has waited, when something was chosen last."""

    def is_due(self, alerts: Iterable[ActiveAlert], *, now: Now) -> bool:
        """Return whether there is anything to post now."""
        return any(self._kinds(alerts, now))

    def next(self, alerts: Iterable[ActiveAlert], *, now: Now) -> list[ActiveAlert]:
        """Return what is to be posted together now; nothing where nothing is due."""
        new, *kinds = self._kinds(alerts, now)
        if new:
            return new
        for turn in range(self._turn, self._turn + len(kinds)):
            if kind := kinds[turn % len(kinds)]:
                self._turn = turn + 1
                return kind
        return []

    def _kinds(self, alerts: Iterable[ActiveAlert], now: Now) -> list[list[ActiveAlert]]:
        """Return a batch of what is new, and one of each other kind."""
        due = self._sort(alerts, now.monotonic_ns)
        again = sorted(due.again, key=lambda answered: answered[0])
        if again and now.monotonic_ns - again[0][0] < self._resend_ns:
            # Some are due soon, none is now: they wait for the first of them.
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
    """Return a batch of those that may be posted with most others: most of them are good."""
    if not by_limit:
        return []
    limit = max(by_limit)
    return by_limit[limit][:limit]
